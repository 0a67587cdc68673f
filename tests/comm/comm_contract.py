"""What every communicator must do, whatever its transport and however many ranks: each check runs on all of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from drumline.comm import Communicator
from drumline.schedule import Traffic, binomial_broadcast, collective_schedule, ring_all_reduce

Check = Callable[[Communicator], None]
SIZES = (0, 1, 2, 7, 24, 1000)


def tensor_of(rank: int, size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """A vector that differs by rank and place; whole numbers, so that sums are exact in any order."""
    return (torch.arange(size) * 3 + 7 * rank).remainder(50).to(dtype)


def total(p: int, size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The sum over all ranks."""
    return torch.stack([tensor_of(r, size, dtype) for r in range(p)]).sum(0).to(dtype)


def all_reduce_sums_and_counts(comm: Communicator) -> None:
    for size in SIZES:
        before = comm.traffic
        tensor = tensor_of(comm.rank, size)
        assert comm.all_reduce(tensor) is tensor
        assert torch.equal(tensor, total(comm.size, size))
        assert comm.traffic - before == ring_all_reduce(comm.size).traffic(8 * size, itemsize=8)[comm.rank]


def broadcast_copies_and_counts(comm: Communicator) -> None:
    for size in SIZES:
        for root in {0, comm.size // 2, comm.size - 1}:
            before = comm.traffic
            tensor = comm.broadcast(tensor_of(comm.rank, size), root=root)
            assert torch.equal(tensor, tensor_of(root, size))
            expected = binomial_broadcast(comm.size, root).traffic(8 * size, itemsize=8)
            assert comm.traffic - before == expected[comm.rank]


def types_are_kept(comm: Communicator) -> None:
    types = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.complex64)
    for dtype in types:
        mine = torch.ones(5, dtype=dtype) if dtype.is_complex else tensor_of(comm.rank, 5, dtype) % 7
        tensor = comm.all_reduce(mine)
        assert tensor.dtype == dtype
        if dtype.is_complex:
            assert torch.equal(tensor, torch.full((5,), comm.size, dtype=dtype))
        else:
            expected = sum(tensor_of(r, 5, torch.int64) % 7 for r in range(comm.size))
            assert torch.equal(tensor.to(torch.int64), expected)
    flags = comm.broadcast(torch.tensor([comm.rank == 0, comm.rank != 0]))
    assert flags.tolist() == [True, False]


def operations(comm: Communicator) -> None:
    p = comm.size
    values = {op: comm.all_reduce(torch.tensor([comm.rank + 1, -comm.rank]), op=op).tolist() for op in ("max", "min")}
    assert values == {"max": [p, 0], "min": [1, 1 - p]}
    assert comm.all_reduce(torch.tensor([2.0]), op="product").item() == 2.0**p


def shapes_are_kept(comm: Communicator) -> None:
    """Scalars, matrices, slices with gaps, transposed and channels-last tensors, leaves that need gradients."""
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
    conjugate = torch.tensor([1 + 2j]).conj()
    assert comm.all_reduce(conjugate).tolist() == [p * (1 - 2j)]


def all_ranks_have_the_same_bits(comm: Communicator) -> None:
    generator = torch.Generator().manual_seed(comm.rank)
    tensor = comm.all_reduce(torch.randn(101, generator=generator))
    first = comm.broadcast(tensor.clone())
    assert torch.equal(tensor, first)


def splits_are_communicators(comm: Communicator) -> None:
    """Even and odd ranks apart, in reverse order, and split once more; groups do not hear each other."""
    p = comm.size
    half = comm.split(comm.rank % 2, key=-comm.rank)
    peers = [r for r in reversed(range(p)) if r % 2 == comm.rank % 2]
    assert (half.rank, half.size) == (peers.index(comm.rank), len(peers))
    assert half.broadcast(torch.tensor([comm.rank])).item() == peers[0]
    assert half.all_reduce(torch.tensor([comm.rank])).item() == sum(peers)
    single = half.split(half.rank)
    assert single.all_reduce(torch.tensor([comm.rank])).item() == comm.rank
    assert single.traffic == Traffic()
    same = comm.split(0)
    assert same.rank == comm.rank
    assert same.all_reduce(torch.tensor([1])).item() == comm.all_reduce(torch.tensor([1])).item() == p


def shares_are_gathered_and_scattered(comm: Communicator) -> None:
    p = comm.size
    for size in SIZES:
        tensor = tensor_of(comm.rank, size)
        gather, scatter = (collective_schedule(c, "ring", p) for c in ("all_gather", "reduce_scatter"))
        start, stop = scatter.ranges(size)[comm.rank]
        comm.run(scatter, tensor)
        assert torch.equal(tensor[start:stop], total(p, size)[start:stop])
        tensor[:start] = tensor[stop:] = -1
        comm.run(gather, tensor)
        assert torch.equal(tensor, total(p, size))


CHECKS = (
    all_reduce_sums_and_counts,
    broadcast_copies_and_counts,
    types_are_kept,
    operations,
    shapes_are_kept,
    all_ranks_have_the_same_bits,
    splits_are_communicators,
    shares_are_gathered_and_scattered,
)
