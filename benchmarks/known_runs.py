"""Well-known training runs: what was published, what is predicted for that layout, and what `plan` chooses instead.

    python benchmarks/known_runs.py          # a Markdown table, which docs/paste_known_runs.py pastes
    python benchmarks/known_runs.py --json

Transformers are predicted as `drumline validate` predicts published runs, by the shipped constants; most of these runs
are part of their fit. Convolutional nets, vision transformers and BERT are priced by the cost model of `plan`.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from drumline.clusters import load
from drumline.core.errors import DoesNotFit
from drumline.core.units import format_seconds
from drumline.costs import cost_model
from drumline.models import zoo
from drumline.planner import search
from drumline.plans import Plan
from drumline.validation.result import validate

TABLE = Path(__file__).with_name("known_runs.csv")
WITHIN = 0.15
"""Errors beyond this are explained."""
EXPLAINED = {
    "GPT-3 175B": "an estimate of its authors, by the rate of other runs",
    "BERT-L, 8 A100": "the published run fuses its kernels by hand, and predicts masked tokens only",
    "ResNet-50, 8 A100": "the published run has channels-last images and fused kernels, this one neither",
    "Llama 3 8B": "the GPUs have a limit of 500 W, and whether attention ran on newer kernels is not stated",
    "Llama 3 70B": "MaxText: XLA's kernels differ from those of the other runs",
    "Llama 3 405B": "the overlap of messages is not published, and the stages per rank are assumed",
    "Mixtral 8x7B": "the overlap of its messages to experts is not published",
    "DeepSeek-V3": "DualPipe hides nearly all messages to experts behind compute, by kernels of its own",
}
"""Why a prediction may be further off, by run; printed only where it is."""


@dataclasses.dataclass(frozen=True)
class KnownRun:
    """One run; seconds per step."""

    name: str
    source: str
    layout: str
    published: float | None
    predicted: float
    choice: str
    chosen: float | None

    @property
    def error(self) -> float | None:
        """Relative error of the prediction."""
        return self.predicted / self.published - 1 if self.published else None


_EXAMPLES = "NVIDIA DeepLearningExamples, AMP"
OPERATORS = (  # name, source, zoo name, cluster, batch, micro-batches, published samples per second
    ("ResNet-50, 8 A100", _EXAMPLES, "resnet50", "dgx-a100", 2048, 1, 16621.0),
    ("ResNet-50, 8 H100", "none", "resnet50", "dgx-h100", 2048, 1, None),
    ("ViT-L, 8 A100", "none", "vit:large", "dgx-a100", 1024, 1, None),
    ("BERT-L, 8 A100", f"{_EXAMPLES}, sequences of 512", "bert:large", "dgx-a100", 32768, 128, 1657.0),
)
"""Runs that the operator model prices in 16 bits, all as eight replicas."""


def transformers() -> Iterator[KnownRun]:
    """The runs of the table, in its order."""
    result = validate(TABLE)
    with TABLE.open() as f:
        rows = {row["source_row"]: row for row in csv.DictReader(f)}
    for run, seconds in zip(result.runs, result.seconds, strict=True):
        row = rows[run.name]
        parts = [f"{run.ranks} {run.sheet.type}", f"tp={run.tp}", f"pp={run.pp}", f"dp={run.dp}"]
        parts += [f"virtual={run.virtual}"] if run.virtual > 1 else []
        parts += [f"ep={run.ep}"] if run.ep > 1 else []
        parts += [f"zero={run.zero}"] if run.zero else []
        choice, chosen = (
            choose(row["zoo"], row["cluster"], run.ranks, run.batch, run.sequence) if row["zoo"] else ("", None)
        )
        yield KnownRun(run.name, run.source, " ".join(parts), run.seconds, float(seconds), choice, chosen)


def operators() -> Iterator[KnownRun]:
    """The runs that the operator model prices."""
    for name, source, model, cluster, batch, micro, rate in OPERATORS:
        profile, machines = zoo.profile(model, batch_size=batch), load(cluster).with_devices(8)
        plan = Plan(dp=8, micro=micro, precision="bf16")
        seconds = cost_model(profile, machines, plan.precision).estimate(plan).step_seconds
        choice, chosen = choose(model, cluster, 8, batch, None)
        layout = f"8 replicas, micro={micro}" if micro > 1 else "8 replicas"
        yield KnownRun(name, source, layout, batch / rate if rate else None, seconds, choice, chosen)


def choose(model: str, cluster: str, devices: int, batch: int, sequence: int | None) -> tuple[str, float | None]:
    """Ask `plan` for its choice on the same machines, in bf16; returns the plan and its predicted time."""
    profile = zoo.profile(model, batch_size=batch, sequence=sequence)
    try:
        answer, estimates = search(profile, load(cluster).with_devices(devices), brief=True)
    except DoesNotFit:
        return "nothing fits", None
    best = answer.candidates[0].plan
    return str(best), estimates[str(best)].step_seconds


def markdown(runs: list[KnownRun]) -> str:
    """The table, and the reasons of errors beyond 15%."""
    lines = [
        "| run | published layout | published | predicted | error | this engine would run | predicted |",
        "| --- | --- | ---: | ---: | ---: | --- | ---: |",
    ]
    for r in runs:
        published = format_seconds(r.published) if r.published else "-"
        error = f"{100 * r.error:+.0f}%" if r.error is not None else "-"
        chosen = format_seconds(r.chosen) if r.chosen else "-"
        plan = f"`{r.choice}`" if r.chosen else r.choice or "not in the zoo"
        lines.append(
            f"| {r.name} | {r.layout} | {published} | {format_seconds(r.predicted)} | {error} | {plan} | {chosen} |"
        )
    lines += ["", "Sources: " + "; ".join(f"{r.name}: {r.source}" for r in runs) + "."]
    far = [r for r in runs if r.error is not None and abs(r.error) > WITHIN]
    if far:
        lines += ["", "Beyond 15%:", ""]
        lines += [f"- {r.name}, {100 * (r.error or 0):+.0f}%: {EXPLAINED[r.name]}." for r in far]
    return "\n".join(lines)


if __name__ == "__main__":
    every = [*transformers(), *operators()]
    if "--json" in sys.argv:
        print(json.dumps([dataclasses.asdict(r) | {"error": r.error} for r in every], indent=1))
    else:
        print(markdown(every))
