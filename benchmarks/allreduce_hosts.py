"""Training on two hosts with 1 Gbit/s between them, two ranks each: `allreduce=` against torch's DDP over gloo.

    python benchmarks/allreduce_hosts.py [--rounds 12] [--samples 96] [--width 1024] [--layers 8] [--cores 0.45]

Hosts are network namespaces; each rank has a share of a core of its own. The ranks measure themselves (a minute) unless
`--cluster` names a file of an earlier run, and the planner prices every algorithm. Then torch's DDP and every algorithm
take one step each, in turns that are shuffled in every round. Prints the medians, the ratio to torch's DDP with its
interval, the error of the prediction, and the share of torch's step that is exposed communication: its step against one
that sends nothing. Bars: `auto` at least 1.25x ahead, the planner's choice within 5% of the fastest, predictions within
15%. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "tests"), str(Path(__file__).parent)]

RANKS, BUCKET = 4, 4 * 2**20
THEIRS, SILENT = "torch's DDP", "without messages"


def main() -> int:
    from netns import Unable, two_hosts

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--samples", type=int, default=96, help="of each rank and step")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--cores", type=float, default=0.45, help="of each rank; 0: they share what there is")
    parser.add_argument("--cluster", default="", help="file of the measured cluster, written if it is not there")
    given = parser.parse_args()
    settings = [str(x) for x in (given.rounds, given.samples, given.width, given.layers)]
    with tempfile.TemporaryDirectory() as folder:
        cluster = given.cluster or str(Path(folder) / "cluster.toml")
        try:
            with two_hosts(given.rate, burst="64kb", cores=given.cores) as hosts:
                said = hosts.run(__file__, *settings, cluster, timeout=900, ALLREDUCE_RANK="1")
        except Unable as e:
            print(f"not run: {e}", file=sys.stderr)
            return 1
    result = json.loads(said[0].splitlines()[-1])
    print(f"{given.layers} layers of {given.width}, {given.samples} samples a rank; 2 hosts x 2 ranks, {given.rate}")
    print(f"measured links: {result['links']}")
    print("\n".join(lines_of(result)))
    return 0


def lines_of(result: dict[str, Any]) -> list[str]:
    """The table, and what it says of the bars."""
    from engine_peers.ratios import ratio

    times: dict[str, list[float]] = result["times"]
    middle = {name: statistics.median(t) for name, t in times.items()}
    rows = [f"  {'':<26} {'step':>9} {'predicted':>10} {'error':>7}  ahead of torch's DDP"]
    for name in sorted(middle, key=lambda n: middle[n]):
        predicted = result["predicted"].get(name)
        price = f"{predicted * 1e3:7.0f} ms {predicted / middle[name] - 1:+7.0%}" if predicted else " " * 18
        rows.append(f"  {name:<26} {middle[name] * 1e3:6.0f} ms {price}  {ratio(times[THEIRS], times[name])}")
    ours = {name: t for name, t in middle.items() if name not in (THEIRS, SILENT)}
    fastest = min(ours, key=lambda name: ours[name])
    chosen = f"allreduce={result['chosen']}"
    errors = [abs(result["predicted"][name] / t - 1) for name, t in ours.items()]
    share = 1 - middle[SILENT] / middle[THEIRS]
    ahead = ratio(times[THEIRS], times["allreduce=auto"])
    return [
        *rows,
        f"communication is {share:.0%} of the step of torch's DDP",
        f"auto is {ahead} ahead, the bar is 1.25: {ahead.at_least(1.25)}",
        f"the planner chooses {chosen}: {ours[chosen] / ours[fastest] - 1:+.0%} of {fastest}, the bar is 5%",
        f"predictions are off by {statistics.mean(errors):.0%} on average, {max(errors):.0%} at most; the bar is 15%",
    ]


# -- on the ranks


def rank() -> None:
    """One rank: measure, price, and take turns."""
    import torch
    import torch.distributed as dist

    from drumline.comm.environment import connect, disconnect
    from drumline.runtime.engine import initialize
    from drumline.schedules import ALL_REDUCE_WORDS

    rounds, samples, width, layers = (int(x) for x in sys.argv[1:5])
    connect(backend="gloo")
    torch.set_num_threads(1)
    job = make_job(samples, width, layers)
    result = _priced(job, Path(sys.argv[5]))
    silent, theirs = _theirs(job, samples)
    contestants: dict[str, Callable[[], object]] = {SILENT: silent, THEIRS: theirs}
    for word in ALL_REDUCE_WORDS:
        engine = initialize(job, f"dp={RANKS},bucket={BUCKET},allreduce={word}")
        contestants[f"allreduce={word}"] = partial(engine.step, next(iter(engine.data(1))))
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for i in range(rounds + 2):  # two to warm up: DDP orders its buckets anew after the first
        for name in random.Random(i).sample(list(contestants), len(contestants)):
            dist.barrier()
            start = time.perf_counter()
            contestants[name]()
            taken = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            times[name].append(taken.item())
    if dist.get_rank() == 0:
        print(json.dumps({**result, "times": {name: t[2:] for name, t in times.items()}}))
    disconnect()


def make_job(samples: int, width: int, layers: int) -> Any:
    """A plain stack of layers, so that gradients are as many as wanted for the work."""
    import torch
    from torch import nn

    from drumline.core.job import Job

    def model() -> nn.Module:
        return nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(width, width, bias=False), nn.ReLU())))

    torch.manual_seed(0)
    x = torch.randn(RANKS * samples, width)
    data = torch.utils.data.TensorDataset(x, torch.randn(RANKS * samples, width))
    return Job(
        model=model,
        loss=nn.functional.mse_loss,
        optimizer=partial(torch.optim.SGD, lr=1e-3),
        data=lambda: data,
        batch_size=RANKS * samples,
    )


def _theirs(job: Any, samples: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """A step of torch's DDP as users write it, without messages and with them."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(job.model(), bucket_cap_mb=BUCKET // 2**20, gradient_as_bucket_view=True)
    optimizer = job.optimizer(model.parameters())
    first = dist.get_rank() * samples
    x, y = job.data()[first : first + samples]

    def step() -> None:
        job.loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.distributed.barrier()  # the engine's step ends together, too

    def silent() -> None:
        with model.no_sync():
            step()

    return silent, step


def _priced(job: Any, file: Path) -> dict[str, Any]:
    """The planner's price of every algorithm on the measured cluster, and its choice."""
    import torch.distributed as dist

    from drumline.clusters import Cluster
    from drumline.core.units import format_rate, format_seconds
    from drumline.costs import OperatorCostModel
    from drumline.measurement.machine import measure_rank, to_cluster
    from drumline.planner.gradient_algorithms import choose_algorithms
    from drumline.plans import Plan
    from drumline.schedules import ALL_REDUCE_WORDS
    from drumline.tracing import trace

    if not file.exists():
        mine = measure_rank(lambda event: None)
        results: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(results, mine)
        if dist.get_rank() == 0:
            to_cluster(results).save(file)
    if dist.get_rank():
        return {}
    cluster = Cluster.load(file)
    assert cluster.network is not None
    model = OperatorCostModel(trace(job), cluster, "fp32")
    plan = Plan(dp=RANKS, bucket=BUCKET, backend="gloo")
    [(chosen, _)] = choose_algorithms([(plan, model.estimate(plan))], model, cluster)
    priced = {w: model.estimate(Plan(dp=RANKS, bucket=BUCKET, allreduce=w)).step_seconds for w in ALL_REDUCE_WORDS}
    links = (cluster.node.link, "inside"), (cluster.network.link, "between")
    return {
        "chosen": chosen.allreduce,
        "predicted": {f"allreduce={word}": seconds for word, seconds in priced.items()},
        "links": ", ".join(f"{format_seconds(x.alpha)} and {format_rate(x.bandwidth)} {where}" for x, where in links),
    }


if __name__ == "__main__":
    if os.environ.get("ALLREDUCE_RANK"):
        rank()
    else:
        sys.exit(main())
