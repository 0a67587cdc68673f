"""Two hosts with a slow wire between them, two ranks each: where the planner puts each axis, and whether that is right.

    python benchmarks/layouts.py [--rate 200mbit] [--cores 0.45] [--blocks 20] [--steps 2] [--paste]

Hosts are network namespaces joined by a wire of that rate. Each rank has a share of a core of its own, so that it is a
device whose speed does not depend on what the others do: on fewer cores than ranks, bubbles would cost nothing. The
ranks measure themselves, inside hosts and between them; the planner ranks its candidates for that cluster; then the
best candidate of every layout (which axes, how many ranks each) runs in turns with the others. "Neighbours apart" are
the same plans with ranks numbered in turns over the hosts, which the planner never proposes: tensor parallelism over
the wire. Expected before measuring: the plan that the planner puts first has tp inside the hosts and pp across, is
within 10% of the best, and no layout with tp across comes near.
Needs root and iproute2. `--paste` writes the table into docs/parallel-numbers.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

CONTEXT, WIDTH, HEADS, BLOCKS, SAMPLES = 64, 768, 12, 4, 2
WARM = 2
NEAR = 1.10


def main() -> int:
    from engine_peers.ratios import ratio
    from netns import Unable, two_hosts
    from split_contest.page import paste

    options = _options()
    settings = [str(options.blocks), str(options.steps)]
    try:
        with two_hosts(options.rate, cores=options.cores) as hosts:
            near = json.loads(hosts.run(__file__, *settings, timeout=900, LAYOUTS="inside")[0].splitlines()[-1])
            plans = json.dumps([p for p in near["seconds"] if "tp=" in p])
            said = hosts.run(__file__, *settings, plans, timeout=900, interleaved=True, LAYOUTS="across")
            far = json.loads(said[0].splitlines()[-1])
    except Unable as e:
        print(f"not run: {e}", file=sys.stderr)
        return 1
    rows = {p: (near["predicted"][p], times) for p, times in near["seconds"].items()}
    rows |= {f"{p}, neighbours apart": (None, times) for p, times in far["seconds"].items()}
    best = min(rows, key=lambda p: statistics.median(rows[p][1]))
    chosen = near["chosen"]
    lines = [
        f"2 hosts x 2 ranks of {options.cores:g} cores, {options.rate} between them: {near['links']}. A GPT of "
        f"{BLOCKS} blocks of {WIDTH}, {SAMPLES} samples of {CONTEXT} tokens.", "",
        "| plan | predicted | step | / the best |", "|---|---|---|---|",
    ]  # fmt: skip
    for plan, (said_before, times) in sorted(rows.items(), key=lambda item: statistics.median(item[1][1])):
        wanted = f"{1e3 * said_before:.0f} ms" if said_before else "not offered"
        mark = " (chosen)" if plan == chosen else ""
        lines.append(f"| `{plan}`{mark} | {wanted} | {1e3 * statistics.median(times):.0f} ms "
                     f"| {ratio(times, rows[best][1])} |")  # fmt: skip
    r = ratio(rows[chosen][1], rows[best][1])
    lines += ["", f"- The planner's first, `{chosen}`, takes {r} of the fastest; at most {NEAR}: {r.at_most(NEAR)}."]
    apart = min(far["seconds"], key=lambda p: statistics.median(far["seconds"][p]))
    lines.append(f"- The fastest with tensor parallelism over the wire, `{apart}`, takes "
                 f"{ratio(far['seconds'][apart], rows[chosen][1])} of it.")  # fmt: skip
    print("\n".join(lines))
    if options.paste:
        paste("layouts", lines, "one thread a rank; pasted by `python benchmarks/layouts.py --paste`")
    return 0


def _options() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="200mbit", help="of the wire between the hosts, as tc writes it")
    parser.add_argument("--cores", type=float, default=0.45, help="of each rank; 0: they share what there is")
    parser.add_argument("--blocks", type=int, default=20, help="of every layout")
    parser.add_argument("--steps", type=int, default=2, help="of a block")
    parser.add_argument("--paste", action="store_true", help="write the table into docs/parallel-numbers.md")
    return parser.parse_args()


# -- one rank


def rank(kind: str, blocks: int, steps: int, given: Sequence[str]) -> None:
    """Measure, plan, and run every layout in turns."""
    import torch
    import torch.distributed as dist

    from drumline.comm.environment import connect, disconnect

    connect(backend="gloo")
    torch.set_num_threads(1)
    job = _job()
    found: dict[str, Any] = {}
    if kind == "inside":
        found = _planned(job)
    plans = list(given) or list(found["predicted"])
    shared: list[Any] = [plans]
    dist.broadcast_object_list(shared)
    found["seconds"] = _timed(job, shared[0], blocks, steps)
    if dist.get_rank() == 0:
        print(json.dumps(found))
    disconnect()


def _planned(job: Any) -> dict[str, Any]:
    """What the planner says of this cluster: its first plan, and the best of every layout."""
    import torch.distributed as dist

    from drumline.measure.machine import measure_rank, to_cluster
    from drumline.plan import Plan
    from drumline.search import search
    from drumline.trace import trace
    from drumline.units import format_rate, format_seconds

    mine = measure_rank(lambda event: None)
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, mine)
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        cluster = to_cluster(results)
        assert cluster.network is not None
        if os.environ.get("LAYOUTS_CLUSTER"):
            cluster.save(os.environ["LAYOUTS_CLUSTER"])
        answer, _ = search(trace(job), cluster)
        best: dict[tuple[int, ...], tuple[str, float]] = {}
        for c in answer.candidates:
            plan = Plan.parse(c.plan)
            layout = (plan.dp, plan.tp, plan.pp, plan.cp)
            if c.fits and plan.ranks == dist.get_world_size() and layout not in best:
                best[layout] = c.plan, c.step_seconds
        links = [f"{format_seconds(x.alpha)} and {format_rate(x.bandwidth)} {where}"
                 for x, where in ((cluster.node.link, "inside"), (cluster.network.link, "between"))]  # fmt: skip
        found = [{"chosen": answer.candidates[0].plan, "predicted": dict(best.values()), "links": ", ".join(links)}]
    dist.broadcast_object_list(found)
    result: dict[str, Any] = found[0]
    return result


def _timed(job: Any, plans: Sequence[str], blocks: int, steps: int) -> dict[str, list[float]]:
    """Seconds of a step, the slowest rank's, by plan and block."""
    import random

    import torch
    import torch.distributed as dist

    from drumline.runtime.engine import initialize

    engines = {p: initialize(job, f"{p},backend=gloo") for p in plans}
    batches = {p: next(iter(e.data(1))) for p, e in engines.items()}
    for p, engine in engines.items():
        for _ in range(WARM):
            engine.step(batches[p])
    times: dict[str, list[float]] = {p: [] for p in plans}
    for block in range(blocks):
        for p in random.Random(block).sample(list(plans), len(plans)):
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(steps):
                engines[p].step(batches[p])
            taken = torch.tensor([(time.perf_counter() - begin) / steps], dtype=torch.float64)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            times[p].append(taken.item())
    return times


def _job() -> Any:
    import torch
    from gpt_task import ADAMW, GPT, Size, Tokens, loss_of

    from drumline.job import Job

    return Job(
        model=partial(GPT, Size(CONTEXT, WIDTH, HEADS, BLOCKS)), loss=loss_of,
        optimizer=partial(torch.optim.AdamW, **ADAMW), data=partial(Tokens, SAMPLES, CONTEXT), batch_size=SAMPLES,
    )  # fmt: skip


if __name__ == "__main__":
    if os.environ.get("LAYOUTS"):
        rank(os.environ["LAYOUTS"], int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]) if sys.argv[3:] else [])
    else:
        sys.exit(main())
