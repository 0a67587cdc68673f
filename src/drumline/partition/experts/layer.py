"""The experts of a mixture, as a layer: write a mixture of experts with it, and Drumline can spread the experts."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ...core.errors import JobError


class Experts(nn.ModuleList):
    """A list of experts that is called with tokens and with the experts of each token.

        experts = Experts(make_expert() for _ in range(8))  # each maps [rows, width] to [rows, width]
        weight, index = router(x).softmax(-1).topk(2)       # [tokens, 2] each
        y = experts(x, index, weight)                       # y[t]: the sum of weight[t, j] * experts[index[t, j]](x[t])

    No token is dropped, whatever the router chooses. What the router computes, and its loss, stay yours. An expert must
    treat its rows one by one: it cannot know which other tokens come to it. An expert without tokens has gradients of
    0, not None, so optimizers treat it the same on one device and on many.
    """

    def forward(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        """x: [..., width]; index, weight: [..., k], the experts of a token and what each counts."""
        flat, k = x.reshape(-1, x.shape[-1]), index.shape[-1]
        chosen = index.reshape(-1)
        counts = loads(chosen, len(self))
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
        return touched(add_rows(y * weight.reshape(-1)[order].unsqueeze(-1), rows, flat), idle).view(x.shape)


def add_rows(y: Tensor, rows: Tensor, like: Tensor) -> Tensor:
    """A tensor like `like`, with every row of y added to the row that `rows` names; half precision adds in float32."""
    kind = torch.promote_types(y.dtype, torch.float32)
    total = torch.zeros(like.shape, dtype=kind, device=like.device)
    return total.index_add(0, rows, y.to(kind)).to(like.dtype)


def touched(x: Tensor, parameters: Iterable[nn.Parameter]) -> Tensor:
    """x itself; but now it depends on the parameters, with gradients of 0: of none of their numbers, so of no NaN."""
    for p in parameters:
        if p.requires_grad:
            x = x + p.flatten()[:0].sum()
    return x


def loads(chosen: Tensor, n: int) -> list[int]:
    """How many tokens each of n experts gets. Fake tensors have no values: there, all get the same."""
    if isinstance(chosen, FakeTensor):
        return [(len(chosen) * (e + 1)) // n - (len(chosen) * e) // n for e in range(n)]
    if not len(chosen):
        return [0] * n
    low, high = torch.stack(torch.aminmax(chosen)).tolist()
    if low < 0 or high >= n:
        raise JobError(
            f"the router chose expert {high if high >= n else low}",
            rule=f"there are {n} experts: 0 to {n - 1}",
            fix="give every token experts that exist; one that should not count gets the weight 0",
        )
    return [int(c) for c in torch.bincount(chosen, minlength=n).tolist()]


def _checked(y: object, x: Tensor) -> Tensor:
    """What an expert gave, if it can be added to what the others gave."""
    if not isinstance(y, Tensor) or y.shape != x.shape:
        found = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
        raise JobError(
            f"an expert made {found} of {tuple(x.shape)}",
            rule="an expert maps [rows, width] to a tensor of the same shape",
            fix="put what changes the width before or behind the experts",
        )
    return y
