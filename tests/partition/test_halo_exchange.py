"""Windows give every rank the rows that it wants, with gradients; only foreign rows are sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from world import World

from drumline.partition.sharding.halo_exchange import (
    needs_exchange,
    rebalance,
    rows_sent,
    start_exchange,
    window,
    windows,
)
from drumline.partition.sharding.redistribution import Axis

Worlds = Callable[[int], World]

BOUNDS = {
    2: [(0, 6, 11), (0, 1, 11), (0, 0, 11), (0, 11, 11)],
    3: [(0, 4, 8, 11), (0, 1, 2, 11), (0, 5, 5, 11), (0, 0, 10, 11)],
    4: [(0, 3, 6, 9, 11), (0, 1, 2, 3, 11), (0, 4, 4, 4, 11), (0, 0, 5, 11, 11)],
}


def wanted_spans(bounds: tuple[int, ...]) -> list[tuple[tuple[int, int], ...]]:
    """Spans that ranks may want: a halo, a wide halo, everything, nothing, foreign rows, rows outside."""
    spans = list(pairwise(bounds))
    n = len(spans)
    return [
        tuple((a - 1, b + 1) for a, b in spans),
        tuple((a - 4, b + 3) for a, b in spans),
        tuple((-2, bounds[-1] + 2) for _ in spans),
        tuple((3, 3) for _ in spans),
        tuple(spans[(r + 1) % n] for r in range(n)),
        tuple((-3, 0) if r == 0 else (a, b) for r, (a, b) in enumerate(spans)),
        tuple((2, 5) if r == 0 else (0, 0) for r in range(n)),
    ]


def whole_window(x: torch.Tensor, dim: int, span: tuple[int, int], fill: float) -> torch.Tensor:
    """The rows of a whole tensor, by slicing."""
    rows = [
        x.select(dim, i) if 0 <= i < x.shape[dim] else torch.full_like(x.select(dim, 0), fill) for i in range(*span)
    ]
    none = x.narrow(dim, 0, 0)
    return torch.cat([torch.stack(rows, dim), none], dim) if rows else none


class Count:
    """Bytes that this rank has sent, by message."""

    def __init__(self) -> None:
        self.bytes = {"halo": 0, "halo back": 0}

    @contextmanager
    def observe(self, axis: str, message: str, tensor: torch.Tensor) -> Iterator[None]:
        assert axis == "rows"
        self.bytes[message] += tensor.numel() * tensor.element_size()
        yield


def axis_of(count: Count | None = None) -> Axis:
    return Axis("rows", dist.get_world_size(), dist.get_rank(), dist.group.WORLD, count.observe if count else None)


def check_rows_and_gradients() -> int:
    """All spans at all bounds: rows, gradients, and bytes by the formula. Returns the number of comparisons."""
    done = 0
    for bounds in BOUNDS[dist.get_world_size()]:
        for wanted in wanted_spans(bounds):
            for dim, fill in ((2, 0.0), (0, 2.5)):
                _check(bounds, wanted, dim, fill)
                done += 1
    return done


def _check(bounds: tuple[int, ...], wanted: tuple[tuple[int, int], ...], dim: int, fill: float) -> None:
    count = Count()
    axis = axis_of(count)
    shape = [2, 3, 4]
    shape[dim] = bounds[-1]
    whole = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    parts = [whole_window(whole, dim, span, fill) for span in wanted]
    gradients = [
        torch.randn(p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(r)) for r, p in enumerate(parts)
    ]
    torch.autograd.backward(parts, gradients)
    start, stop = bounds[axis.index], bounds[axis.index + 1]
    mine = whole.detach().narrow(dim, start, stop - start).clone().requires_grad_()
    out = window(mine * 1.0, dim, bounds, wanted, axis, fill)
    assert torch.equal(out, parts[axis.index])
    out.backward(gradients[axis.index])
    assert whole.grad is not None and mine.grad is not None
    torch.testing.assert_close(mine.grad, whole.grad.narrow(dim, start, stop - start), rtol=0, atol=1e-12)
    row = whole.numel() // bounds[-1] * 8
    back = sum(
        max(0, min(wanted[axis.index][1], b) - max(wanted[axis.index][0], a))
        for r, (a, b) in enumerate(pairwise(bounds))
        if r != axis.index
    )
    assert count.bytes == {"halo": rows_sent(bounds, wanted, axis.index) * row, "halo back": back * row}


@pytest.mark.parametrize("p", [2, 3, 4])
def test_rows_gradients_and_bytes(world: Worlds, p: int) -> None:
    assert world(p).run(check_rows_and_gradients) == [56] * p


def other_uses() -> None:
    """Several spans, other bounds, the two halves, types that a backend does not support, no gradient."""
    axis = axis_of()
    bounds = (0, 5, 6, 11)
    whole = torch.randn(2, 11, 3, dtype=torch.float64)
    mine = whole[:, bounds[axis.index] : bounds[axis.index + 1]]
    spans = ((9, 11), (0, 2), (-1, 0))
    out = windows(mine, 1, bounds, (spans,) * 3, axis, 7.0)
    assert torch.equal(out, torch.cat([whole[:, 9:], whole[:, :2], torch.full((2, 1, 3), 7.0, dtype=whole.dtype)], 1))
    new = (0, 2, 9, 11)
    assert torch.equal(rebalance(mine, 1, bounds, new, axis), whole[:, new[axis.index] : new[axis.index + 1]])
    halo = start_exchange(mine, 1, bounds, (((0, 11),),) * 3, axis)
    assert torch.equal(halo.here(bounds[axis.index], bounds[axis.index + 1]), mine)
    assert torch.equal(halo.rows((3, 8)), whole[:, 3:8]) and torch.equal(halo.rows((0, 11)), whole)
    for dtype in (torch.bfloat16, torch.bool, torch.complex64):
        other = (whole > 0).to(dtype)
        part = other[:, bounds[axis.index] : bounds[axis.index + 1]]
        assert torch.equal(window(part, 1, bounds, ((0, 11),) * 3, axis), other)


def test_other_uses(world: Worlds) -> None:
    world(3).run(other_uses)


def unused_rows_send_zeros() -> list[float]:
    """Rank 0 requests rows and does not use them: rank 1's gradient must not wait for ever."""
    axis = axis_of()
    mine = torch.ones(4, dtype=torch.float64, requires_grad=True)
    halo = start_exchange(mine, 0, (0, 4, 8), (((0, 6),), ((4, 8),)), axis)
    halo.finish()
    (halo.own * 3.0).sum().backward()
    assert mine.grad is not None
    return mine.grad.tolist()  # type: ignore[no-any-return]


def test_unused_rows_get_zero_gradients(world: Worlds) -> None:
    assert world(2).run(unused_rows_send_zeros) == [[3.0] * 4] * 2


def order_of_backward() -> list[str]:
    """Events between the halves, in the order of the backward."""
    seen: list[str] = []

    @contextmanager
    def observe(_: str, message: str, tensor: torch.Tensor) -> Iterator[None]:
        seen.append(message)
        yield

    axis = Axis("rows", 2, dist.get_rank(), dist.group.WORLD, observe)
    mine = torch.ones(4, dtype=torch.float64, requires_grad=True)
    halo = start_exchange(mine, 0, (0, 4, 8), (((0, 5),), ((3, 8),)), axis)
    middle = halo.own * 2.0
    assert middle.grad_fn is not None
    middle.grad_fn.register_hook(lambda *_: seen.append("between"))
    post, halo._messages.send_gradients = (
        halo._messages.send_gradients,
        lambda g: (seen.append("send gradients"), post(g))[1],
    )  # type: ignore[method-assign]
    (halo.rows((0, 5) if axis.index == 0 else (3, 8)).sum() + middle.sum()).backward()
    return seen


def test_the_backward_overlaps_too(world: Worlds) -> None:
    assert world(2).run(order_of_backward) == [["halo", "send gradients", "between", "halo back"]] * 2


def test_shapes_without_ranks() -> None:
    """On fake tensors nothing is sent, and no group is needed."""
    with FakeTensorMode():
        x = torch.empty(2, 3, 4, 5, requires_grad=True)
        for index, rows in ((0, 6), (1, 5)):
            out = window(x, 2, (0, 4, 8), ((-1, 5), (3, 8)), Axis("rows", 2, index))
            assert out.shape == (2, 3, rows, 5) and out.requires_grad
            out.sum().backward()
            assert x.grad is not None and x.grad.shape == x.shape


def test_bytes_by_the_formula() -> None:
    assert [rows_sent((0, 4, 8), ((-1, 5), (3, 9)), r) for r in range(2)] == [1, 1]
    assert [rows_sent((0, 1, 2, 8), ((0, 4), (0, 5), (0, 8)), r) for r in range(3)] == [2, 2, 5]
    assert not needs_exchange((0, 4, 8), ((-1, 4), (4, 9)))


def test_wrong_bounds_are_refused() -> None:
    x, axis = torch.zeros(4), Axis("rows", 2, 0)
    with pytest.raises(AssertionError, match=r"4 rows of \(0, 3, 8\) on rank 0"):
        window(x, 0, (0, 3, 8), ((0, 3), (3, 8)), axis)
    with pytest.raises(AssertionError, match="on 2 ranks"):
        window(x, 0, (0, 4), ((0, 4),), axis)


def test_shape_only_tensors_are_not_observed() -> None:
    axis = Axis("rows", 2, 0, observer=lambda *_: pytest.fail("a message"))
    with FakeTensorMode():
        assert window(torch.empty(4, 3), 0, (0, 4, 8), ((-1, 5), (3, 9)), axis).shape == (6, 3)
