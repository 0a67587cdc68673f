"""What ranks really send and hold in a step, for tests that compare it with a dry run."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import expert_jobs
import small_jobs
import split_cost_functions
import torch
import torch.distributed as dist
from tiling_memory import peak
from torch.utils._python_dispatch import TorchDispatchMode

import drumline as dl
from drumline.runtime.dry_run import dry_run
from drumline.runtime.dry_run.alive import Alive, storage_bytes
from drumline.runtime.engine import Engine, initialize
from drumline.tracing.kinds import tensors

NAMES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": "receive",
    "_reduce_scatter_base_": "reduce_scatter",
}
WHOLE = {"alltoall_base_": 1}
"""Where the bytes are told by another argument than the first."""


class Sent(TorchDispatchMode):
    """Every call of a process group, as torch's dispatcher sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[str, int, tuple[int, ...]]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._overloadpacket.__name__
            group = next(dist.ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject) and _is_group(a))
            ranks = dist.get_process_group_ranks(group)
            if name in ("send", "recv_"):
                peer = ranks[args[2]]
                ranks = [dist.get_rank(), peer] if name == "send" else [peer, dist.get_rank()]
            size = sum(t.nbytes for t in tensors(args[WHOLE.get(name, 0)]))
            self.calls[NAMES[name], size, tuple(ranks)] += 1
        return func(*args, **(kwargs or {}))


def _is_group(value: torch.ScriptObject) -> bool:
    return "ProcessGroup" in str(value._type())


def job_of(name: str) -> dl.Job:
    """A small job, or a GPT of some size, where memory is to be seen."""
    if name == "words":
        return split_cost_functions.job("deep", 64, 128, 64, 8)
    if name == "mixture of experts":
        return expert_jobs.make("mixture", batch_size=8)
    return small_jobs.make(name, batch_size=8)


def real(name: str, plan: str) -> dict[str, Any]:
    """The messages of one step, the states, and the most that is alive at once."""
    alive, sent = Alive("cpu"), Sent()
    job = job_of(name)
    data = job.data()
    with alive:
        engine = initialize(dataclasses.replace(job, data=lambda: data), plan)
    (batch,) = engine.data(1)
    alive.include(tensors([(m.input, m.target) for m in batch.micros]))
    with alive:
        for _ in range(2):
            engine.step(batch)
        alive.start()
        before = alive.now
        with sent:
            engine.step(batch)
        counted = alive.most
    del alive
    return {
        "messages": dict(sent.calls),
        "parameters": storage_bytes(engine.model.parameters(), "cpu"),
        "buffers": storage_bytes(engine.model.buffers(), "cpu"),
        "optimizer": _optimizer(engine),
        "counted": counted,
        "before": before,
    }


def allocated(name: str, plan: str) -> float:
    """The most bytes that a third step takes beyond what was there, as the allocator tells."""
    engine = initialize(job_of(name), plan)
    (batch,) = engine.data(1)
    for _ in range(2):
        engine.step(batch)
    return peak(lambda: engine.step(batch))


def _optimizer(engine: Engine) -> int:
    return storage_bytes((t for values in engine.optimizer.state.values() for t in tensors(values)), "cpu")


def dry_inside() -> None:
    """Not where there is a group already."""
    dry_run(job_of("mlp"), "dp=2")
