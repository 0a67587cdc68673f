"""The engine's step against the same step written by hand on torch: DDP and FSDP2, two ranks, blocks interleaved.

    python benchmarks/overhead.py [--blocks 20] [--steps 5]

Prints, per strategy, the median over the blocks of the ratio engine / by hand, with the 95% interval of that median.
Expected before measuring: within 1.05; the engine adds a scalar all-reduce and the global norm of the gradients, which
the hand-written loop has too, because every training loop logs them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drumline.launch import run_ranks

EXAMPLE = str(Path(__file__).parents[1] / "examples" / "gpt.py")


def by_hand(strategy: str) -> Callable[[], None]:
    """What a careful person writes: the wrapped model, the loss agreed on, gradients clipped."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    from drumline.data import Stream
    from drumline.job import Job

    job = Job.load(EXAMPLE)
    torch.manual_seed(job.seed)
    model = job.model()
    if strategy == "zero=3":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        module = model
    else:
        module = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = job.optimizer(model.parameters())
    stream = Stream(job, job.data(), dp=dist.get_world_size(), index=dist.get_rank())
    count = iter(range(10**9))

    def step() -> None:
        micro = stream.batch(next(count)).micros[0]
        loss = job.loss(module(micro.input), micro.target)
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        total.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def by_engine(strategy: str) -> Callable[[], None]:
    """The same through `dl.initialize`."""
    from drumline.job import Job
    from drumline.runtime.engine import initialize

    engine = initialize(Job.load(EXAMPLE), f"dp=2,{strategy}")
    batches = engine.data(10**9)
    return lambda: (engine.step(next(batches)), None)[1]


def contest(emit: Any, strategy: str, blocks: int, steps: int) -> list[tuple[float, float]]:
    """Seconds per step of both, block by block, in turns."""
    from drumline.comm.environment import connect

    connect()
    contestants = [by_engine(strategy), by_hand(strategy)]
    for run in contestants:
        for _ in range(3):
            run()
    times = []
    for i in range(blocks):
        pair = [0.0, 0.0]
        for which in (0, 1) if i % 2 == 0 else (1, 0):
            start = time.perf_counter()
            for _ in range(steps):
                contestants[which]()
            pair[which] = (time.perf_counter() - start) / steps
        times.append((pair[0], pair[1]))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    for strategy in ("zero=0", "zero=3"):
        times = run_ranks(contest, strategy, options.blocks, options.steps, ranks=2)[0]
        engine, hand = (statistics.median(column) for column in zip(*times, strict=True))
        ratios = sorted(a / b for a, b in times)
        margin = int(0.98 * len(ratios) ** 0.5)  # the ranks of the order statistics around the median
        low, high = ratios[len(ratios) // 2 - margin], ratios[min(len(ratios) - 1, len(ratios) // 2 + margin)]
        print(
            f"{strategy}: engine {1e3 * engine:.1f} ms, by hand {1e3 * hand:.1f} ms, "
            f"ratio {statistics.median(ratios):.3f} (95%: {low:.3f} to {high:.3f})"
        )


if __name__ == "__main__":
    main()
