"""Timelines of real runs laid over their simulation: step times, and the critical path of both.

    python benchmarks/timelines.py [--rounds 5] [--steps 30] [--output build/timelines] [--paste]

Trains examples/gpt.py on this machine under six plans, in shuffled turns: data parallelism, ZeRO-3, two pipeline
schedules, tensor parallelism, and a hybrid of replicas and stages on four ranks. Every run has the timeline of one
measured step and the simulated one; `drumline report` of the run folders draws them over each other. Their critical
paths are aligned, too (timeline_paths.py): `same path` is the share of the step in which both wait for the same work in
the same order, `equally long` the share in which they also do so for the same share of their steps. The last column is
how far the same record agrees with the simulation of another plan, the nearest of those whose simulated path is a
different one. A run records one of its steps, so all are medians over the rounds. Runs that are complete in the output
folder are not run again.

Bars: step times within 15% on average; every path the same in at least 80% of the step, and in more than with another
plan. Expected on an idle machine: step times within 10% for two ranks, up to 20% for four ranks on two cores; 95% of
the path without a pipeline, where it is a forward and a backward, and 80 to 90% with one, whose ranks wait longer for
messages while both cores compute.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from split_contest.page import paste
from timeline_paths import agreement, align

PLANS = (
    "dp=2",
    "dp=2,zero=3",
    "pp=2,micro=4,schedule=1f1b",
    "pp=2,micro=4,schedule=zero-bubble",
    "tp=2",
    "dp=2,pp=2,micro=2",
)
JOB = Path(__file__).parents[1] / "examples" / "gpt.py"
PAGE = Path(__file__).parents[1] / "docs" / "log" / "cpu.md"
BOUND = 0.15
LEAST_AGREEMENT = 0.8
"""Share of the step in which the measured and the simulated critical path must be the same. Those of two plans
with different schedules, stages or micro-batches agree in less (tests/test_benchmarks_timelines.py)."""


def main() -> int:
    import drumline as dl
    from drumline.reports.run import Run

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--output", default="build/timelines")
    parser.add_argument("--paste", action="store_true")
    given = parser.parse_args()
    runs: dict[str, list[Any]] = {plan: [] for plan in PLANS}
    for i in range(given.rounds):
        for plan in random.Random(i).sample(PLANS, len(PLANS)):
            folder = Path(given.output) / f"{plan.replace(',', '-').replace('=', '')}-{i}"
            if (folder / "run.json").is_file():
                run = Run.load(folder)
            else:
                run = dl.train(str(JOB), plan, steps=given.steps, output=folder, overwrite=True, corrections=False)
                dl.report(run)
            runs[plan].append(run)
            print(
                f"{plan}: {1e3 * run.step_seconds:.1f} ms, predicted {1e3 * run.estimate.step_seconds:.1f} ms",
                flush=True,
            )
    lines, holds = table(runs)
    print("\n".join(lines))
    if given.paste:
        paste("timelines", lines, "pasted by `python benchmarks/timelines.py --paste`", PAGE)
    return 0 if holds else 1


def table(runs: dict[str, list[Any]]) -> tuple[list[str], bool]:
    """The rows, and whether all bars hold."""
    heads = ("plan", "step", "simulated", "error", "same path", "equally long", "with another plan")
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1)]
    middle = {plan: sorted(rounds, key=lambda run: run.step_seconds)[len(rounds) // 2] for plan, rounds in runs.items()}
    errors, agreements, others = [], [], []
    for plan, rounds in runs.items():
        errors.append(statistics.median(run.estimate.step_seconds / run.step_seconds - 1 for run in rounds))
        aligned = [align(run.measured, run.predicted) for run in rounds]
        agreements.append(statistics.median(x.agreement for x in aligned))
        equal = statistics.median(x.equally_long for x in aligned)
        simulated = [run.predicted for run in middle.values()]
        others.append(statistics.median(nearest_other(run.measured, run.predicted, simulated) for run in rounds))
        seconds = [statistics.median(r.step_seconds for r in rounds)]
        seconds.append(statistics.median(r.estimate.step_seconds for r in rounds))
        times = " | ".join(f"{1e3 * s:.1f} ms" for s in seconds)
        shares = f"{100 * agreements[-1]:.0f}% | {100 * equal:.0f}% | {100 * others[-1]:.0f}%"
        lines.append(f"| `{plan}` | {times} | {100 * errors[-1]:+.0f}% | {shares} |")
    mean = statistics.mean(map(abs, errors))
    same = [a >= LEAST_AGREEMENT and a > other for a, other in zip(agreements, others, strict=True)]
    lines += [
        "",
        f"Step times are off by {100 * mean:.1f}% on average (bar: {100 * BOUND:.0f}%). {sum(same)} of {len(same)} "
        f"paths agree (bar: {100 * LEAST_AGREEMENT:.0f}% of the step, and more than with another plan).",
    ]
    return lines, mean <= BOUND and all(same)


def nearest_other(record: Any, own: Any, simulated: Iterable[Any]) -> float:
    """The largest agreement of a record with simulations whose path is not its own simulation's; 0 without any."""
    different = [other for other in simulated if agreement(own, other) < LEAST_AGREEMENT]
    return max((agreement(record, other) for other in different), default=0.0)


if __name__ == "__main__":
    sys.exit(main())
