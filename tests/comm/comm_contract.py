"""The contract of every communicator, for any transport and number of ranks: each check runs on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import expected_results as plain
import pytest
import torch
from torch import Tensor

from drumline.comm import OPERATORS, Communicator, Operator
from drumline.core.errors import InputError
from drumline.schedules import ALGORITHMS, Traffic, collective_schedule, segmented

Check = Callable[[Communicator], None]
SIZES = (0, 1, 2, 7, 24, 1000)


def tensor_of(rank: int, size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """A vector that differs by rank and position; integers, so that sums are exact in any order."""
    return plain.whole(rank, (size,), dtype)


def total(p: int, size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The sum over all ranks."""
    return torch.stack([tensor_of(r, size, dtype) for r in range(p)]).sum(0).to(dtype)


def _one(comm: Communicator, collective: str, size: int, root: int, **how: object) -> None:
    p = comm.size
    inputs = [plain.whole(r, plain.shape_of(collective, size, p)) for r in range(p)]
    mine = inputs[comm.rank].clone()
    got = plain.call(comm, collective, mine, root=root, **how)
    plain.same(got, plain.expected(collective, inputs, comm.rank, root))
    if collective not in ("all_reduce", "broadcast"):
        assert torch.equal(mine, inputs[comm.rank]), f"{collective} changed its input"


@lru_cache(maxsize=4096)
def _traffic(collective: str, algorithm: str, p: int, root: int, size: int) -> tuple[Traffic, ...]:
    """Each rank's traffic for shares, or buffers, of `size` elements."""
    shares = collective in ("all_gather", "gather", "scatter", "reduce_scatter", "all_to_all")
    m = 0 if collective == "barrier" else 8 * size * (p if shares else 1)
    return collective_schedule(collective, algorithm, p, root=root).traffic(m, itemsize=8)


def every_algorithm_is_correct(comm: Communicator) -> None:
    """The whole table; the traffic equals the schedule's."""
    p = comm.size
    for collective, algorithm in plain.TABLE:
        for size in (0, 1, 5, 24):
            for root in {0, p - 1} if collective in plain.ROOTED else {0}:
                before = comm.traffic
                _one(comm, collective, size, root, algorithm=algorithm)
                wanted = _traffic(collective, algorithm, p, root, size)
                assert comm.traffic - before == wanted[comm.rank], (collective, algorithm)


def segments_change_nothing(comm: Communicator) -> None:
    for collective, algorithm in plain.TABLE:
        if collective != "barrier":
            _one(comm, collective, 11, comm.size - 1, algorithm=algorithm, segments=3)


def auto_and_native_are_correct(comm: Communicator) -> None:
    for collective in ALGORITHMS:
        for size in SIZES:
            _one(comm, collective, size, comm.size - 1)
            if comm.transport.native(collective) is not None:
                _one(comm, collective, size, comm.size - 1, algorithm="native")


def the_rank_order_is_kept(comm: Communicator) -> None:
    """Matrix products: by every algorithm that is proved to keep the order; the others are refused by name."""
    p, kept = comm.size, []
    for collective, algorithm in plain.TABLE:
        if collective not in plain.REDUCING:
            continue
        for root in {0, p // 2, p - 1} if collective == "reduce" else {0}:
            shape = (p, 3, 4) if collective == "reduce_scatter" else (3, 4)
            inputs = [plain.matrices(r, shape) for r in range(p)]
            wanted = plain.expected(collective, inputs, comm.rank, root, plain.product)
            if comm._chooser.keeps_order(collective, algorithm, root):
                kept.append(collective)
                for segments in (1, 2):
                    got = plain.call(
                        comm,
                        collective,
                        inputs[comm.rank].clone(),
                        root=root,
                        op=plain.MATMUL,
                        algorithm=algorithm,
                        segments=segments,
                    )
                    plain.same(got, wanted)
            else:
                with pytest.raises(InputError, match=rf"{collective} with matmul by {algorithm}\n(.|\n)*not commute"):
                    plain.call(comm, collective, inputs[comm.rank], root=root, op=plain.MATMUL, algorithm=algorithm)
            got = plain.call(comm, collective, inputs[comm.rank].clone(), root=root, op=plain.MATMUL)
            plain.same(got, wanted)
    assert set(kept) == set(plain.REDUCING)


def types_are_kept(comm: Communicator) -> None:
    types = (
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.complex64,
    )
    p = comm.size
    for dtype in types:
        inputs = [(plain.whole(r, (5,), torch.int64) % 7).to(dtype) for r in range(p)]
        tensor = comm.all_reduce(inputs[comm.rank].clone())
        assert tensor.dtype == dtype
        numbers = torch.stack([t.to(torch.complex64 if dtype.is_complex else torch.float64) for t in inputs]).sum(0)
        assert tensor.to(numbers.dtype).tolist() == numbers.tolist()
        assert torch.equal(comm.all_gather(inputs[comm.rank]).view(torch.uint8), torch.stack(inputs).view(torch.uint8))
        ring = comm.all_reduce(inputs[comm.rank].clone(), algorithm="ring")
        assert ring.tolist() == tensor.tolist()
    flags = comm.broadcast(torch.tensor([comm.rank == 0, comm.rank != 0]))
    assert flags.tolist() == [True, False]
    assert comm.all_reduce(torch.tensor([comm.rank == 0, False])).tolist() == [True, False]
    byte = torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn)
    assert comm.all_gather(byte).to(torch.float32).tolist() == [[1.0, 2.0]] * p


def operators(comm: Communicator) -> None:
    p, rank = comm.size, comm.rank
    values = {op: comm.all_reduce(torch.tensor([rank + 1, -rank]), op=op).tolist() for op in ("max", "min")}
    assert values == {"max": [p, 0], "min": [1, 1 - p]}
    assert comm.all_reduce(torch.tensor([2.0]), op="product").item() == 2.0**p
    assert comm.all_reduce(torch.tensor([float(rank)]), op="avg").item() == (p - 1) / 2
    top = torch.tensor([2**63 + rank if rank else 5], dtype=torch.uint64)
    assert comm.all_reduce(top.clone(), op="max").tolist() == [2**63 + p - 1 if p > 1 else 5]
    assert comm.all_reduce(top.clone(), op="min").tolist() == [5]
    bits = torch.tensor([1 << rank, 3])
    ones = {op: comm.all_reduce(bits.clone(), op=op).tolist() for op in ("band", "bor", "bxor")}
    assert ones == {"band": [1 if p == 1 else 0, 3], "bor": [2**p - 1, 3], "bxor": [2**p - 1, 3 if p % 2 else 0]}
    truth = {op: comm.all_reduce(torch.tensor([rank, 1]), op=op).tolist() for op in ("land", "lor", "lxor")}
    first = {"land": 0, "lor": int(p > 1), "lxor": (p - 1) % 2}
    assert truth == {op: [first[op], p % 2 if op == "lxor" else 1] for op in first}
    assert set(OPERATORS) == {*values, *ones, *truth, "sum", "product", "avg"}
    assert comm.all_reduce(torch.tensor([float(rank)]), op=torch.fmax).item() == p - 1
    assert comm.scan(torch.tensor([rank]), op=Operator(torch.maximum)).item() == rank


def shapes_are_kept(comm: Communicator) -> None:
    """Scalars, matrices, strided slices, transposed and channels-last tensors, leaves that need gradients."""
    p = comm.size
    assert comm.all_reduce(torch.tensor(1.0 + comm.rank)).item() == p * (p + 1) / 2
    matrix = tensor_of(comm.rank, 24).view(4, 6)
    comm.all_reduce(matrix.t())
    assert torch.equal(matrix, total(p, 24).view(4, 6))
    vector = tensor_of(comm.rank, 24)
    comm.all_reduce(vector[::3])
    assert torch.equal(vector[::3], total(p, 24)[::3])
    assert torch.equal(vector[1::3], tensor_of(comm.rank, 24)[1::3])
    image = tensor_of(comm.rank, 24).view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
    comm.broadcast(image, root=p - 1)
    assert torch.equal(image, tensor_of(p - 1, 24).view(1, 2, 3, 4))
    leaf = torch.full((3,), 1.0, requires_grad=True)
    comm.all_reduce(leaf)
    assert leaf.requires_grad
    assert leaf.tolist() == [p] * 3
    assert not comm.all_gather(leaf).requires_grad
    conjugate = torch.tensor([1 + 2j]).conj()
    assert comm.all_reduce(conjugate).tolist() == [p * (1 - 2j)]
    expanded = torch.tensor([float(comm.rank)]).expand(2, 3)
    assert comm.all_gather(expanded).shape == (p, 2, 3)


def results_are_written_to_out(comm: Communicator) -> None:
    """`out=` with gaps and of another dim order, on the ranks that receive data."""
    p, rank = comm.size, comm.rank
    wide = torch.zeros(p, 6)
    assert comm.all_gather(torch.full((3,), float(rank)), out=wide[:, ::2]) is not None
    assert wide.tolist() == [[r, 0, r, 0, r, 0] for r in range(p)]
    turned = torch.zeros(3, p)
    comm.all_to_all(torch.full((p, 3), float(rank)), out=turned.t())
    assert turned.t().tolist() == [[r] * 3 for r in range(p)]
    into = torch.zeros(2)
    got = comm.reduce(torch.ones(2), root=p - 1, out=into)
    assert (got is into and into.tolist() == [p, p]) if rank == p - 1 else (got is None and into.tolist() == [0, 0])
    rows = torch.arange(2 * p).view(p, 2) if rank == 0 else None
    assert comm.scatter(rows, out=torch.empty(2, dtype=torch.int64)).tolist() == [2 * rank, 2 * rank + 1]
    with pytest.raises(InputError, match=r"out= of float32 \(2,\)(.|\n)*the result is float32 \(3,\)"):
        comm.scan(torch.ones(3), out=torch.zeros(2))


def all_ranks_have_the_same_bits(comm: Communicator) -> None:
    for algorithm in ALGORITHMS["all_reduce"]:
        generator = torch.Generator().manual_seed(comm.rank)
        tensor = comm.all_reduce(torch.randn(101, generator=generator), algorithm=algorithm)
        assert torch.equal(tensor, comm.broadcast(tensor.clone())), algorithm


def messages_arrive(comm: Communicator) -> None:
    """A nonblocking ring, separate tags, strided tensors, and an order that the receiver chooses."""
    p, rank = comm.size, comm.rank
    if p == 1:
        with pytest.raises(InputError, match="another rank of 0 to 0"):
            comm.send(torch.ones(1), 0)
        return
    into = torch.zeros(6)
    coming = comm.start_receive(into[::2], (rank - 1) % p)
    going = comm.start_send(torch.full((1, 3), float(rank)), (rank + 1) % p)
    coming.wait()
    going.wait()
    assert into.tolist() == [(rank - 1) % p, 0] * 3
    if rank == 0:
        sends = [comm.start_send(torch.tensor([float(tag)]), 1, tag=tag) for tag in (7, 8, 32767)]
        for one in sends:
            one.wait()
    if rank == 1:
        got = [torch.zeros(1) for _ in range(3)]
        pending = [comm.start_receive(t, 0, tag=tag) for t, tag in zip(got, (32767, 8, 7), strict=True)]
        for one in reversed(pending):
            one.wait()
        assert [t.item() for t in got] == [32767, 8, 7]
    comm.barrier()
    for bad, text in ((rank, "another rank"), (p, "another rank")):
        with pytest.raises(InputError, match=text):
            comm.send(torch.ones(1), bad)
    with pytest.raises(InputError, match=r"tag 32768\n.*0 <= tag < 32768"):
        comm.receive(torch.ones(1), (rank + 1) % p, tag=32768)


def splits_are_communicators(comm: Communicator) -> None:
    """Even and odd ranks, in reverse order, and split once more; groups do not receive each other's messages."""
    p = comm.size
    half = comm.split(comm.rank % 2, key=-comm.rank)
    peers = [r for r in reversed(range(p)) if r % 2 == comm.rank % 2]
    assert (half.rank, half.size) == (peers.index(comm.rank), len(peers))
    assert half.broadcast(torch.tensor([comm.rank])).item() == peers[0]
    assert half.all_reduce(torch.tensor([comm.rank])).item() == sum(peers)
    assert half.all_gather(torch.tensor(comm.rank)).tolist() == peers
    single = half.split(half.rank)
    assert single.all_reduce(torch.tensor([comm.rank])).item() == comm.rank
    assert single.traffic == Traffic()
    same = comm.split(0)
    assert same.rank == comm.rank
    assert same.all_reduce(torch.tensor([1])).item() == comm.all_reduce(torch.tensor([1])).item() == p


def any_schedule_runs_in_place(comm: Communicator) -> None:
    p = comm.size
    for size in SIZES:
        tensor = tensor_of(comm.rank, size)
        gather, scatter = (collective_schedule(c, "ring", p) for c in ("all_gather", "reduce_scatter"))
        start, stop = scatter.ranges(size)[comm.rank]
        comm.run(scatter, tensor)
        assert torch.equal(tensor[start:stop], total(p, size)[start:stop])
        tensor[:start] = tensor[stop:] = -1
        comm.run(segmented(gather, 2), tensor)
        assert torch.equal(tensor, total(p, size))
    rows = torch.stack([tensor_of(comm.rank * p + r, 4) for r in range(p)])
    comm.run(collective_schedule("all_to_all", "pairwise", p), rows)
    assert torch.equal(rows, torch.stack([tensor_of(r * p + comm.rank, 4) for r in range(p)]))


CHECKS = (
    every_algorithm_is_correct,
    segments_change_nothing,
    auto_and_native_are_correct,
    the_rank_order_is_kept,
    types_are_kept,
    operators,
    shapes_are_kept,
    results_are_written_to_out,
    all_ranks_have_the_same_bits,
    messages_arrive,
    splits_are_communicators,
    any_schedule_runs_in_place,
)
