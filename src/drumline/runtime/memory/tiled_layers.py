"""Linear and embedding layers in parts of rows. Each part is a module of its own, so that FSDP gathers one at a time.

The layer stays the object that it was, with its hooks and its class (a subclass of it): only its forward is another.
Somebody who reads its weight gets all of it, put together from the parts, with its gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from ...torchkit.operators import assert_async
from .chunked_loss import Scorer, scores
from .logits import LazyLogits


class _After(torch.autograd.Function):
    """The parameter as it is. The ticket gets a gradient (of zero) when the parameter has one.

    FSDP drops a unit's parameters and sends their gradients when the gradient of one of its inputs is there. Tokens
    have no gradient, and without a ticket all parts of an embedding would stay until the end of the backward.
    """

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, ticket: torch.Tensor) -> torch.Tensor:
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], gradients[0].new_zeros(())


class LayerTile(nn.Module):
    """Some rows of a layer. Under zero=3 each is a unit of its own."""

    def __init__(self, rows: range, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.start, self.stop = rows.start, rows.stop
        self.weight = weight
        self.bias = bias

    @property
    def rows(self) -> range:
        """Which rows of the layer's."""
        return range(self.start, self.stop)

    def forward(self, what: str, x: torch.Tensor | None, ticket: torch.Tensor | None, *more: Any) -> torch.Tensor:
        """Everything that needs the weight: it is here while this runs."""
        weight: torch.Tensor = self.weight
        bias: torch.Tensor | None = self.bias
        if ticket is not None and weight.requires_grad:
            weight = _After.apply(weight, ticket)  # type: ignore[no-untyped-call]  # torch's own
        elif ticket is not None and bias is not None and bias.requires_grad:
            bias = _After.apply(bias, ticket)  # type: ignore[no-untyped-call]
        out = _WORK[what](weight, bias, self.rows, x, *more)
        assert isinstance(out, torch.Tensor)
        return out

    def call(self, what: str, x: torch.Tensor | None, *more: Any) -> torch.Tensor:
        """Run it, with a ticket where the input has no gradient."""
        ticket = None
        if torch.is_grad_enabled() and (x is None or not x.requires_grad):
            ticket = torch.zeros((), device=self._device(x), requires_grad=True)
        out = self(what, x, ticket, *more)
        assert isinstance(out, torch.Tensor)
        return out

    def _device(self, x: torch.Tensor | None) -> torch.device | str:
        """Where it computes: an offloaded shard lies in host memory, and a ticket there would leave the backward's
        order to two threads."""
        if x is not None:
            return x.device
        return self.weight.device_mesh.device_type if isinstance(self.weight, DTensor) else self.weight.device

    def extra_repr(self) -> str:
        """Its rows."""
        return f"rows {self.start} to {self.stop}"


class LayerTiles(nn.ModuleList):
    """The parts of a layer."""

    inside_a_leaf = True
    """For `layers_of`: a layer with parts is as simple a layer as without."""


_Bias = torch.Tensor | None


def _linear(weight: torch.Tensor, bias: _Bias, rows: range, x: torch.Tensor, biased: bool) -> torch.Tensor:
    return F.linear(x, weight, bias if biased else None)


def _look_up(weight: torch.Tensor, bias: _Bias, rows: range, tokens: torch.Tensor, padding: int | None) -> torch.Tensor:
    """The rows of the tokens that are in this part, and zeros for the others."""
    elsewhere = (tokens < rows.start) | (tokens >= rows.stop)
    index = (tokens - rows.start).clamp(0, len(rows) - 1)
    padding = padding - rows.start if padding is not None and padding in rows else None
    return F.embedding(index, weight, padding).masked_fill(elsewhere[..., None], 0.0)


def _scores(
    weight: torch.Tensor,
    bias: _Bias,
    rows: range,
    hidden: torch.Tensor,
    biased: bool,
    index: torch.Tensor,
    here: torch.Tensor,
    total: bool,
) -> torch.Tensor:
    return scores(hidden, weight, bias if biased else None, index, here, total=total)


def _read(weight: torch.Tensor, bias: _Bias, rows: range, x: None, of_bias: bool) -> torch.Tensor:
    value = bias if of_bias else weight
    assert value is not None
    return value.clone()


_WORK: dict[str, Any] = {"linear": _linear, "look up": _look_up, "scores": _scores, "read": _read}


class TiledLayer:
    """What both kinds of layers have. Mixed into the class of the layer."""

    parts: LayerTiles
    has_bias: bool = False
    """A part may have a bias that is not this layer's, but that of a layer which shares its weight."""
    materialized_by: str = ""
    """Which function asked for all of the logits last, where they were put off."""

    @property
    def _pieces(self) -> list[LayerTile]:
        """The parts in order."""
        return [p for p in self.parts if isinstance(p, LayerTile)]

    @property
    def weight(self) -> torch.Tensor:
        """All of it, for whom reads it: right, but as large as without parts."""
        return torch.cat([p.call("read", None, False) for p in self._pieces])


class TiledLinear(TiledLayer):
    """Output features in parts."""

    lazy: bool = False
    """It gives `Logits`."""
    out_features: int

    @property
    def bias(self) -> torch.Tensor | None:
        """As the weight."""
        return torch.cat([p.call("read", None, True) for p in self._pieces]) if self.has_bias else None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The outputs of the parts side by side."""
        if self.lazy and input.dim() > 1 and not torch.compiler.is_compiling():
            held = [q for p in self._pieces for q in p.parameters() if not isinstance(q, DTensor)]
            return LazyLogits.of(self, input, self.out_features, held)
        return self.whole(input)

    def whole(self, hidden: torch.Tensor) -> torch.Tensor:
        """All outputs."""
        shape = hidden.shape[:-1]
        flat = hidden.reshape(-1, hidden.shape[-1])  # or a part's output is a view, which FSDP minds
        return torch.cat([p.call("linear", flat, self.has_bias).view(*shape, -1) for p in self._pieces], -1)

    def scorers(self) -> Sequence[tuple[range, Scorer]]:
        """What the loss needs of each part."""
        return [(p.rows, partial(self._score, p)) for p in self._pieces]

    def _score(self, part: LayerTile, hidden: torch.Tensor, *more: Any) -> torch.Tensor:
        return part.call("scores", hidden, self.has_bias, *more)


class TiledEmbedding(TiledLayer):
    """The vocabulary in parts."""

    padding_idx: int | None
    num_embeddings: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Every token is in one part; the others give zeros, which change nothing."""
        inside = ((input >= 0) & (input < self.num_embeddings)).all()
        assert_async(inside, f"a token is not one of the {self.num_embeddings} of the embedding")
        first, *others = self._pieces
        out = first.call("look up", input, self.padding_idx)
        for part in others:
            out = out + part.call("look up", input, self.padding_idx)
        return out
