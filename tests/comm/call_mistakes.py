"""Ranks that make different calls, each mistake on its own lines: in the first round, or after many right ones."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import drumline as dl
from drumline.comm.process_group.gloo_group import GlooGroup
from drumline.comm.rank_status import rank_status
from drumline.comm.tensor_identity import naming_calls

MAX, SUM = dist.ReduceOp.MAX, dist.ReduceOp.SUM


def right(group: dist.ProcessGroup) -> None:
    """One round of calls, as all ranks make it."""
    first(group)
    dist.all_reduce(torch.ones(5), group=group)
    second(group)
    dist.broadcast(torch.ones(7), group_src=0, group=group)
    dist.barrier(group)


def first(group: dist.ProcessGroup) -> None:
    """A call that looks like the second."""
    dist.all_reduce(torch.ones(3), group=group)


def second(group: dist.ProcessGroup) -> None:
    """A call that looks like the first."""
    dist.all_reduce(torch.ones(3), group=group)


def shape(group: dist.ProcessGroup, odd: bool) -> None:
    """Different shapes."""
    first(group)
    dist.all_reduce(torch.ones(6 if odd else 5), group=group)


def operation(group: dist.ProcessGroup, odd: bool) -> None:
    """Different collectives."""
    first(group)
    if odd:
        dist.broadcast(torch.ones(5), group_src=0, group=group)
    else:
        dist.all_reduce(torch.ones(5), group=group)


def operator(group: dist.ProcessGroup, odd: bool) -> None:
    """Different operators."""
    first(group)
    dist.all_reduce(torch.ones(5), MAX if odd else SUM, group=group)


def dtype(group: dist.ProcessGroup, odd: bool) -> None:
    """Different types."""
    first(group)
    dist.all_reduce(torch.ones(5, dtype=torch.int32 if odd else torch.float32), group=group)


def short_broadcast(group: dist.ProcessGroup, odd: bool) -> None:
    """A receiver that is longer than what is sent."""
    first(group)
    dist.all_reduce(torch.ones(5), group=group)
    second(group)
    dist.broadcast(torch.ones(8 if odd else 7), group_src=0, group=group)
    dist.barrier(group)


def swapped_order(group: dist.ProcessGroup, odd: bool) -> None:
    """Equal calls of two lines, in another order."""
    for call in (second, first) if odd else (first, second):
        call(group)
        if call is (second if odd else first):
            dist.all_reduce(torch.ones(5), group=group)


def missing_call(group: dist.ProcessGroup, odd: bool) -> None:
    """One rank leaves a call out."""
    first(group)
    if not odd:
        dist.all_reduce(torch.ones(5), group=group)
    second(group)
    dist.broadcast(torch.ones(7), group_src=0, group=group)


def extra_call(group: dist.ProcessGroup, odd: bool) -> None:
    """One rank makes one call more."""
    first(group)
    dist.all_reduce(torch.ones(5), group=group)
    if odd:
        dist.all_reduce(torch.ones(9), group=group)
    second(group)


MISTAKES: dict[str, Callable[[dist.ProcessGroup, bool], None]] = {
    f.__name__: f for f in (shape, operation, operator, dtype, short_broadcast, swapped_order, missing_call, extra_call)
}


def make(kind: str, backend: str, rounds: int) -> tuple[float, str, str]:
    """On every rank: some right rounds, then a mistake of the last rank; seconds, type and text of the error."""
    group = dist.new_group(backend=backend)
    assert group is not None
    for _ in range(rounds):
        right(group)
    begin = time.monotonic()
    try:
        MISTAKES[kind](group, dist.get_rank() == dist.get_world_size() - 1)
    except Exception as e:
        return time.monotonic() - begin, type(e).__name__, str(e)
    return time.monotonic() - begin, "", "no error"


def one_line(backend: str, orders: list[str], *, named: bool) -> list[tuple[str, list[float]]]:
    """On every rank: sum two tensors from one line, in the given order on the last rank; error and sums by round."""
    group = dist.new_group(backend=backend)
    tensors = {"a": torch.zeros(1), "b": torch.zeros(1)}
    rounds = []
    for order in orders:
        tensors["a"].fill_(1.0)
        tensors["b"].fill_(100.0)
        error = ""
        try:
            for name in order if dist.get_rank() == dist.get_world_size() - 1 else "ab":
                with naming_calls(name if named else ""):
                    dist.all_reduce(tensors[name], group=group)
        except Exception as e:
            error = str(e)
        rounds.append((error, [float(t) for t in tensors.values()]))
        if error:
            break
    return rounds


def swapped_buckets(backend: str, plan: str) -> str:
    """On every rank: the last rank sends its flat buckets, which have equal sizes, in another order."""
    data = torch.utils.data.TensorDataset(torch.randn(8, 600), torch.randn(8, 600))
    job = dl.Job(
        model=lambda: nn.Sequential(*(nn.Linear(600, 600, bias=False) for _ in range(4))),
        loss=F.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        data=lambda: data,
        batch_size=8,
    )
    engine = dl.initialize(job, f"{plan},bucket=1MiB,backend={backend}")
    batches = list(engine.data(3))
    engine.step(batches[0])
    if engine.rank == engine.ranks - 1:
        buckets = engine.strategy._buckets
        assert len(buckets) > 2 and len({b.flat.numel() for b in buckets}) == 1
        buckets[1], buckets[2] = buckets[2], buckets[1]
    try:
        for batch in batches[1:]:
            engine.step(batch)
    except Exception as e:
        return str(e)
    return "no error"


def now_and_then(rounds: int, times: int) -> tuple[int, float, str]:
    """On every rank: a call in every `rounds`-th round, which at last one rank leaves out.

    Keys that the calls left in the store, and seconds and text of the error.
    """
    store = dist.HashStore() if dist.get_world_size() == 1 else dist.distributed_c10d._get_default_store()
    group = dist.new_group(backend="checked_gloo")
    assert group is not None
    keys = 0
    for i in range(times):
        for _ in range(rounds):
            right(group)
        dist.all_reduce(torch.ones(11), group=group)
        dist.barrier()
        if i == 1:
            keys = store.num_keys()
    left = store.num_keys() - keys
    dist.barrier()
    for _ in range(rounds):
        right(group)
    begin, text = time.monotonic(), "no error"
    try:
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(11), group=group)
        right(group)
    except Exception as e:
        text = str(e)
    return left, time.monotonic() - begin, text


def among_open_calls(open_calls: int) -> tuple[float, str, str]:
    """On every rank: right rounds, then one with many asynchronous calls, amid which the last rank has one more.

    Seconds, type and text of the error.
    """
    group = dist.new_group(backend="checked_gloo")
    tensors = [torch.ones(3) for _ in range(open_calls)]
    odd = dist.get_rank() == dist.get_world_size() - 1
    begin = time.monotonic()
    try:
        for last in (False, False, True):
            begin = time.monotonic()
            works = []
            for i, x in enumerate(tensors):
                if last and odd and i == open_calls // 2:
                    works.append(dist.all_reduce(torch.ones(9), group=group, async_op=True))
                works.append(dist.all_reduce(x, group=group, async_op=True))
            for work in works:
                assert work is not None
                work.wait()
    except Exception as e:
        return time.monotonic() - begin, type(e).__name__, str(e)
    return time.monotonic() - begin, "", "no error"


def open_at_the_end() -> tuple[bool, bool]:
    """On every rank: whether its status is in a call while rank 0 waits for the last rank, and after its group ended."""
    group = dist.new_group(backend="checked_gloo")
    assert group is not None
    rank, works = dist.get_rank(), []
    for i in range(131 - rank):  # a call that repeats so many is not compared, for which it would wait
        works.append(dist.all_reduce(torch.ones(1), group=group, async_op=i == 130))
    before = rank_status().read().in_collective
    group.shutdown()
    after = rank_status().read().in_collective
    dist.barrier()
    return before, after


def ddp_then_another_call(rounds: int) -> tuple[bool, float, str, str]:
    """On every rank: backwards of DDP, until its buckets are recognized, and one more in which the last rank reduces a
    tensor of its own instead.

    Whether C++ made the recognized calls, and seconds, type and text of the error.
    """
    group: GlooGroup = dist.new_group(backend="checked_gloo")
    ddp = DistributedDataParallel(nn.Linear(4, 4, bias=False), process_group=group)

    def backward() -> None:
        ddp(torch.ones(1, 4)).sum().backward()

    for _ in range(rounds):
        backward()
    expected = group._calls.sequence.expected
    recognized = expected is not None and expected.recognized_by is not None and expected.recognized_by.from_backward
    begin = time.monotonic()
    try:
        if dist.get_rank() == dist.get_world_size() - 1:
            dist.all_reduce(torch.ones(9), group=group)
        else:
            backward()
    except Exception as e:
        return recognized, time.monotonic() - begin, type(e).__name__, str(e)
    return recognized, time.monotonic() - begin, "", "no error"
