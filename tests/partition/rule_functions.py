"""Rank functions: dropout, and redistribution between layouts."""

from __future__ import annotations

import torch
import torch.distributed as dist
from rule_contract import Case, captured_of, shard
from torch import nn

from drumline.partition.program import GraphProgram, ParameterHolder, register_tensor
from drumline.partition.sharding import redistribution
from drumline.partition.sharding.layout import Split
from drumline.partition.sharding.redistribution import Axis, part_of


def _axis() -> Axis:
    return Axis("tp", dist.get_world_size(), dist.get_rank(), dist.group.WORLD)


def drop(split: Split | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Dropout of ones, whole or split; and the generator's next numbers."""
    captured, _, batch = captured_of(Case("dropout", lambda a: torch.nn.functional.dropout(a, 0.5, True), ((64,),)))
    axis, ones = _axis(), torch.ones(64, dtype=torch.float64)
    done = shard(captured, batch, {"a": split} if split else {}, axis)
    root = ParameterHolder()
    register_tensor(root, "a", nn.Parameter(part_of(ones, split, axis.index).clone() if split else ones))
    (out,) = GraphProgram(done.new, captured.constants, root)()
    return out.detach(), torch.rand(4)


def redistributed(split: Split) -> list[str]:
    """Every redistribution, forward and backward, against its definition."""
    axis = _axis()
    n, r = axis.size, axis.index
    g = torch.Generator().manual_seed(3)
    shape = [3, 3, 3]
    shape[split.dim] = split.size
    each = [torch.randn(shape, generator=g, dtype=torch.float64) for _ in range(n)]
    slopes = [torch.randn(shape, generator=g, dtype=torch.float64) for _ in range(n)]
    whole, slope = each[0], slopes[0]
    own, own_slope = part_of(whole, split, r), part_of(slope, split, r)
    total, slopes_total = sum(each), sum(slopes)
    checks = {
        "gather": (redistribution.gather, own, whole, slope, own_slope),
        "gather_to_enter": (
            redistribution.gather_into_split_work,
            own,
            whole,
            slopes[r],
            part_of(slopes_total, split, r),
        ),
        "take": (redistribution.take_part, whole, own, own_slope, slope),
        "scatter": (redistribution.reduce_scatter_partial, each[r], part_of(total, split, r), own_slope, slope),
        "reduce": (lambda x, _, a: redistribution.reduce_partial(x, a), each[r], total, slope, slope),
        "enter": (lambda x, _, a: redistribution.enter_split_work(x, a), whole, whole, slopes[r], slopes_total),
    }
    wrong = []
    for name, (move, given, want, gradient, want_gradient) in checks.items():
        x = given.clone().requires_grad_()
        out = move(x, split, axis)
        out.backward(gradient)
        for what, a, b in ((name, out, want), (f"{name} backward", x.grad, want_gradient)):
            if a.shape != b.shape or not torch.allclose(a, b, rtol=0, atol=1e-12):
                wrong.append(what)
        if not out.is_contiguous():
            wrong.append(f"{name} is not contiguous")
    return wrong
