"""What `--dry-run` says: of the finalists their peaks beside the closed form's, of one plan every message."""

from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ..core.errors import DrumlineError, InputError, TraceError
from ..core.units import format_bytes
from .common import is_job
from .plan_sections import Section

if TYPE_CHECKING:
    from ..core.job import Job
    from ..costs import Estimate
    from ..plans import Plan
    from ..runtime.dry_run import DryRun, Rank


class Finalists:
    """Dry-runs the plans that a search asks about, and remembers what came out."""

    def __init__(self, target: str, batch: int | None, device: str) -> None:
        job = job_of(target)
        self._job = job if batch is None else dataclasses.replace(job, batch_size=batch)
        self._device = device
        self._runs: dict[str, tuple[DryRun, Estimate]] = {}
        self._failed: dict[str, str] = {}
        self._unknown: dict[str, str] = {}

    def __call__(self, plan: Plan, estimate: Estimate) -> str:
        """Why a plan is not to be proposed, or nothing."""
        from ..runtime.dry_run import dry_run

        name = str(plan)
        try:
            found = dry_run(self._job, plan, device=self._device)
        except DrumlineError as e:
            # a model that asks for values says nothing of a plan that runs it as it is
            unknown = isinstance(e, TraceError) and not plan.splits_model
            (self._unknown if unknown else self._failed)[name] = e.what
            return self._failed.get(name, "")
        self._runs[name] = found, estimate
        if found.peak > estimate.memory_limit and plan.offload == "none":  # without a GPU, nothing is offloaded here
            self._failed[name] = (
                f"its peak is {format_bytes(found.peak)}, and {format_bytes(estimate.memory_limit)} are there"
            )
        return self._failed.get(name, "")

    @property
    def section(self) -> Section:
        """What to print, and the key of the JSON document."""
        value = {
            "runs": [
                {
                    "plan": name,
                    "peak_bytes": run.peak,
                    "closed_form_bytes": e.memory_bytes,
                    "seconds": run.seconds,
                    "messages": sum(len(r.messages) for r in run.ranks),
                    "ranks": [r.rank for r in run.ranks],
                    "notes": list(run.notes),
                }
                for name, (run, e) in self._runs.items()
            ],
            "dropped": self._failed,
            "unknown": self._unknown,
        }
        return Section("dry_run", value, lambda _: "\n".join(self._lines()))

    def _lines(self) -> list[str]:
        lines = ["Dry run of the finalists: the peak of live tensors, beside the closed form's"]
        for name, (run, e) in self._runs.items():
            off = e.memory_bytes / run.peak - 1
            lines.append(f"  {name}: {format_bytes(run.peak)}, closed form {format_bytes(e.memory_bytes)} ({off:+.0%})")
        lines += [f"  dropped {name}: {why}" for name, why in self._failed.items()]
        return [*lines, *(f"  not run, {name}: {why}" for name, why in self._unknown.items())]


def job_of(target: str) -> Job:
    """A job; a profile has no model to run."""
    from ..core.job import Job

    if not is_job(target):
        raise InputError(
            f"--dry-run with {target}", rule="a dry run runs the model: it needs a job, path.py or path.py:name"
        )
    return Job.load(target)


def text_of(run: DryRun) -> str:
    """For a person: what each kind of rank holds and sends."""
    lines = [f"{run.plan}: one step on {run.world} rank{'s' if run.world > 1 else ''}, as on a {run.device} device"]
    for rank in run.ranks:
        lines += ["", *_rank_lines(rank)]
    return "\n".join([*lines, *(f"note: {note}" for note in run.notes)])


def _rank_lines(rank: Rank) -> list[str]:
    parts = (
        ("parameters", rank.parameters),
        ("buffers", rank.buffers),
        ("gradients", rank.gradients),
        ("optimizer", rank.optimizer),
        ("batch", rank.batch),
    )
    held = ", ".join(f"{name} {format_bytes(n)}" for name, n in parts if n)
    host = f"; in host memory {format_bytes(rank.host)}" if rank.host else ""
    lines = [f"rank {rank.rank}: peak {format_bytes(rank.peak)} in {rank.peak_phase or 'the step'}{host}", f"  {held}"]
    counts = Counter((m.phase, m.name, m.bytes, m.ranks) for m in rank.messages)
    for (phase, name, size, ranks), n in counts.items():
        times = f" x {n}" if n > 1 else ""
        lines.append(f"  {phase or 'between'}: {name} {format_bytes(size)}{times}, {_ranks_text(name, ranks)}")
    return lines if rank.messages else [*lines, "  no messages"]


def _ranks_text(name: str, ranks: tuple[int, ...]) -> str:
    if name in ("send", "receive"):
        return f"rank {ranks[0]} to {ranks[1]}"
    if len(ranks) > 2 and len({b - a for a, b in pairwise(ranks)}) == 1:
        step = ranks[1] - ranks[0]
        return f"ranks {ranks[0]} to {ranks[-1]}" + (f" by {step}" if step > 1 else "")
    return f"ranks {', '.join(map(str, ranks))}"


def json_of(run: DryRun) -> Any:
    """The file form."""
    from ..core import files

    return files.to_plain(run)
