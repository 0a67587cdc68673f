"""Rewrite the two tables of planning.md that count published runs: the reserve, and which plans are ties.

    python docs/paste_planning.py published_runs.csv published_runs_bulk.csv

Predictions are those of the shipped constants; in the table of the reserve without waits of hosts, which price full
devices.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from drumline.costs.fitted import load_constants
from drumline.validation import read_runs, validate
from drumline.validation.errors import job_of
from drumline.validation.published_run import PublishedRun
from drumline.validation.run_columns import predict, run_columns

DOCUMENT = Path(__file__).with_name("planning.md")
DIFFERENCES = (0.0, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, float("inf"))
GIGABYTES = (40, 50, 60, 70, 80)
FAR = 3.0
"""Times its prediction from which on a run counts as slow."""


def pairs_table(path: str) -> str:
    """How often the run of a pair that is predicted to be faster was faster."""
    result = validate(path)
    jobs: dict[tuple[object, ...], list[tuple[float, float]]] = {}
    for run, predicted in zip(result.runs, result.seconds, strict=True):
        if run.seconds is not None:
            jobs.setdefault(job_of(run), []).append((float(predicted), run.seconds))
    pairs = [pair for rows in jobs.values() for pair in itertools.combinations(rows, 2) if pair[0][1] != pair[1][1]]
    lines = [
        f"{len(pairs):,} pairs of published runs differ in their layout alone, and in their times:",
        "",
        "| predicted difference | pairs | the one predicted to be faster was faster |",
        "| --- | ---: | ---: |",
    ]
    for low, high in itertools.pairwise(DIFFERENCES):
        right = [(p < q) == (a < b) for (p, a), (q, b) in pairs if low <= max(p, q) / min(p, q) - 1 < high]
        words = f"above {low:.0%}" if high > 1 else f"{100 * low:g} to {high:.0%}"
        lines.append(f"| {words} | {len(right)} | {sum(right) / len(right):.0%} |")
    return "\n".join(lines)


def memory_table(path: str) -> str:
    """Measured over predicted step by peak memory, of the sweep whose hosts wait."""
    runs = [r for r in read_runs(path)[0] if r.software.host_waits and r.seconds and r.memory]
    predicted = predict(run_columns(runs), replace(load_constants(), waits=None))[0]
    ratios = [((r.memory or 0.0) / 1e9, (r.seconds or 0.0) / float(s)) for r, s in zip(runs, predicted, strict=True)]
    lines = [
        f"| peak memory, of {len(runs):,} runs | runs | measured step over predicted: median "
        f"| at least {FAR:g} times the prediction |",
        "| --- | ---: | ---: | ---: |",
    ]
    for low, high in itertools.pairwise(GIGABYTES):
        band = [ratio for size, ratio in ratios if low <= size < high]
        lines.append(f"| {low} to {high} GB | {len(band)} | {median(band):.1f} | {sum(r >= FAR for r in band)} |")
    high = [r for r in runs if r.memory and r.memory >= 1e9 * GIGABYTES[-2]]
    times = sorted(times for r in high if (times := slower_than_half(r, runs)) is not None)
    lines += [
        "",
        f"{len(times)} of the {len(high)} runs above {GIGABYTES[-2]} GB were also made with half the micro-batch: they "
        f"took {', '.join(f'{x:.1f}' for x in times)} times as long.",
    ]
    return "\n".join(lines)


def slower_than_half(run: PublishedRun, runs: Sequence[PublishedRun]) -> float | None:
    """Time of a run over that of the same layout with half the micro-batch; None if there is none."""

    def layout(r: PublishedRun) -> tuple[object, ...]:
        return (job_of(r), r.tp, r.pp, r.dp, r.zero, r.virtual, r.recompute)

    halves = [r for r in runs if layout(r) == layout(run) and 2 * r.micro_batch_size == run.micro_batch_size]
    return run.seconds / halves[0].seconds if run.seconds and halves and halves[0].seconds else None


def pasted(document: str, tables: dict[str, str]) -> str:
    """Replace the tables of the document."""
    for name, table in tables.items():
        pattern = re.compile(rf"(<!-- {name} -->)\n.*?<!-- end -->", re.DOTALL)
        document = pattern.sub(lambda m, table=table: f"{m[1]}\n{table}\n<!-- end -->", document)  # type: ignore[misc]
    return document


if __name__ == "__main__":
    tables = {"pairs": pairs_table(sys.argv[1]), "reserve": memory_table(sys.argv[2])}
    DOCUMENT.write_text(pasted(DOCUMENT.read_text(encoding="utf-8"), tables), encoding="utf-8")
