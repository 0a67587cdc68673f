"""How repeatable are step times on this machine? Six jobs in turns for some minutes, with speed probes in between.

    python benchmarks/repeats.py [--jobs gpt,cnn] [--ranks 2] [--turns 90] [--paste]

A turn is a speed probe (`measurement.speed_probe`) and three steps of every job, in ranks that are started once.
Windows of several turns stand for runs. Printed by the length of a window: by how much two consecutive windows of a job
differ, and how much of a probe's deviation from the mean speed is present in the window after it (the slope of a
regression). A prediction that knew the last window's time exactly would have the first of these numbers as its error.
Expected before measuring: half the difference in windows four times as long, if disturbances last for seconds; and a
slope of the speed probe near 0.2 in ten seconds, less in longer windows. It takes five minutes, on a machine that does
nothing else.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cpu_jobs import NAMES
from regret_plans import steps
from regret_plans.served import Worlds
from split_contest.page import paste

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "log" / "cpu.md"
BLOCK, PROBE_ROUNDS, WINDOWS = 3, 16, (1, 3, 6, 12, 24)
"""Steps of a job per turn, probe rounds before it, and turns per window."""


@dataclass(frozen=True)
class Turn:
    """Logarithms of seconds: of the speed probe, and of a step of each job."""

    probe: float
    jobs: tuple[float, ...]


def speed_probe() -> float:
    """Time a matmul and an elementwise kernel on a rank; returns the weighted mean of the logarithms."""
    import torch

    from drumline.measurement.speed_probe import MATMUL_WEIGHT, probe_rounds

    rounds = probe_rounds(torch.device("cpu"), PROBE_ROUNDS)
    matmul, pointwise = (statistics.median(math.log(r[k]) for r in rounds) for k in ("matmul", "pointwise"))
    return MATMUL_WEIGHT * matmul + (1 - MATMUL_WEIGHT) * pointwise


def main() -> None:
    """Run the turns and print the table."""
    options = _options()
    jobs, n = options.jobs.split(","), options.ranks
    plan = f"dp={n}"
    references = [f"{HERE / 'cpu_jobs.py'}:{name}" for name in jobs]
    turns: list[Turn] = []
    with Worlds(1 if n > 1 else None) as worlds:
        for reference in references:
            worlds.call(n, steps.set_up, reference, plan, BLOCK)
        start = time.monotonic()
        for _ in range(options.turns):
            probe = statistics.fmean(worlds.call(n, speed_probe))
            times = [max(worlds.call(n, steps.block, reference, plan, BLOCK)) for reference in references]
            turns.append(Turn(probe, tuple(map(math.log, times))))
        seconds = (time.monotonic() - start) / len(turns)
    summary = f"- {len(turns)} turns of {', '.join(jobs)} under `{plan}`, {seconds:.1f} s each."
    lines = [*table(turns, seconds), "", summary]
    print("\n".join(lines))
    if options.paste:
        paste("repeats", lines, "pasted by `python benchmarks/repeats.py --paste`", PAGE)


def table(turns: Sequence[Turn], seconds: float) -> list[str]:
    """Format the table, one row per window length."""
    lines = ["| window | consecutive windows differ by | slope of the speed probe before it |", "|---|---|---|"]
    for length in WINDOWS:
        if 2 * length <= len(turns):
            difference = mean_difference(turns, length)
            lines.append(f"| {length * seconds:.0f} s | {100 * difference:.1f}% | {slope(turns, length):+.2f} |")
    return lines


def mean_difference(turns: Sequence[Turn], length: int) -> float:
    """Average the relative difference of two consecutive windows of a job over jobs and positions."""
    means = _windows(turns, length)
    pairs = zip(means, means[length:], strict=False)
    return statistics.fmean(abs(math.expm1(b - a)) for one, other in pairs for a, b in zip(one, other, strict=True))


def slope(turns: Sequence[Turn], length: int) -> float:
    """Regress the mean of a window on the speed probe it begins with, by least squares; the mean slope of the jobs."""
    means = _windows(turns, length)
    probes = [t.probe for t in turns[: len(means)]]
    middle = statistics.fmean(probes)
    spread = sum((x - middle) ** 2 for x in probes)
    if not spread:
        return 0.0
    jobs = zip(*means, strict=True)
    return statistics.fmean(sum((x - middle) * y for x, y in zip(probes, job, strict=True)) / spread for job in jobs)


def _windows(turns: Sequence[Turn], length: int) -> list[list[float]]:
    """Average every window, by job."""
    return [
        [statistics.fmean(job) for job in zip(*(t.jobs for t in turns[i : i + length]), strict=True)]
        for i in range(len(turns) - length + 1)
    ]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default=",".join(NAMES), help="which of " + ", ".join(NAMES))
    parser.add_argument("--ranks", type=int, default=2, help="how length ranks share each job")
    parser.add_argument("--turns", type=int, default=90, help="how length turns are taken")
    parser.add_argument("--paste", action="store_true", help="write into docs/log/cpu.md")
    return parser.parse_args()


if __name__ == "__main__":
    main()
