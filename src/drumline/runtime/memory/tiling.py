"""Memory-centric tiling, `chunk=n`: the largest layers are cut into n tiles of rows, and run tile by tile.

With zero=3 each tile is gathered, used and freed before the next, so a layer may be larger than the device. The logits
of a head are not kept either: the loss computes them tile by tile (logits.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import UninitializedParameter

from ...core.errors import PlanError
from ...datasets.stream import split_range
from ...torchkit.modules import has_gradient_hooks
from ..state.pieces import ParameterPart
from .logits import materialized_to_plain
from .tiled_layers import LayerTile, LayerTiles, TiledEmbedding, TiledLinear, keep_state_dict_names

_Layer = nn.Linear | nn.Embedding


@dataclass(frozen=True, slots=True)
class TilingChoice:
    """The layers of a model to tile."""

    cut: dict[str, _Layer]
    """By name."""
    left: dict[str, str]
    """Layers that are as large but stay whole, and why."""


def choose_layers(model: nn.Module) -> TilingChoice:
    """The layers to tile: linear and embedding layers whose weight is at least half as large as the largest.

    Tied layers are tiled together. A layer stays whole if another module uses its weight, or if its forward is not
    torch's. Convolutions, recurrent layers and the projection into queries, keys and values of
    `nn.MultiheadAttention` are never tiled.
    """
    layers = {name: m for name, m in model.named_modules() if isinstance(m, _Layer)}
    reasons = _reasons(model, layers)
    sizes = {name: _weight(m).numel() for name, m in layers.items() if not reasons[name]}
    least = max(sizes.values(), default=0) / 2
    cut = {name: layers[name] for name, size in sizes.items() if size >= least}
    left = {name: why for name, why in reasons.items() if why and _size(layers[name]) >= least}
    return TilingChoice(cut, left)


def tile(model: nn.Module, n: int, *, lazy: bool = True) -> dict[str, ParameterPart]:
    """Tile the largest layers of a model into n tiles (of at least one row), in place, on any device.

    Returns for each new parameter its rows of a parameter of the user's. With `lazy` the head's output is computed when
    the loss needs it; not for callers that collect outputs from threads or a compiler.
    """
    if n == 1:
        return {}
    choice = choose_layers(model)
    if not choice.cut:
        why = "; ".join(f"{name}: {reason}" for name, reason in choice.left.items()) or "it has none"
        raise PlanError(
            f"chunk={n} cuts nothing in {type(model).__name__}",
            where=why,
            rule="linear and embedding layers are cut, where their forward is torch's and their weight is theirs",
            fix="chunk=1",
        )
    names = {id(p): name for name, p in model.named_parameters()}
    heads = _heads(model, choice) if lazy else set()
    made: dict[int, ParameterPart] = {}
    done: dict[int, LayerTiles] = {}
    for module in choice.cut.values():
        weight = _weight(module)
        if id(weight) not in done:
            owners = [m for m in choice.cut.values() if _weight(m) is weight]
            bias = next((m.bias for m in owners if isinstance(m, nn.Linear) and m.bias is not None), None)
            done[id(weight)] = _parts(weight, bias, n, names, made)
    if heads:
        model.register_forward_hook(materialized_to_plain)
    owned = {id(m): done[id(_weight(m))] for m in choice.cut.values()}
    for module in choice.cut.values():
        _convert(module, owned[id(module)], lazy=id(module) in heads)
    return {name: made[id(p)] for name, p in model.named_parameters() if id(p) in made}


def untiled_layers(model: nn.Module) -> dict[str, str]:
    """The large layers that `tile` would leave whole, and why; call it before `tile`."""
    return choose_layers(model).left


def tiles_of(model: nn.Module) -> list[LayerTile]:
    """The tiles of all tiled layers, each once: these are sharded as units of their own."""
    return [m for m in model.modules() if isinstance(m, LayerTile)]


def materialized_heads(model: nn.Module) -> dict[str, str]:
    """The heads whose logits were materialized, by name, and the function that did."""
    heads = ((name, m) for name, m in model.named_modules() if isinstance(m, TiledLinear))
    return {name: m.materialized_by for name, m in heads if m.materialized_by}


# -- choosing the layers


def _weight(module: _Layer) -> nn.Parameter:
    weight = module._parameters["weight"]
    assert weight is not None
    return weight


def _size(module: _Layer) -> int:
    """Elements of the weight, even of one that is computed."""
    n = module.in_features * module.out_features if isinstance(module, nn.Linear) else 0
    return n or (module.num_embeddings * module.embedding_dim if isinstance(module, nn.Embedding) else 0)


def _reasons(model: nn.Module, layers: Mapping[str, _Layer]) -> dict[str, str]:
    """Why each layer cannot be tiled; empty for those that can."""
    reasons = {name: _own_reason(m) for name, m in layers.items()}
    users: dict[int, set[str]] = {}
    for name, module in model.named_modules():
        for p in module._parameters.values():
            if p is not None:
                users.setdefault(id(p), set()).add(name)
    for _ in layers:  # a layer tied to one that stays whole stays whole
        for name, module in layers.items():
            if not reasons[name]:
                reasons[name] = _shared_reason(name, module, layers, reasons, users)
    return reasons


def _own_reason(m: _Layer) -> str:
    weight = m._parameters.get("weight")
    torchs = nn.Linear.forward if isinstance(m, nn.Linear) else nn.Embedding.forward
    if weight is None or isinstance(weight, UninitializedParameter):
        return "its weight is computed, or not initialized yet"
    if not weight.numel():
        return "it has no elements"
    if type(m).forward is not torchs or "forward" in vars(m):
        return "its forward is not torch's"
    if isinstance(m, NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention reads its weight"
    if any(p is not None and has_gradient_hooks(p) for p in m._parameters.values()):
        return "a hook is on its parameter"
    if isinstance(m, nn.Embedding):
        words = [k for k in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(m, k)]
        return f"{words[0]} looks at all rows at once" if words else ""
    return ""


def _shared_reason(
    name: str, m: _Layer, layers: Mapping[str, _Layer], reasons: Mapping[str, str], users: Mapping[int, set[str]]
) -> str:
    others = users[id(_weight(m))] - {name}
    for other in sorted(others):
        if other not in layers or reasons[other] or layers[other].weight is not m.weight:
            return f"its weight is also that of {other or 'the model itself'}, which stays whole"
    if isinstance(m, nn.Linear) and m.bias is not None:
        if len(users[id(m.bias)]) > 1:
            return "its bias is used elsewhere too"
        if any(getattr(layers[other], "bias", None) is not None for other in others):
            return "two layers share its weight and have a bias each"
    return ""


def _heads(model: nn.Module, choice: TilingChoice) -> set[int]:
    """The tiled layers with lazy output: tied to an embedding, or the last linear layer, and wider than their input.

    A wrong guess costs nothing: an output that anything but the loss uses is materialized at once.
    """
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    tied = {id(_weight(m)) for m in choice.cut.values() if isinstance(m, nn.Embedding)}
    return {
        id(m)
        for m in choice.cut.values()
        if isinstance(m, nn.Linear) and m.out_features > m.in_features and (id(m.weight) in tied or m is linears[-1])
    }


# -- tiling them


def _parts(
    weight: nn.Parameter, bias: nn.Parameter | None, n: int, names: Mapping[int, str], made: dict[int, ParameterPart]
) -> LayerTiles:
    """The tiles of a weight (and its bias); records in `made` which rows of the user's parameters they are."""

    def take(p: nn.Parameter, rows: range) -> nn.Parameter:
        new = nn.Parameter(p.detach()[rows.start : rows.stop].clone(), requires_grad=p.requires_grad)
        made[id(new)] = ParameterPart(names[id(p)], tuple(p.shape), rows.start * p[0].numel())
        return new

    cuts = split_range(weight.shape[0], min(n, weight.shape[0]))
    return LayerTiles(LayerTile(r, take(weight, r), None if bias is None else take(bias, r)) for r in cuts)


def _convert(module: _Layer, parts: LayerTiles, *, lazy: bool) -> None:
    """Replace a layer's parameters by its tiles; its class becomes a subclass of what it was."""
    kind = TiledLinear if isinstance(module, nn.Linear) else TiledEmbedding
    had_bias = module._parameters.get("bias") is not None
    for name in ("weight", "bias"):
        module._parameters.pop(name, None)
    cls = type(module)
    module.__class__ = type(f"Tiled{cls.__name__}", (kind, cls), {})
    module.parts = parts
    if isinstance(module, TiledLinear):
        module.has_bias, module.lazy = had_bias, lazy
    keep_state_dict_names(module)
