"""Timelines of real runs laid over their simulation: step times, and the critical path of both.

    python benchmarks/timelines.py [--rounds 3] [--steps 30] [--output build/timelines] [--paste]

Trains examples/gpt.py on this machine under six plans, in shuffled turns: data parallelism, ZeRO-3, two pipeline
schedules, tensor parallelism, and a hybrid of replicas and stages on four ranks. Every run has the timeline of one
measured step and the simulated one; `drumline report` of the run folders draws them over each other. A critical path is
compared by its parts of at least a tenth of the step, the largest first: forward, backward, optimizer, communication.
It is followed back on the compute lanes, and where a rank
waits, on those of the rank it waits for. Bars: step times within 15% on average, the same paths.
Expected before the first run: within 10% for two ranks; up to 20% for four ranks on two cores.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from pathlib import Path
from typing import Any

from split_contest.page import paste

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
SMALLEST_PART = 0.1
"""Share of the step; smaller parts of a path are not compared."""
LONGEST_GAP = 0.01
"""Share of the step; a rank that does nothing for longer waits for another."""


def main() -> int:
    import drumline as dl

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--output", default="build/timelines")
    parser.add_argument("--paste", action="store_true")
    given = parser.parse_args()
    runs: dict[str, list[Any]] = {plan: [] for plan in PLANS}
    for i in range(given.rounds):
        for plan in random.Random(i).sample(PLANS, len(PLANS)):
            folder = Path(given.output) / f"{plan.replace(',', '-').replace('=', '')}-{i}"
            run = dl.train(str(JOB), plan, steps=given.steps, output=folder, overwrite=True, corrections=False)
            runs[plan].append(run)
            dl.report(run)
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
    """The rows, and whether both bars hold."""
    lines = [
        "| plan | step | simulated | error | measured path | simulated path | same |",
        "|---|---:|---:|---:|---|---|---|",
    ]
    errors, same = [], []
    for plan, rounds in runs.items():
        off = [run.estimate.step_seconds / run.step_seconds - 1 for run in rounds]
        middle = sorted(rounds, key=lambda run: run.step_seconds)[len(rounds) // 2]
        paths = [path_shares(timeline) for timeline in (middle.measured, middle.predicted)]
        errors.append(statistics.median(off))
        same.append(list(paths[0]) == list(paths[1]))
        cells = [", ".join(f"{name} {100 * share:.0f}%" for name, share in path.items()) for path in paths]
        seconds = [statistics.median(r.step_seconds for r in rounds)]
        seconds.append(statistics.median(r.estimate.step_seconds for r in rounds))
        times = " | ".join(f"{1e3 * s:.1f} ms" for s in seconds)
        lines.append(f"| `{plan}` | {times} | {100 * errors[-1]:+.0f}% | {cells[0]} | {cells[1]} | {same[-1]} |")
    mean = statistics.mean(map(abs, errors))
    holds = mean <= BOUND and all(same)
    lines += [
        "",
        f"Step times are off by {100 * mean:.1f}% on average (bar: 15%); {sum(same)} of {len(same)} paths are equal.",
    ]
    return lines, holds


def path_shares(timeline: Any) -> dict[str, float]:
    """The parts of the critical path that matter, with their shares of the step, the largest first."""
    shares: dict[str, float] = {}
    for name, seconds in _with_inner_messages(_path(timeline)):
        shares[name] = shares.get(name, 0.0) + seconds / timeline.seconds
    kept = {name: share for name, share in shares.items() if share >= SMALLEST_PART}
    return dict(sorted(kept.items(), key=lambda item: -item[1]))


def _path(timeline: Any) -> list[tuple[str, float]]:
    """(phase, seconds) from the end back to the start, on the compute lanes.

    A record has gaps of microseconds, so the path goes on with the last span that ended before; where a rank sent or
    waited for longer, with that of the rank that computed until last.
    """
    computed = [s for s in timeline.spans if s.lane == "compute" and _phase(s.name) != "communication"]
    spans = sorted(computed, key=lambda s: s.end)
    current = spans[-1]
    path = [(_phase(current.name), current.end - current.start)]
    while earlier := [s for s in spans if s.end <= current.start + 1e-9 and s is not current]:
        own = max((s for s in earlier if s.rank == current.rank), key=lambda s: s.end, default=None)
        last = max(earlier, key=lambda s: s.end)
        waited = own is None or current.start - own.end > LONGEST_GAP * timeline.seconds
        following = last if waited or own is None else own
        path.append(("communication", current.start - following.end))
        path.append((_phase(following.name), following.end - following.start))
        current = following
    return path


def _phase(name: str) -> str:
    """forward, backward, optimizer or communication; the bookkeeping of sharded units is recorded with the backward."""
    first = name.split()[0]
    if name == "communication units":
        return "backward"
    return {"weights": "backward"}.get(
        first, first if first in ("forward", "backward", "optimizer") else "communication"
    )


def _with_inner_messages(path: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """A message between two spans of one phase belongs to that phase: a record of a run does not tell them apart."""
    names = [name for name, _ in path]
    inner = [
        names[i - 1]
        if 0 < i < len(path) - 1 and names[i] == "communication" and names[i - 1] == names[i + 1]
        else names[i]
        for i in range(len(path))
    ]
    return [(name, seconds) for name, (_, seconds) in zip(inner, path, strict=True)]


if __name__ == "__main__":
    sys.exit(main())
