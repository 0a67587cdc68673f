"""The contract of our torch process groups, for any backend: each check runs on all ranks, against plain sums.

Every check takes the group. Values are whole numbers, so that results are exact in any order.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from drumline.comm.torch_transport import _ALL_GATHER, _REDUCE_SCATTER

Group = dist.ProcessGroup
Check = Callable[[Group], None]
SIZES = (0, 1, 5, 3000, 70_001)
TYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.complex64,
    torch.complex128,
)


def given(rank: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A rank's input: small integers that differ by rank and position."""
    return ((torch.arange(size) + 2 * rank) % 5).to(dtype)


def inputs_of_all(group: Group, size: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [given(r, size, dtype) for r in range(group.size())]


def all_reduce(group: Group) -> None:
    for size in SIZES:
        for dtype in TYPES if size < 5000 else (torch.float32, torch.bfloat16, torch.int64):
            mine = given(group.rank(), size, dtype)
            dist.all_reduce(mine, group=group)
            assert torch.equal(
                mine,
                sum(inputs_of_all(group, size, torch.float64)[1:], inputs_of_all(group, size, torch.float64)[0]).to(
                    dtype
                ),
            ), (size, dtype)


def operators(group: Group) -> None:
    ops = {
        dist.ReduceOp.MAX: torch.amax,
        dist.ReduceOp.MIN: torch.amin,
        dist.ReduceOp.PRODUCT: torch.prod,
    }
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8):
        for size in (3, 40_000):
            for op, plain in ops.items():
                mine = given(group.rank(), size, dtype)
                dist.all_reduce(mine, op=op, group=group)
                expected = plain(torch.stack(inputs_of_all(group, size, torch.float64)), dim=0).to(dtype)
                assert torch.equal(mine, expected), (op, dtype)
    mine = given(group.rank(), 9)
    dist.all_reduce(mine, op=dist.ReduceOp.AVG, group=group)
    assert torch.allclose(mine, torch.stack(inputs_of_all(group, 9)).mean(0))
    for op, plain in (
        (dist.ReduceOp.BAND, torch.bitwise_and),
        (dist.ReduceOp.BOR, torch.bitwise_or),
        (dist.ReduceOp.BXOR, torch.bitwise_xor),
    ):
        mine = given(group.rank(), 9, torch.int32)
        dist.all_reduce(mine, op=op, group=group)
        expected = inputs_of_all(group, 9, torch.int32)[0]
        for other in inputs_of_all(group, 9, torch.int32)[1:]:
            expected = plain(expected, other)
        assert torch.equal(mine, expected)
    nan = torch.tensor([1.0, float("nan") if group.rank() == 0 else 2.0])
    dist.all_reduce(nan, op=dist.ReduceOp.MAX, group=group)
    assert nan[0] == 1 and nan[1].isnan()


def all_ranks_have_the_same_bits(group: Group) -> None:
    for size in (7, 50_000):
        torch.manual_seed(group.rank())
        mine = torch.randn(size)
        dist.all_reduce(mine, group=group)
        results = [torch.empty(size) for _ in range(group.size())]
        dist.all_gather(results, mine, group=group)
        assert all(torch.equal(results[0], other) for other in results)


def reduce_and_broadcast(group: Group) -> None:
    for root in range(group.size()):
        for size in SIZES:
            mine = given(group.rank(), size)
            dist.reduce(mine, group_dst=root, group=group)
            if group.rank() == root:
                assert torch.equal(mine, sum(inputs_of_all(group, size)[1:], inputs_of_all(group, size)[0]))
            mine = given(group.rank(), size)
            dist.broadcast(mine, group_src=root, group=group)
            assert torch.equal(mine, given(root, size))
    flags = torch.tensor([group.rank() == 0, group.rank() != 0])
    dist.broadcast(flags, group_src=0, group=group)
    assert flags.tolist() == [True, False]


def gathers_and_scatters(group: Group) -> None:
    p, r = group.size(), group.rank()
    for size in SIZES:
        outs = [torch.empty(size) for _ in range(p)]
        dist.all_gather(outs, given(r, size), group=group)
        assert all(torch.equal(a, b) for a, b in zip(outs, inputs_of_all(group, size), strict=True))
        whole = torch.empty(p * size)
        _ALL_GATHER(whole, given(r, size), group=group)
        assert torch.equal(whole, torch.cat(inputs_of_all(group, size)))
        for root in {0, p - 1}:
            rows = [torch.empty(size) for _ in range(p)] if r == root else None
            dist.gather(given(r, size), rows, group_dst=root, group=group)
            if rows is not None:
                assert all(torch.equal(a, b) for a, b in zip(rows, inputs_of_all(group, size), strict=True))
            mine = torch.empty(size)
            dist.scatter(mine, inputs_of_all(group, size) if r == root else None, group_src=root, group=group)
            assert torch.equal(mine, given(r, size))


def reduce_scatters(group: Group) -> None:
    p, r = group.size(), group.rank()
    for size in SIZES:
        total = sum((given(s + r, size) for s in range(1, p)), given(r, size))
        mine = torch.empty(size)
        dist.reduce_scatter(mine, [given(r + s, size) for s in range(p)], group=group)
        assert torch.equal(mine, total)
        mine = torch.empty(size)
        _REDUCE_SCATTER(mine, torch.cat([given(r + s, size) for s in range(p)]), group=group)
        assert torch.equal(mine, total)


def all_to_all(group: Group) -> None:
    p, r = group.size(), group.rank()
    for size in SIZES:
        into, out = torch.empty(p * size), torch.cat([given(r + 10 * s, size) for s in range(p)])
        dist.all_to_all_single(into, out, group=group)
        assert torch.equal(into, torch.cat([given(s + 10 * r, size) for s in range(p)]))
        outs = [given(r + 10 * s, size + s) for s in range(p)]
        intos = [torch.empty(size + r) for _ in range(p)]
        dist.all_to_all(intos, outs, group=group)
        assert all(torch.equal(t, given(s + 10 * r, size + r)) for s, t in enumerate(intos))
    gives, takes = [r + s for s in range(p)], [s + r for s in range(p)]
    into = torch.empty(sum(takes), 2)
    out = torch.full((sum(gives), 2), float(r))
    dist.all_to_all_single(into, out, takes, gives, group=group)
    assert into[:, 0].tolist() == [float(s) for s in range(p) for _ in range(r + s)]


def odd_tensors(group: Group) -> None:
    strided = given(group.rank(), 12).view(3, 4).t()
    dist.all_reduce(strided, group=group)
    assert torch.equal(strided, sum(inputs_of_all(group, 12)[1:], inputs_of_all(group, 12)[0]).view(3, 4).t())
    scalar = torch.tensor(float(group.rank()))
    dist.all_reduce(scalar, group=group)
    assert scalar.item() == sum(range(group.size()))
    leaf = torch.ones(3, requires_grad=True)
    dist.all_reduce(leaf.detach(), group=group)
    assert leaf.tolist() == [group.size()] * 3


def work_is_asynchronous(group: Group) -> None:
    tensors = [given(group.rank(), 20_000) for _ in range(20)]
    works = [dist.all_reduce(t, group=group, async_op=True) for t in tensors]
    assert works[-1] is not None
    future = works[-1].get_future()
    for work in reversed(works):
        work.wait()
    future.wait()
    total = sum(inputs_of_all(group, 20_000)[1:], inputs_of_all(group, 20_000)[0])
    assert all(torch.equal(t, total) for t in tensors)
    assert all(work.is_completed() for work in works)


def messages(group: Group) -> None:
    p, r = group.size(), group.rank()
    if p == 1:
        return
    after, before = (r + 1) % p, (r - 1) % p
    for size in (0, 1, 1000, 300_000):
        out, into = given(r, size), torch.empty(size)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, out, group=group, group_peer=after),
                dist.P2POp(dist.irecv, into, group=group, group_peer=before),
            ]
        )
        for work in works:
            work.wait()
        assert torch.equal(into, given(before, size))
    if r == 0:
        for _ in range(1, p):
            received = torch.empty(2)
            source = dist.recv(received, group=group)
            assert received.tolist() == [source, 7.0]
    else:
        dist.send(torch.tensor([float(dist.get_global_rank(group, r)), 7.0]), group=group, group_dst=0)
    dist.barrier(group=group)
    if r == 0:  # by tag, not by arrival
        dist.send(torch.tensor([1.0]), group=group, group_dst=1, tag=1)
        dist.send(torch.tensor([2.0]), group=group, group_dst=1, tag=2)
    elif r == 1:
        second, first = torch.empty(1), torch.empty(1)
        dist.recv(second, group=group, group_src=0, tag=2)
        dist.recv(first, group=group, group_src=0, tag=1)
        assert (first.item(), second.item()) == (1.0, 2.0)


def a_send_completes_in_the_background(group: Group) -> None:
    if group.size() == 1:
        return
    if group.rank() == 0:
        work = dist.isend(torch.ones(2_000_000), group=group, group_dst=1)
        dist.barrier(group=group)
        work.wait()
    elif group.rank() == 1:
        into = torch.empty(2_000_000)
        dist.recv(into, group=group, group_src=0)
        assert into.sum() == 2_000_000
        dist.barrier(group=group)
    else:
        dist.barrier(group=group)


def objects(group: Group) -> None:
    objects: list[object] = [None] * group.size()
    dist.all_gather_object(objects, {"rank": group.rank()}, group=group)
    assert objects == [{"rank": r} for r in range(group.size())]


def barrier_waits(group: Group) -> None:
    begin = time.monotonic()
    if group.rank() == 0:
        time.sleep(0.3)
    dist.barrier(group=group)
    assert time.monotonic() - begin > 0.25 or group.rank() == 0


def sparse_sums(group: Group) -> None:
    p, r = group.size(), group.rank()
    for dense in ((), (2,)):
        # rank r has r + 1 entries, each at an index that rank 0 or a neighbour has too
        where = torch.stack([torch.arange(r + 1), torch.zeros(r + 1, dtype=torch.int64)])
        values = torch.full((r + 1, *dense), r + 1.0)
        mine = torch.sparse_coo_tensor(where, values, (p, 3, *dense), check_invariants=True)
        dist.all_reduce(mine, group=group)
        expected = torch.zeros(p, 3, *dense)
        for s in range(p):
            expected[: s + 1, 0] += s + 1.0
        assert mine.is_sparse and torch.equal(mine.to_dense(), expected)


def the_profiler_sees_calls(group: Group) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        dist.all_reduce(torch.ones(3), group=group)
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        assert work is not None
        work.wait()
        time.sleep(0.3)
    spans = [e for e in seen.events() if e.name == f"{group.name()}:all_reduce"]
    assert len(spans) == 2 and all(0 < e.cpu_time < 250_000 for e in spans)  # ended with the call, not with the profile


def a_monitored_barrier_names_missing_ranks(group: Group) -> None:
    if group.size() == 1:
        return
    group.monitored_barrier(TIMEOUT)
    error = ""
    try:
        if group.rank() != 1:
            group.monitored_barrier(timedelta(seconds=0.3))
    except RuntimeError as e:
        error = str(e)
    if group.rank() == 0:
        assert error.startswith("Rank 1 failed to pass monitoredBarrier in 0.3 s")
    elif group.rank() > 1:
        assert error.startswith(f"rank {group.rank()} reached the monitored barrier")
    dist.barrier(group=group)


CHECKS: tuple[Check, ...] = (
    all_reduce,
    operators,
    all_ranks_have_the_same_bits,
    reduce_and_broadcast,
    gathers_and_scatters,
    reduce_scatters,
    all_to_all,
    odd_tensors,
    work_is_asynchronous,
    messages,
    a_send_completes_in_the_background,
    objects,
    barrier_waits,
    sparse_sums,
    the_profiler_sees_calls,
    a_monitored_barrier_names_missing_ranks,
)
TIMEOUT = timedelta(seconds=30)
