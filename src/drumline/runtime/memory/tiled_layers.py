"""Tiled linear and embedding layers: a tile is a range of rows, and a module of its own, so FSDP gathers one at a time.

The layer stays the same object, with its hooks and its class (now a subclass): only its forward changes. Reading its
weight gives all of it, concatenated from the tiles, with its gradient. State dicts have the layer's own names,
`fc.weight`, not `fc.parts.0.weight`, so they load strictly into the model as its author wrote it, and the other way
round. Sharded tiles keep their names: concatenating them would be a message; checkpoints use the strategy's pieces.
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
from .chunked_loss import Scorer, part_scores
from .logits import LazyLogits


class _WithTicket(torch.autograd.Function):
    """Identity on a parameter. The ticket gets a gradient (of zero) when the parameter has one.

    FSDP frees a unit's parameters and sends their gradients once an input of the unit has its gradient. Tokens have no
    gradient, and without a ticket all tiles of an embedding would stay in memory until the end of the backward.
    """

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, ticket: torch.Tensor) -> torch.Tensor:
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], gradients[0].new_zeros(())


class LayerTile(nn.Module):
    """Some rows of a layer; under zero=3 a unit of its own."""

    def __init__(self, rows: range, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.start, self.stop = rows.start, rows.stop
        self.weight = weight
        self.bias = bias

    @property
    def rows(self) -> range:
        """Its rows of the layer."""
        return range(self.start, self.stop)

    def forward(self, what: str, x: torch.Tensor | None, ticket: torch.Tensor | None, *more: Any) -> torch.Tensor:
        """Do all work that needs the weight, which is gathered while this runs."""
        weight: torch.Tensor = self.weight
        bias: torch.Tensor | None = self.bias
        if ticket is not None and weight.requires_grad:
            weight = _WithTicket.apply(weight, ticket)  # type: ignore[no-untyped-call]  # torch's own
        elif ticket is not None and bias is not None and bias.requires_grad:
            bias = _WithTicket.apply(bias, ticket)  # type: ignore[no-untyped-call]
        out = _OPERATIONS[what](weight, bias, self.rows, x, *more)
        assert isinstance(out, torch.Tensor)
        return out

    def call(self, what: str, x: torch.Tensor | None, *more: Any) -> torch.Tensor:
        """Run it, with a ticket if the input has no gradient."""
        ticket = None
        if torch.is_grad_enabled() and (x is None or not x.requires_grad):
            ticket = torch.zeros((), device=self._device(x), requires_grad=True)
        out = self(what, x, ticket, *more)
        assert isinstance(out, torch.Tensor)
        return out

    def _device(self, x: torch.Tensor | None) -> torch.device | str:
        """The device it computes on: an offloaded shard is in host memory, and with a ticket there two threads would
        decide the order of the backward."""
        if x is not None:
            return x.device
        return self.weight.device_mesh.device_type if isinstance(self.weight, DTensor) else self.weight.device

    def extra_repr(self) -> str:
        """Its rows."""
        return f"rows {self.start} to {self.stop}"


class LayerTiles(nn.ModuleList):
    """The tiles of a layer."""

    inside_a_leaf = True
    """For `layers_of`: a tiled layer is a simple layer, too."""


_Bias = torch.Tensor | None


def _linear(weight: torch.Tensor, bias: _Bias, rows: range, x: torch.Tensor, biased: bool) -> torch.Tensor:
    return F.linear(x, weight, bias if biased else None)


def _lookup(weight: torch.Tensor, bias: _Bias, rows: range, tokens: torch.Tensor, padding: int | None) -> torch.Tensor:
    """The rows of the tokens in this tile, and zeros for the others."""
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
    in_tile: torch.Tensor,
    total: bool,
) -> torch.Tensor:
    return part_scores(hidden, weight, bias if biased else None, index, in_tile, total=total)


def _read(weight: torch.Tensor, bias: _Bias, rows: range, x: None, of_bias: bool) -> torch.Tensor:
    value = bias if of_bias else weight
    assert value is not None
    return value.clone()


_OPERATIONS: dict[str, Any] = {"linear": _linear, "lookup": _lookup, "scores": _scores, "read": _read}


class TiledLayer:
    """Mixed into the class of a tiled layer."""

    parts: LayerTiles
    has_bias: bool = False
    """A tile may have a bias that belongs to another layer, which shares this layer's weight."""
    materialized_by: str = ""
    """The function that last materialized lazy logits."""

    @property
    def _tiles(self) -> list[LayerTile]:
        """The tiles in order."""
        return [p for p in self.parts if isinstance(p, LayerTile)]

    @property
    def weight(self) -> torch.Tensor:
        """All of it: correct, but as large as without tiles."""
        return torch.cat([p.call("read", None, False) for p in self._tiles])


class TiledLinear(TiledLayer):
    """Tiles of output features."""

    lazy: bool = False
    """Whether its output is `LazyLogits`."""
    out_features: int

    @property
    def bias(self) -> torch.Tensor | None:
        """The whole bias, concatenated from the tiles as `weight` is; None if the layer has none."""
        return torch.cat([p.call("read", None, True) for p in self._tiles]) if self.has_bias else None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The outputs of the tiles, concatenated."""
        if self.lazy and input.dim() > 1 and not torch.compiler.is_compiling():
            parameters = [q for p in self._tiles for q in p.parameters() if not isinstance(q, DTensor)]
            return LazyLogits.defer(self, input, self.out_features, parameters)
        return self.whole(input)

    def whole(self, hidden: torch.Tensor) -> torch.Tensor:
        """All outputs."""
        shape = hidden.shape[:-1]
        flat = hidden.reshape(-1, hidden.shape[-1])  # else a tile's output is a view, which FSDP refuses
        return torch.cat([p.call("linear", flat, self.has_bias).view(*shape, -1) for p in self._tiles], -1)

    def scorers(self) -> Sequence[tuple[range, Scorer]]:
        """The scores of each tile, for the loss."""
        return [(p.rows, partial(self._score, p)) for p in self._tiles]

    def _score(self, part: LayerTile, hidden: torch.Tensor, *more: Any) -> torch.Tensor:
        return part.call("scores", hidden, self.has_bias, *more)


class TiledEmbedding(TiledLayer):
    """Tiles of the vocabulary."""

    padding_idx: int | None
    num_embeddings: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Every token is in one tile; the others add zeros."""
        inside = ((input >= 0) & (input < self.num_embeddings)).all()
        assert_async(inside, f"a token is not one of the {self.num_embeddings} of the embedding")
        first, *others = self._tiles
        out = first.call("lookup", input, self.padding_idx)
        for part in others:
            out = out + part.call("lookup", input, self.padding_idx)
        return out


_NAMES = ("weight", "bias")


def keep_state_dict_names(layer: nn.Module) -> None:
    """Give the tiles of a layer the layer's own names in state dicts, saved and loaded."""
    layer.register_state_dict_post_hook(_join)
    layer.register_load_state_dict_pre_hook(_split)


def _join(layer: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    assert isinstance(layer, TiledLayer)
    keys = {name: [f"{prefix}parts.{i}.{name}" for i in range(len(layer.parts))] for name in _NAMES}
    if any(isinstance(state.get(key), DTensor) for key in keys["weight"]):
        return
    for name in _NAMES:
        tiles = [state.pop(key) for key in keys[name] if key in state]
        if tiles and (name == "weight" or layer.has_bias):
            state[prefix + name] = torch.cat(tiles)


def _split(layer: nn.Module, state: dict[str, Any], prefix: str, *more: Any) -> None:
    assert isinstance(layer, TiledLayer)
    for name in _NAMES:
        whole = state.pop(prefix + name, None)
        for i, part in enumerate(layer.parts):
            own = getattr(part, name)
            if isinstance(whole, torch.Tensor):
                state[f"{prefix}parts.{i}.{name}"] = whole[part.start : part.stop]
            elif own is not None and name == "bias" and not layer.has_bias:
                # the bias of a layer that shares this weight, which is loaded under that layer's name
                state.setdefault(f"{prefix}parts.{i}.{name}", own.detach())
