"""Dry runs of a search's finalists: the engine's own step on fake tensors, with its peak memory and messages."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from ..core.errors import DrumlineError, InputError, TraceError
from ..core.units import format_bytes
from .inputs import describe, is_job, load_job

if TYPE_CHECKING:
    from ..core.job import Job
    from ..costs import Estimate
    from ..plans import Plan
    from ..runtime.dry_run import DryRun
    from .inputs import ModelInput


class FinalistDryRuns:
    """Dry-runs the plans that a search asks about, and keeps the results."""

    def __init__(self, target: ModelInput, batch: int | None, device: str) -> None:
        job = job_to_dry_run(target)
        self._job = job if batch is None else dataclasses.replace(job, batch_size=batch)
        self._device = device
        self.runs: dict[str, tuple[DryRun, Estimate]] = {}
        """By plan: the dry run and the estimate."""
        self.dropped: dict[str, str] = {}
        """By plan: why it is not proposed."""
        self.unknown: dict[str, str] = {}
        """By plan: why it could not be run. It is proposed all the same."""

    def __call__(self, plan: Plan, estimate: Estimate) -> str:
        """Why a plan should not be proposed, or nothing."""
        from ..runtime.dry_run import dry_run

        name = str(plan)
        try:
            run = dry_run(self._job, plan, device=self._device)
        except DrumlineError as e:
            # a model that reads values fails under every plan, also under those that run it unsplit
            unknown = isinstance(e, TraceError) and not plan.splits_model
            (self.unknown if unknown else self.dropped)[name] = e.what
            return self.dropped.get(name, "")
        self.runs[name] = run, estimate
        if run.peak > estimate.memory_limit and plan.offload == "none":  # without a GPU nothing is offloaded here
            self.dropped[name] = f"its peak is {format_bytes(run.peak)} of {format_bytes(estimate.memory_limit)}"
        return self.dropped.get(name, "")

    def to_json(self) -> dict[str, Any]:
        """For a JSON document."""
        runs = [
            {
                "plan": name,
                "peak_bytes": run.peak,
                "closed_form_bytes": e.memory_bytes,
                "seconds": run.seconds,
                "messages": sum(len(r.messages) for r in run.ranks),
                "ranks": [r.rank for r in run.ranks],
                "notes": list(run.notes),
            }
            for name, (run, e) in self.runs.items()
        ]
        return {"runs": runs, "dropped": self.dropped, "unknown": self.unknown}


def job_to_dry_run(target: ModelInput) -> Job:
    """The job; a profile has no model to run."""
    if not is_job(target):
        raise InputError(
            f"--dry-run with {describe(target)}",
            rule="a dry run runs the model: it needs a job, path.py or path.py:name",
        )
    return load_job(target)
