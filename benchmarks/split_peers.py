"""Tensor parallelism and pipelines against torch by hand: the same model, the same split, in the same two ranks.

    python benchmarks/split_peers.py [--blocks 20] [--minutes 8] [--samples 8] [--cases tp,1f1b,gpipe] [--paste]
    python benchmarks/split_peers.py --profile Drumline --cases tp      # where a contestant spends its time

By hand is `parallelize_module`, and `PipelineStage` with torch's schedules. Blocks of steps take turns in a changing
order. Printed are medians and ratios to the code by hand with their 95% intervals (bootstrap over the blocks); below 1,
Drumline is faster. `--paste` writes the tables into docs/log/model-parallel.md.
Expected before measuring: at most 1.03 of the step by hand on gloo, and less on shm.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from engine_peers.ratios import ratio
from split_contest.contest import Case, Results, contest, profiled
from split_contest.page import paste
from split_contest.work import BLOCKS

from drumline.launchers import run_ranks

DRUMLINE, SHM, HAND, PLAIN = "Drumline", "Drumline, shm", "by hand", "by hand, whole sequences between blocks"
OWN = {DRUMLINE: "by_drumline:make", SHM: "by_drumline:make_shm"}
MICRO = 4
BOUND = 1.03
CASES = {
    "tp": Case(
        "tp=2 and `parallelize_module`",
        "tp=2",
        1,
        {**OWN, HAND: "by_parallelize:make", PLAIN: "by_parallelize:make_plain"},
    ),
    "1f1b": Case(
        f"pp=2, 1F1B, {MICRO} micro-batches, and `Schedule1F1B`",
        f"pp=2,micro={MICRO},schedule=1f1b,split=blocks.{BLOCKS // 2}",
        MICRO,
        {**OWN, HAND: "by_pipelining:make_1f1b"},
    ),
    "gpipe": Case(
        f"pp=2, GPipe, {MICRO} micro-batches, and `ScheduleGPipe`",
        f"pp=2,micro={MICRO},schedule=gpipe,split=blocks.{BLOCKS // 2}",
        MICRO,
        {**OWN, HAND: "by_pipelining:make_gpipe"},
    ),
}
RANKS = 2
START = 20.0
"""Seconds to start the ranks and to make the contestants, about."""
SAME = 1e-4
"""Largest difference of the losses of the first steps: fp32 sums in another order."""


def main() -> None:
    """Run the cases, print, and paste."""
    options = _options()
    end = time.monotonic() + 60 * options.minutes
    names = options.cases.split(",")
    if options.profile:
        print(run_ranks(profiled, CASES[names[0]], options.profile, options.samples, 10, ranks=RANKS, threads=1)[0])
        return
    lines: list[str] = []
    for i, name in enumerate(names):
        seconds = max(1.0, (end - time.monotonic()) / (len(names) - i) - START)
        results = run_ranks(contest, CASES[name], options.samples, options.blocks, seconds, ranks=RANKS, threads=1)[0]
        part = section(CASES[name], options.samples, results)
        print("\n".join(part), flush=True)
        lines += part
    if options.paste:
        how = f"{RANKS} ranks, one thread each; pasted by `python benchmarks/split_peers.py --paste`"
        paste("peers", lines[:-1], how)


def _options() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=20, help="of every contestant and case")
    parser.add_argument("--minutes", type=float, default=8.0, help="for all together, about")
    parser.add_argument("--samples", type=int, default=8, help="of a step")
    parser.add_argument("--cases", default=",".join(CASES), help="some of these")
    parser.add_argument("--profile", default="", help="a contestant: profile it in the first case")
    parser.add_argument("--paste", action="store_true", help="write the tables into docs/log/model-parallel.md")
    return parser.parse_args()


def section(case: Case, samples: int, results: Results) -> list[str]:
    """Format a case's table and compare it with the bound."""
    times = results.seconds
    lines = [f"### {case.title}", "", "| contestant | step | / by hand | loss of step 4 |", "|---|---|---|---|"]
    for name, taken in times.items():
        cell = "" if name == HAND else str(ratio(taken, times[HAND]))
        lines.append(f"| {name} | {1e3 * statistics.median(taken):.1f} ms | {cell} | {results.losses[name][-1]:.5f} |")
    n = results.steps
    lines += ["", f"- {len(times[HAND])} blocks of {n} step{'s' if n > 1 else ''}, {samples} samples a step."]
    r = ratio(times[DRUMLINE], times[HAND])
    lines.append(f"- Drumline takes {r} of the step by hand; at most {BOUND}: {r.at_most(BOUND)}.")
    by_step = zip(*results.losses.values(), strict=True)
    difference = max(max(losses) - min(losses) for losses in by_step)
    lines.append(
        f"- The losses of the first steps differ by {difference:.1e}{'' if difference <= SAME else ': NOT THE SAME'}."
    )
    return [*lines, ""]


if __name__ == "__main__":
    main()
