"""A step of the engine with all guards on, against the same step of bare DDP, over gloo and over shm.

    python benchmarks/overhead.py [--blocks 40] [--steps 20] [--jobs small,gpt] [--backends gloo,shm] [--paste]

Bare DDP is torch's own, over torch's own gloo group (or over our shm group, without the engine): forward, backward,
the mean loss over the ranks, clipping, AdamW. The engine does the same with compared calls, rank status, recorded
steps, checks for non-finite numbers and spikes, and a vote of the replicas every 100 steps. Both live in the same two
ranks and run blocks of steps in turns. Printed: the ratio of neighbouring blocks with its 95% interval, in seconds of
the clock and in seconds of the processor over both ranks. On a machine with other work only the latter is meaningful;
over shm it includes waiting, because ranks wait actively.
`small` has eight buckets and steps of about 12 ms, `gpt` is the GPT of benchmarks/engines.py. `--paste` writes into
docs/runs.md. Expected before measuring: at most 1.02. It should take five minutes.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from engine_peers.ratios import Ratio, ratio
from split_contest.page import paste

from drumline.launchers import run_ranks

PAGE = Path(__file__).parent.parent / "docs" / "runs.md"
WARM = 40
"""Steps before the clock runs: calls are compared until they repeat, and DDP rebuilds its buckets."""
BOUND = 1.02
VOTE = 100
WIDTH, LAYERS, SAMPLES = 512, 8, 24
"""Of the small job: every layer fills a bucket of 1 MiB."""
BATCHES = 8
Blocks = dict[str, list[tuple[float, float]]]
"""By contestant and block: seconds of the clock and of the processor, of one step."""


def small_job(ranks: int) -> Any:
    """A perceptron with eight equal layers."""
    import torch
    from torch import nn

    from drumline.core.job import Job

    def model() -> nn.Module:
        return nn.Sequential(*(part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))

    def data() -> Any:
        numbers = torch.Generator().manual_seed(0)
        x = torch.randn(BATCHES * SAMPLES * ranks, WIDTH, generator=numbers)
        return torch.utils.data.TensorDataset(x, x.roll(1, 1))

    return Job(
        model=model,
        loss=nn.functional.mse_loss,
        optimizer=partial(torch.optim.AdamW, lr=1e-4, fused=True),
        data=data,
        batch_size=SAMPLES * ranks,
        clip=1.0,
    )


def gpt_job(ranks: int) -> Any:
    """The GPT of benchmarks/engines.py."""
    from engine_peers.work import work_for

    return work_for(0, 4, None).job


JOBS = {"small": (small_job, 2**20), "gpt": (gpt_job, None)}
"""By name: the job and the bytes of its buckets."""


def bare_step(job: Any, group: Any, bucket: int | None, batches: Any) -> Callable[[int], float]:
    """The step that a user of DDP writes."""
    import torch
    import torch.distributed as dist

    torch.manual_seed(job.seed)
    model = job.model()
    cap = None if bucket is None else bucket // 2**20
    ddp = torch.nn.parallel.DistributedDataParallel(
        model, process_group=group, bucket_cap_mb=cap, gradient_as_bucket_view=True
    )
    optimizer = job.optimizer(model.parameters())

    def step(number: int) -> float:
        micro = batches[number % BATCHES].micros[0]
        loss = job.loss(ddp(micro.input), micro.target)
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=group)
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip)
        optimizer.step()
        optimizer.zero_grad()
        return float(mean) / dist.get_world_size(group)

    return step


def engine_step(job: Any, group: Any, backend: str, bucket: int | None, batches: Any) -> Callable[[int], float]:
    """The engine's step, with every guard."""
    import torch.distributed as dist
    from engine_peers.by_drumline import _default_is

    from drumline.runtime.engine import initialize
    from drumline.runtime.guards.guard import Guards

    buckets = "" if bucket is None else f",bucket={bucket}"
    with _default_is(group):
        engine = initialize(job, f"dp={dist.get_world_size()},backend={backend}{buckets}", guards=Guards(vote=VOTE))
    return lambda number: engine.step(batches[number % BATCHES])


def rank_main(
    emit: Callable[[dict[str, Any]], None], name: str, backend: str, blocks: int, steps: int
) -> tuple[Blocks, dict[str, float]]:
    """On every rank: blocks of steps of both contestants in turns, and their last losses."""
    import torch
    import torch.distributed as dist

    from drumline.comm.environment import connect
    from drumline.datasets import Stream

    connect(backend="gloo")
    torch.set_num_threads(1)
    ranks = dist.get_world_size()
    make, bucket = JOBS[name]
    job = make(ranks)
    stream = Stream(job, job.data(), dp=ranks, index=dist.get_rank())
    batches = [stream.batch(i) for i in range(BATCHES)]
    bare, between_blocks = dist.new_group(backend=backend), dist.new_group(backend="gloo")
    ours = dist.group.WORLD if backend == "gloo" else dist.new_group(backend=backend)
    contestants = {
        "bare": bare_step(job, bare, bucket, batches),
        "engine": engine_step(job, ours, backend, bucket, batches),
    }
    for step in contestants.values():
        for number in range(WARM):
            step(number)
    taken: Blocks = {contestant: [] for contestant in contestants}
    losses: dict[str, float] = {}
    for block in range(blocks):
        for contestant in random.Random(block).sample(list(contestants), len(contestants)):
            step = contestants[contestant]
            dist.barrier(between_blocks)
            clock, processor = time.perf_counter(), time.process_time()
            for i in range(steps):
                losses[contestant] = step(WARM + block * steps + i)
            spent = (time.perf_counter() - clock) / steps, (time.process_time() - processor) / steps
            total = torch.tensor(spent, dtype=torch.float64)
            dist.all_reduce(total, group=between_blocks)
            taken[contestant].append((float(total[0]) / ranks, float(total[1]) / ranks))
        emit({"block": block + 1})
    return taken, losses


def ratios(taken: Blocks) -> tuple[Ratio, Ratio]:
    """The engine's blocks over bare DDP's: by the clock and by the processor."""
    clock, processor = (ratio([x[i] for x in taken["engine"]], [x[i] for x in taken["bare"]]) for i in (0, 1))
    return clock, processor


def main() -> None:
    """Run each job on each backend; print, and paste."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--steps", type=int, default=20, help="of one block")
    parser.add_argument("--jobs", default="small,gpt")
    parser.add_argument("--backends", default="gloo,shm")
    parser.add_argument("--paste", action="store_true", help="write into docs/runs.md")
    options = parser.parse_args()
    lines = [
        "| job | backend | bare DDP | clock: engine / bare | at most 1.02 | processor: engine / bare | at most 1.02 |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    print("\n".join(lines), flush=True)
    for name in options.jobs.split(","):
        for backend in options.backends.split(","):
            results = run_ranks(rank_main, name, backend, options.blocks, options.steps, ranks=2, threads=1)
            taken, losses = results[0]
            apart = abs(losses["bare"] - losses["engine"]) / abs(losses["bare"])
            if apart > 1e-3:
                raise SystemExit(f"{name} on {backend}: the losses differ by {apart:.1e}: not the same steps")
            clock, processor = ratios(taken)
            usual = 1e3 * statistics.median(x[0] for x in taken["bare"])
            verdicts = f"{clock} | {clock.at_most(BOUND)} | {processor} | {processor.at_most(BOUND)}"
            lines.append(f"| {name} | {backend} | {usual:.1f} ms | {verdicts} |")
            print(lines[-1], flush=True)
    if options.paste:
        how = (
            f"2 ranks, one thread each; {options.blocks} blocks of {options.steps} steps; load {os.getloadavg()[0]:.1f}"
        )
        paste("overhead", lines, f"{how}; pasted by `python benchmarks/overhead.py --paste`", PAGE)


if __name__ == "__main__":
    main()
