"""Drumline's engine against torch by hand, DeepSpeed, Accelerate and Lightning Fabric, in the same two ranks.

    python benchmarks/engines.py [--blocks 20] [--minutes 9] [--stages 0123] [--paste]

A GPT of 10.9 million parameters, AdamW, gradients clipped; the stages of ZeRO one after the other. First the batch is
chosen at which communication is a third of a step of DDP by hand on gloo; a second case has four times as many samples.
Blocks of steps take turns in a changing order. Printed are medians, and ratios to Drumline's step with their 95%
intervals (bootstrap over the blocks); above 1, Drumline is faster. `--paste` writes them into docs/log/engines.md.
Expected before measuring: within 2% of torch by hand and not behind the others on gloo; on shm 1.2x ahead of all where
communication is a third.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import os
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PEERS = Path(sys.prefix) / "peers"
PAGE = ROOT / "docs" / "log" / "engines.md"
MARKS = ("<!-- engines -->", "<!-- /engines -->")
if str(PEERS) not in sys.path:
    sys.path.append(str(PEERS))  # behind our own packages: what is pinned stays as it is
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(PEERS / "extensions"))  # DeepSpeed compiles a file there, once

from engine_peers.by_hand import LABELS  # noqa: E402  # the path comes first
from engine_peers.contest import ALONE, DRUMLINE, HAND, SHM, Results, contest, shares  # noqa: E402
from engine_peers.ratios import ratio  # noqa: E402

from drumline.launchers import run_ranks  # noqa: E402

NEEDED = {"DeepSpeed": "deepspeed", "Accelerate": "accelerate", "Lightning Fabric": "lightning_fabric"}
INSTALL = (
    f"DS_BUILD_OPS=0 {sys.executable} -m pip install --no-deps --no-build-isolation -c constraints.txt "
    f"--target {PEERS} 'deepspeed==0.19.*' accelerate lightning-fabric hjson py-cpuinfo msgpack ninja einops tqdm "
    "lightning-utilities torchmetrics huggingface-hub pyyaml setuptools"
)
RANKS = 2
START = 20.0
"""Seconds to start the ranks and to make the contestants, about."""


def main() -> None:
    """Choose the batches, run both cases, print, and paste."""
    options = _options()
    missing = [name for name, module in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        print(f"Not installed: {', '.join(missing)}. To install next to the environment:\n    {INSTALL}\n")
    end = time.monotonic() + 60 * options.minutes
    third = options.samples or _third()
    stages = [int(s) for s in options.stages]
    ends = [
        s for s in stages if s in (0, 3)
    ]  # with more computation the stages differ less: the first and the last suffice
    rounds = [("communication about a third", third, s) for s in stages]
    rounds += [("four times the computing", 4 * third, s) for s in ends]
    lines: list[str] = []
    for i, (case, samples, stage) in enumerate(rounds):
        seconds = max(1.0, (end - time.monotonic()) / (len(rounds) - i) - START)
        results = run_ranks(contest, stage, samples, options.blocks, seconds, ranks=RANKS, threads=1)[0]
        part = _section(case, samples, stage, results)
        print("\n".join(part), flush=True)
        lines += part
    if options.paste:
        _paste(lines)


def _options() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=20, help="of every contestant and stage")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all together, about")
    parser.add_argument("--stages", default="0123", help="of ZeRO")
    parser.add_argument("--samples", type=int, default=0, help="of one rank in the first case, instead of choosing")
    parser.add_argument("--paste", action="store_true", help="write the tables into docs/log/engines.md")
    return parser.parse_args()


def _third() -> int:
    """Choose the samples per rank at which communication is nearest to a third of the step."""
    shares_by_samples: dict[int, float] = run_ranks(shares, 7, ranks=RANKS, threads=1)[0]
    listed = ", ".join(f"{samples}: {share:.0%}" for samples, share in shares_by_samples.items())
    chosen = min(shares_by_samples, key=lambda samples: abs(shares_by_samples[samples] - 1 / 3))
    print(f"Share of communication in DDP's step, by samples of a rank: {listed}. Chosen: {chosen}.\n", flush=True)
    return chosen


def _section(case: str, samples: int, stage: int, results: Results) -> list[str]:
    """Format a stage's table and compare it with the expectations."""
    times = results.seconds
    lines = [f"### Stage {stage}, {samples} sample{'s' if samples > 1 else ''} a rank ({case})", ""]
    lines += ["| contestant | step | / Drumline | / Drumline, shm | last loss |", "|---|---|---|---|---|"]
    for name in [*times, *results.refused]:
        label = f"{name}: {LABELS[stage]}" if name == HAND else name
        if name in results.refused:
            lines.append(f"| {label} | {results.refused[name]} | | | |")
            continue
        cells = [f"{1e3 * statistics.median(times[name]):.1f} ms"]
        for own in (DRUMLINE, SHM):
            cells.append(str(ratio(times[name], times[own])) if own in times and name != own else "")
        lines.append(f"| {label} | {' | '.join(cells)} | {results.loss[name]:.5f} |")
    return [*lines, "", *_conclusions(results), ""]


def _conclusions(results: Results) -> list[str]:
    times = results.seconds
    others = [name for name in times if name not in (DRUMLINE, SHM, ALONE)]
    lines = []
    if {HAND, ALONE} <= times.keys():
        share = statistics.median(1 - a / b for a, b in zip(times[ALONE], times[HAND], strict=True))
        n, blocks = results.steps, len(times[HAND])
        lines.append(f"- {blocks} blocks of {n} step{'s' if n > 1 else ''}; communication is {share:.0%} of {HAND}.")
    if DRUMLINE in times:
        for name in others:
            r = ratio(times[DRUMLINE], times[name])
            verdict = f"at most 1.02: {r.at_most(1.02)}" if name == HAND else r.not_behind()
            lines.append(f"- Drumline takes {r} of {name}; {verdict}.")
    if SHM in times and others:
        fastest = min(others, key=lambda name: statistics.median(times[name]))
        r = ratio(times[fastest], times[SHM])
        lines.append(f"- On shm Drumline is {r} times as fast as the fastest, {fastest}; 1.2: {r.at_least(1.2)}.")
    losses = [loss for name, loss in results.loss.items() if name != ALONE]
    if losses:
        lines.append(f"- The losses differ by {max(losses) - min(losses):.1e}.")
    return lines


def _paste(lines: list[str]) -> None:
    """Write the tables between the marks of the page."""
    when = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    tail = f"{when}, {RANKS} ranks, one thread each; pasted by `python benchmarks/engines.py --paste`."
    new = "\n".join([MARKS[0], *lines, tail, MARKS[1]])
    pattern = re.compile(f"{re.escape(MARKS[0])}.*{re.escape(MARKS[1])}", re.S)
    PAGE.write_text(pattern.sub(lambda _: new, PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
