"""How far does this machine repeat itself? Six jobs in turns for some minutes, with looks at its speed in between.

    python benchmarks/repeats.py [--jobs gpt,cnn] [--ranks 2] [--turns 90] [--paste]

A turn is a look (`measure.pulse`) and three steps of every job, in ranks that are started once. Windows of several
turns stand for runs: how far apart are two windows of a job, one directly after the other, by how long they are; and
how much of what a look sees, of a pace that is not the mean one, is there in the window after it? A prediction that
knew the last window's time exactly would be as far off as the first of the two numbers. Expected before measuring: half
as far in windows four times as long, if what comes and goes does so within seconds; and a slope of the look near 0.2 in
ten seconds, less in longer ones. It takes five minutes, on a machine that does nothing else.
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
BLOCK, LOOKS, WINDOWS = 3, 16, (1, 3, 6, 12, 24)
"""Steps of a job in a turn, looks before it, and turns of a window."""


@dataclass(frozen=True)
class Turn:
    """Logarithms of seconds: of the look, and of a step of each job."""

    look: float
    jobs: tuple[float, ...]


def look() -> float:
    """On a rank: the logarithm of what a product and a stream take."""
    import torch

    from drumline.measurement.speed_probe import MATMUL_WEIGHT, probe_rounds

    seen = probe_rounds(torch.device("cpu"), LOOKS)
    product, stream = (statistics.median(math.log(s[k]) for s in seen) for k in ("matmul", "pointwise"))
    return MATMUL_WEIGHT * product + (1 - MATMUL_WEIGHT) * stream


def main() -> None:
    """Take the turns, and say what they show."""
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
            seen = statistics.fmean(worlds.call(n, look))
            times = [max(worlds.call(n, steps.block, reference, plan, BLOCK)) for reference in references]
            turns.append(Turn(seen, tuple(map(math.log, times))))
        seconds = (time.monotonic() - start) / len(turns)
    said = f"- {len(turns)} turns of {', '.join(jobs)} under `{plan}`, {seconds:.1f} s each."
    lines = [*table(turns, seconds), "", said]
    print("\n".join(lines))
    if options.paste:
        paste("repeats", lines, "pasted by `python benchmarks/repeats.py --paste`", PAGE)


def table(turns: Sequence[Turn], seconds: float) -> list[str]:
    """By the length of a window."""
    lines = ["| window | two in a row differ by | slope of the look before it |", "|---|---|---|"]
    for many in WINDOWS:
        if 2 * many <= len(turns):
            lines.append(f"| {many * seconds:.0f} s | {100 * apart(turns, many):.1f}% | {slope(turns, many):+.2f} |")
    return lines


def apart(turns: Sequence[Turn], many: int) -> float:
    """How far two windows of a job in a row are apart, on average over jobs and places."""
    means = _windows(turns, many)
    pairs = zip(means, means[many:], strict=False)
    return statistics.fmean(abs(math.expm1(b - a)) for one, other in pairs for a, b in zip(one, other, strict=True))


def slope(turns: Sequence[Turn], many: int) -> float:
    """How much of what a look sees is in the window that begins with it: least squares, the mean of the jobs."""
    means = _windows(turns, many)
    seen = [t.look for t in turns[: len(means)]]
    middle = statistics.fmean(seen)
    spread = sum((x - middle) ** 2 for x in seen)
    if not spread:
        return 0.0
    jobs = zip(*means, strict=True)
    return statistics.fmean(sum((x - middle) * y for x, y in zip(seen, job, strict=True)) / spread for job in jobs)


def _windows(turns: Sequence[Turn], many: int) -> list[list[float]]:
    """The mean of every window, by job."""
    return [
        [statistics.fmean(job) for job in zip(*(t.jobs for t in turns[i : i + many]), strict=True)]
        for i in range(len(turns) - many + 1)
    ]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default=",".join(NAMES), help="which of " + ", ".join(NAMES))
    parser.add_argument("--ranks", type=int, default=2, help="how many ranks share each job")
    parser.add_argument("--turns", type=int, default=90, help="how many turns are taken")
    parser.add_argument("--paste", action="store_true", help="write into docs/log/cpu.md")
    return parser.parse_args()


if __name__ == "__main__":
    main()
