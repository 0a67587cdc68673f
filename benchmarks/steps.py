"""A training step on shm against the same step on gloo, where communication is about half of the step on gloo.

    python benchmarks/steps.py [--ranks 2] [--blocks 15] [--width 1024] [--depth 8]

For DDP and FSDP2: first the batch is chosen at which the step on gloo takes about twice as long as its computing alone
(the same model on one rank), then blocks of steps on both groups take turns. Printed are the share of communication in
the step on gloo, the medians, and the median of the ratios of neighbouring blocks.
Expected before measuring: shm moves bytes several times as fast, so most of that half should go: 1.5x or more.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from drumline.launchers import run_ranks


def steps_of(strategy: str, group: Any, width: int, depth: int, batch: int) -> Callable[[], None]:
    """Build a training step of an MLP; `strategy` "alone" computes without any communication."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    net: nn.Module = nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())))
    if strategy == "FSDP2":
        mesh = DeviceMesh.from_group(group, "cpu")
        for layer in net:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
    elif strategy == "DDP":
        net = nn.parallel.DistributedDataParallel(net, process_group=group, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    x = torch.randn(batch, width)

    def step() -> None:
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def timed(step: Callable[[], None], barrier: Callable[[], None], n: int) -> float:
    barrier()
    begin = time.perf_counter()
    for _ in range(n):
        step()
    barrier()
    return (time.perf_counter() - begin) / n


def rank_main(emit: Any, blocks: int, width: int, depth: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from drumline.comm.environment import connect

    connect(backend="gloo")
    groups = {"gloo": dist.new_group(backend="gloo"), "shm": dist.new_group(backend="shm")}
    results: dict[str, Any] = {}

    def mean_over_ranks(value: float) -> float:
        mean = torch.tensor([value])
        dist.all_reduce(mean)
        return mean.item() / dist.get_world_size()

    for strategy in ("DDP", "FSDP2"):
        tried = {}
        for batch in (4, 8, 16, 32, 64, 128, 256):
            alone = steps_of("alone", None, width, depth, batch)
            full = steps_of(strategy, groups["gloo"], width, depth, batch)
            for step in (alone, full):
                step()
            times = [
                (mean_over_ranks(timed(alone, dist.barrier, 2)), mean_over_ranks(timed(full, dist.barrier, 2)))
                for _ in range(3)
            ]
            tried[batch] = 1 - statistics.median(a / b for a, b in times)
            if tried[batch] < 0.4:
                break
        batch = min(tried, key=lambda b: abs(tried[b] - 0.5))
        steps = {name: steps_of(strategy, group, width, depth, batch) for name, group in groups.items()}
        alone = steps_of("alone", None, width, depth, batch)
        for step in (*steps.values(), alone):
            step()
        rows: dict[str, list[float]] = {"gloo": [], "shm": [], "alone": []}
        for _ in range(blocks):
            for name, step in {**steps, "alone": alone}.items():
                rows[name].append(mean_over_ranks(timed(step, dist.barrier, 3)))
        results[strategy] = {"batch": batch, "rows": rows}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=8)
    options = parser.parse_args()
    results = run_ranks(rank_main, options.blocks, options.width, options.depth, ranks=options.ranks)[0]
    for strategy, result in results.items():
        rows = result["rows"]
        share = statistics.median(1 - a / g for a, g in zip(rows["alone"], rows["gloo"], strict=True))
        ratio = statistics.median(g / s for g, s in zip(rows["gloo"], rows["shm"], strict=True))
        medians = {name: statistics.median(times) * 1e3 for name, times in rows.items()}
        print(
            f"{strategy}, batch {result['batch']} a rank: gloo {medians['gloo']:.1f} ms, shm {medians['shm']:.1f} ms, "
            f"computing alone {medians['alone']:.1f} ms; communication is {share:.0%} of the step on gloo; "
            f"shm is {ratio:.2f}x as fast"
        )


if __name__ == "__main__":
    main()
