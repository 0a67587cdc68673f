"""Rank functions of the ring-attention tests: each rank's part, compared with torch's attention of the whole sequence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from drumline.partition.sharding import attention_block
from drumline.partition.sharding.redistribution import Axis
from drumline.partition.sharding.ring_attention import ring_attention
from drumline.runtime.state.process_groups import process_group


@dataclass(frozen=True)
class Case:
    """One attention of a sequence that is split at `bounds`."""

    bounds: tuple[int, ...]
    q_bounds: tuple[int, ...] | None = None
    causal: bool = False
    mask: str = ""
    """"", or words: bool, float, learned, one (row for all), heads (one per head), blind (a row that sees nothing)."""
    lead: tuple[int, ...] = (2, 4)
    keys: tuple[int, ...] | None = None
    """The leading dims of k and v, if they differ."""
    values: int = 8
    """Width of v; that of q and k is 8."""
    scale: float | None = None
    grouped: bool = False
    dtype: torch.dtype = torch.float64
    scores: int = attention_block.MAX_SCORES


def axis() -> Axis:
    return Axis("cp", dist.get_world_size(), dist.get_rank(), dist.group.WORLD)


def wholes(case: Case) -> tuple[list[Tensor], Tensor | None]:
    """q, k, v and the mask of the whole sequence; the same on every rank."""
    torch.manual_seed(7)
    t, u = (case.q_bounds or case.bounds)[-1], case.bounds[-1]
    keys = case.keys or case.lead
    shapes = [(*case.lead, t, 8), (*keys, u, 8), (*keys, u, case.values)]
    tensors = [torch.randn(s, dtype=case.dtype).requires_grad_() for s in shapes]
    if not case.mask:
        return tensors, None
    rows = 1 if "one" in case.mask else t
    shape = (case.lead[-1], rows, u) if "heads" in case.mask else (rows, u)
    if "bool" in case.mask:
        mask = torch.rand(shape) < 0.7
        mask[..., 0] = True
        if "blind" in case.mask:
            mask[..., rows // 2, :] = False
        return tensors, mask
    mask = torch.randn(shape, dtype=case.dtype)
    mask[..., -1:] = -torch.inf
    if "blind" in case.mask:
        mask[..., rows // 2, :] = -torch.inf
    return tensors, mask.requires_grad_("learned" in case.mask)


def part(x: Tensor, bounds: tuple[int, ...], rank: int, dim: int = -2) -> Tensor:
    return x.detach().narrow(dim, bounds[rank], bounds[rank + 1] - bounds[rank]).clone().requires_grad_(x.requires_grad)


@contextmanager
def at_most(scores: int) -> Iterator[None]:
    before = attention_block.MAX_SCORES
    attention_block.MAX_SCORES = scores
    try:
        yield
    finally:
        attention_block.MAX_SCORES = before


def ring(case: Case, **more: Any) -> tuple[Tensor, list[Tensor], Tensor | None]:
    """This rank's output, and its inputs with their gradients for a loss of the whole."""
    (q, k, v), mask = wholes(case)
    r, q_bounds = dist.get_rank(), case.q_bounds or case.bounds
    inputs = [part(q, q_bounds, r), part(k, case.bounds, r), part(v, case.bounds, r)]
    mine = None
    if mask is not None:
        mine = part(mask, (0, 1) if mask.shape[-2] == 1 else q_bounds, 0 if mask.shape[-2] == 1 else r)
    with at_most(case.scores):
        out = ring_attention(
            *inputs,
            mask=mine,
            is_causal=case.causal,
            scale=case.scale,
            bounds=case.bounds,
            q_bounds=case.q_bounds,
            axis=axis(),
            enable_gqa=case.grouped,
            **more,
        )
        out.backward(part(direction(out, case), q_bounds, r))
    return out.detach(), inputs, mine


def direction(out: Tensor, case: Case) -> Tensor:
    """The gradient of the whole output: random."""
    draw = torch.Generator().manual_seed(11)
    shape = (*out.shape[:-2], (case.q_bounds or case.bounds)[-1], out.shape[-1])
    return torch.randn(shape, generator=draw, dtype=torch.float64).to(out.dtype)


def errors(case: Case) -> dict[str, float]:
    """The largest differences of this rank's output and gradients from torch's."""
    (q, k, v), mask = wholes(case)
    want = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=case.causal, scale=case.scale, enable_gqa=case.grouped
    )
    want.backward(direction(want, case))
    out, inputs, mine = ring(case)
    r, q_bounds = dist.get_rank(), case.q_bounds or case.bounds
    errors = {"out": max_difference(out, part(want, q_bounds, r))}
    for name, x, whole, bounds in zip("qkv", inputs, (q, k, v), (q_bounds, case.bounds, case.bounds), strict=True):
        assert x.grad is not None and whole.grad is not None
        errors["d" + name] = max_difference(x.grad, part(whole.grad, bounds, r))
    if mine is not None and mine.requires_grad:
        assert mine.grad is not None and mask is not None and mask.grad is not None
        one = mask.shape[-2] == 1
        if one:
            dist.all_reduce(mine.grad)
        errors["dmask"] = max_difference(mine.grad, mask.grad if one else part(mask.grad, q_bounds, r))
    return errors


def max_difference(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape and a.dtype == b.dtype
    assert torch.isfinite(a).all() and torch.isfinite(b).all()
    return float((a - b).detach().abs().max()) if a.numel() else 0.0


def all_errors(cases: list[Case]) -> list[dict[str, float]]:
    return [errors(case) for case in cases]


def counted(case: Case) -> list[int]:
    """Bytes that this rank sent, batch by batch."""
    sent: list[int] = []
    original = dist.batch_isend_irecv

    def count(operations: list[Any]) -> Any:
        sent.append(sum(o.tensor.nbytes for o in operations if o.op is dist.isend))
        return original(operations)

    dist.batch_isend_irecv = count
    try:
        ring(case)
    finally:
        dist.batch_isend_irecv = original
    return sent


def observed_bytes(case: Case) -> int:
    """Bytes that an observer sees."""
    recorded: list[int] = []

    @contextmanager
    def observe(name: str, message: str, tensor: Tensor) -> Iterator[None]:
        assert (name, message) == ("cp", "ring")
        recorded.append(tensor.nbytes)
        yield

    (q, k, v), _ = wholes(case)
    r = dist.get_rank()
    parts = [part(x, case.bounds, r) for x in (q, k, v)]
    ring_attention(*parts, bounds=case.bounds, axis=replace(axis(), observer=observe), is_causal=case.causal)
    return sum(recorded)


def dropped(case: Case) -> tuple[float, float, float]:
    """The share of dropped probabilities; the difference of a second backward; the difference of dv from the formula.

    With one-hot values the output IS the row of probabilities after dropout.
    """
    n, r = case.bounds[-1], dist.get_rank()
    q = torch.zeros(1, 1, case.bounds[r + 1] - case.bounds[r], 8, dtype=case.dtype, requires_grad=True)
    k = torch.zeros(1, 1, case.bounds[r + 1] - case.bounds[r], 8, dtype=case.dtype)
    v = part(torch.eye(n, dtype=case.dtype)[None, None], case.bounds, r).requires_grad_()
    torch.manual_seed(3)
    out = ring_attention(q, k, v, bounds=case.bounds, axis=axis(), dropout_p=0.25)
    (dv,) = torch.autograd.grad(out.sum(), v, retain_graph=True)
    (again,) = torch.autograd.grad(out.sum(), v)
    rows = [
        torch.empty(1, 1, case.bounds[i + 1] - case.bounds[i], n, dtype=case.dtype) for i in range(len(case.bounds) - 1)
    ]
    dist.all_gather(rows, out.detach().contiguous())
    columns = torch.cat(rows, -2).sum(-2)[0, 0, case.bounds[r] : case.bounds[r + 1]]
    return float((out == 0).double().mean()), max_difference(dv, again), max_difference(dv[0, 0, :, 0], columns)


def fake_shapes(bounds: tuple[int, ...]) -> list[tuple[int, ...]]:
    """On fake tensors, without a group: shapes, forward and backward."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q = torch.empty(2, 4, bounds[2] - bounds[1], 8, requires_grad=True)
        k = torch.empty(2, 2, bounds[2] - bounds[1], 8, requires_grad=True)
        v = torch.empty(2, 2, bounds[2] - bounds[1], 6, requires_grad=True)
        mask = torch.zeros(q.shape[-2], bounds[-1], requires_grad=True)
        out = ring_attention(
            q, k, v, bounds=bounds, axis=Axis("cp", len(bounds) - 1, 1), mask=mask, enable_gqa=True, dropout_p=0.1
        )
        out.sum().backward()
        assert mask.grad is not None and q.grad is not None and k.grad is not None and v.grad is not None
        return [tuple(x.shape) for x in (out, q.grad, k.grad, v.grad, mask.grad)]


def in_pairs(case: Case) -> float:
    """Ranks 0 and 2, and ranks 1 and 3, form rings: ranks of a group differ from those of the world."""
    groups = [process_group([0, 2]), process_group([1, 3])]
    r = dist.get_rank() // 2
    (q, k, v), _ = wholes(case)
    want = F.scaled_dot_product_attention(q, k, v, is_causal=case.causal)
    parts = [part(x, case.bounds, r) for x in (q, k, v)]
    ring_of_two = Axis("cp", 2, r, groups[dist.get_rank() % 2])
    out = ring_attention(*parts, bounds=case.bounds, axis=ring_of_two, is_causal=case.causal)
    out.backward(part(direction(out, case), case.bounds, r))
    want.backward(direction(want, case))
    assert k.grad is not None and parts[1].grad is not None
    return max(
        max_difference(out, part(want, case.bounds, r)), max_difference(parts[1].grad, part(k.grad, case.bounds, r))
    )
