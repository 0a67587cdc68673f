"""The experts of a mixture as a layer: a model that uses it can be run with expert parallelism."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ..core.errors import JobError
from ..torchkit.fake_tensors import FakeTensor


class Experts(nn.ModuleList):
    """A list of experts, called with tokens and the experts of each token.

        experts = Experts(make_expert() for _ in range(8))  # each maps [rows, width] to [rows, width]
        weight, index = router(x).softmax(-1).topk(2)       # [tokens, 2] each
        y = experts(x, index, weight)                       # y[t]: the sum of weight[t, j] * experts[index[t, j]](x[t])

    No token is dropped, whatever the router chooses. The router and its loss stay yours. An expert must treat its rows
    independently: it cannot know which other tokens it gets. An expert without tokens has gradients of 0, not None, so
    optimizers treat it the same on one device and on many.
    """

    def forward(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        """x: [..., width]; index, weight: [..., k], the experts of a token and their weights."""
        flat, k = x.reshape(-1, x.shape[-1]), index.shape[-1]
        chosen = index.reshape(-1)
        counts = expert_loads(chosen, len(self))
        order = chosen.argsort(stable=True)
        rows = order // k
        outs, idle = [], []
        for expert, part in zip(self._modules.values(), flat[rows].split(counts), strict=True):
            assert expert is not None
            if part.shape[0]:
                outs.append(_checked(expert(part), part))
            else:
                idle += list(expert.parameters())
        y = torch.cat(outs) if outs else flat[rows]
        return with_zero_gradients(add_rows(y * weight.reshape(-1)[order].unsqueeze(-1), rows, flat), idle).view(
            x.shape
        )


def add_rows(y: Tensor, rows: Tensor, like: Tensor) -> Tensor:
    """A tensor like `like`, with every row of y added to the row that `rows` names; half precision sums in float32."""
    kind = torch.promote_types(y.dtype, torch.float32)
    total = torch.zeros(like.shape, dtype=kind, device=like.device)
    return total.index_add(0, rows, y.to(kind)).to(like.dtype)


def with_zero_gradients(x: Tensor, parameters: Iterable[nn.Parameter]) -> Tensor:
    """x itself, made to depend on the parameters with gradients of 0; none of their values is read, so no NaN."""
    for p in parameters:
        if p.requires_grad:
            x = x + p.flatten()[:0].sum()
    return x


def expert_loads(chosen: Tensor, n: int) -> list[int]:
    """Tokens of each of n experts. Fake tensors have no values: there, all get the same."""
    if isinstance(chosen, FakeTensor):
        return [(len(chosen) * (e + 1)) // n - (len(chosen) * e) // n for e in range(n)]
    if not len(chosen):
        return [0] * n
    low, high = torch.stack(torch.aminmax(chosen)).tolist()
    if low < 0 or high >= n:
        raise JobError(
            f"the router chose expert {high if high >= n else low}",
            rule=f"there are {n} experts: 0 to {n - 1}",
            fix="give every token experts that exist; an expert that should not count gets the weight 0",
        )
    return [int(c) for c in torch.bincount(chosen, minlength=n).tolist()]


def _checked(y: object, x: Tensor) -> Tensor:
    """Check that an expert's output can be added to the others'."""
    if not isinstance(y, Tensor) or y.shape != x.shape:
        result = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
        raise JobError(
            f"an expert returned {result} for {tuple(x.shape)}",
            rule="an expert maps [rows, width] to a tensor of the same shape",
            fix="change the width before or after the experts",
        )
    return y
