"""Messages and memory of a real step, for tests that compare them with a dry run."""

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
from drumline.runtime.dry_run.live_memory import LiveMemory, storage_bytes
from drumline.runtime.engine import Engine, initialize
from drumline.tracing.op_costs import tensors

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
"""Index of the argument whose bytes count, if not the first."""


class SentMessages(TorchDispatchMode):
    """Records every process-group call, as torch's dispatcher sees it."""

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
    """A small job, or a GPT large enough for its memory to show."""
    if name == "words":
        return split_cost_functions.job("deep", 64, 128, 64, 8)
    if name == "mixture of experts":
        return expert_jobs.make("mixture", batch_size=8)
    return small_jobs.make(name, batch_size=8)


def real(name: str, plan: str) -> dict[str, Any]:
    """The messages of one step, the states, and the peak of live memory."""
    memory, sent = LiveMemory("cpu"), SentMessages()
    job = job_of(name)
    data = job.data()
    with memory:
        engine = initialize(dataclasses.replace(job, data=lambda: data), plan)
    (batch,) = engine.data(1)
    memory.include(tensors([(m.input, m.target) for m in batch.micros]))
    with memory:
        for _ in range(2):
            engine.step(batch)
        memory.start()
        before = memory.current
        with sent:
            engine.step(batch)
        counted = memory.peak
    del memory
    return {
        "messages": dict(sent.calls),
        "parameters": storage_bytes(engine.model.parameters(), "cpu"),
        "buffers": storage_bytes(engine.model.buffers(), "cpu"),
        "optimizer": _optimizer(engine),
        "counted": counted,
        "before": before,
    }


def allocated(name: str, plan: str) -> float:
    """Peak bytes that a third step allocates, from the allocator."""
    engine = initialize(job_of(name), plan)
    (batch,) = engine.data(1)
    for _ in range(2):
        engine.step(batch)
    return peak(lambda: engine.step(batch))


def _optimizer(engine: Engine) -> int:
    return storage_bytes((t for values in engine.optimizer.state.values() for t in tensors(values)), "cpu")


def dry_inside() -> None:
    """A dry run in a process that has a group."""
    dry_run(job_of("mlp"), "dp=2")
