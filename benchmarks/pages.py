"""Time saved on a CPU when ranks keep freed memory instead of returning it (`drumline.comm.malloc_settings`).

    python benchmarks/pages.py [--jobs cnn,unet,gpt,mlp] [--ranks 2] [--rounds 5] [--paste]

Jobs of `benchmarks/cpu_jobs.py` run as replicas, each in ranks of its own as under `drumline train`; ranks that keep
their pages alternate with ranks that do not. (Jobs that follow each other in one process leave objects at the end of
its heap, which is then not returned.) Printed: the median step of each, the median over the rounds of the ratio with
its 95% interval, and how many new pages a step touches. Expected before measuring: up to a fifth off for convolutional
nets and for an MLP with a layer of 34 MB, little for GPTs. It should take eight minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cpu_jobs import NAMES
from engine_peers.ratios import ratio
from split_contest.page import paste

from drumline.comm.malloc_settings import SWITCH
from drumline.core.units import format_seconds
from drumline.launchers import run_ranks

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "runs.md"
STEPS, NOT_COUNTED = 16, 4


def timed(emit: Callable[[dict[str, Any]], None], name: str) -> tuple[float, float]:
    """Time a job on every rank: the median step, and its page faults."""
    from drumline.core.job import Job
    from drumline.runtime.engine import initialize

    engine = initialize(Job.load(f"{HERE / 'cpu_jobs.py'}:{name}"), threads=1)
    times, before = [], 0
    for i, batch in enumerate(engine.data(STEPS)):
        if i == NOT_COUNTED:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        start = time.perf_counter()
        engine.step(batch)
        times.append(time.perf_counter() - start)
    pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return statistics.median(times[NOT_COUNTED:]), pages / (STEPS - NOT_COUNTED)


def table_row(name: str, results: dict[str, list[tuple[float, float]]]) -> str:
    """Format a row: `0` are the rounds that returned pages, `1` those that kept them."""
    returned, kept = ([step for step, _ in results[keeps]] for keeps in "01")
    pages = statistics.median(pages for _, pages in results["0"])
    steps = " | ".join(format_seconds(statistics.median(s)) for s in (returned, kept))
    return f"| {name} | {steps} | {ratio(kept, returned)} | {pages:,.0f} |"


def main() -> None:
    """Run the rounds, each in processes of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default="cnn,unet,gpt,mlp", help="which of " + ", ".join(NAMES))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--paste", action="store_true", help="write into docs/runs.md")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        ranks = run_ranks(timed, options.jobs, ranks=options.ranks, threads=1)
        print(json.dumps([max(r[i] for r in ranks) for i in (0, 1)]))
        return
    lines = ["| job | pages given back | kept | kept / given back | pages a step |", "|---|---|---|---|---|"]
    for name in options.jobs.split(","):
        results: dict[str, list[tuple[float, float]]] = {"0": [], "1": []}
        for i in range(2 * options.rounds):
            keeps = "10"[(i + i // 2) % 2]
            command = [sys.executable, __file__, "--one", "--jobs", name, "--ranks", str(options.ranks)]
            environment = {**os.environ, SWITCH: keeps}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            results[keeps].append(tuple(json.loads(done.stdout.splitlines()[-1])))
        lines.append(table_row(name, results))
        print(lines[-1], flush=True)
    if options.paste:
        how = f"ranks: {options.ranks}, one thread each; {options.rounds} rounds of {STEPS - NOT_COUNTED} steps"
        paste("pages", lines, f"{how}; pasted by `python benchmarks/pages.py --paste`", PAGE)


if __name__ == "__main__":
    main()
