"""Splits a model over ranks in the order of the engine: image tiles, then tokens, then features (tensor_split.py).

Tiles: each rank has some rows and columns of every image. A convolution whose kernel is larger than its stride reads
kernel - stride rows of its neighbours, and sends their gradients back, unless the plan has no halos. Layers without
convolutions (after a pool over the whole image) are whole on every rank.

Context parallelism: each rank has some of the tokens of every sample; keys and values go round a ring. All that scales
with samples is divided by n, parameters are whole. In causal attention the last rank sees all tokens, so it has
(2n - 1) / n of an even share. Gradients of parameters are partial sums: they are added up with the replicas'.
"""

from __future__ import annotations

from dataclasses import replace

from ..core.errors import PlanError
from ..models.op_shapes import AttentionShape, ConvolutionShape, EmbeddingShape, MatmulShape, dims, shape_of
from ..models.profile import Affine, Layer, Profile, ProfiledOp
from ..plans import Plan
from .expert_split import split_experts
from .rank_model import (
    LayerActivationMemory,
    LayerMessage,
    LayerMessages,
    RankModel,
    map_layers,
    not_split,
    scaled,
    scaled_op,
    tokens_of,
    whole_model,
)
from .tensor_split import split_features
from .tuning import STATISTICS_BYTES

TENSOR_NOTES = (
    "tp: column and row matmuls are inferred from their order and sizes, not from the graph",
    "tp: activations saved outside of matmuls are inferred from the outputs of operators",
)
PIPELINE_NOTES = (
    "pp: stages begin at layers of the profile; the engine may begin one inside a layer",
    "pp: a stage is assumed to send only its last layer's output",
)
GROUP_NORM = "native_group_norm"


def split_model(profile: Profile, plan: Plan) -> RankModel:
    """The part of the busiest rank; pipeline stages are cut from it."""
    rank = split_tiles(whole_model(profile), plan.tile, halo=plan.halo)
    rank = split_experts(split_features(split_tokens(rank, plan.cp), plan.tp), plan.ep)
    return replace(rank, notes=(*rank.notes, *TENSOR_NOTES)) if plan.tp > 1 else rank


# -- image tiles


def split_tiles(rank: RankModel, tile: tuple[int, int], *, halo: bool = True) -> RankModel:
    """The part of the largest tile."""
    rows, columns = tile
    if rows * columns == 1:
        return rank
    images = [s for x in rank.profile.layers for op in x.ops if isinstance(s := shape_of(op), ConvolutionShape)]
    if not images:
        return not_split(rank, f"tile={rows}x{columns}", "convolutions of images")
    first = images[0]
    if rows > first.rows or columns > first.columns:
        raise PlanError(
            f"tile={rows}x{columns} for images of {first.rows} x {first.columns}",
            rule="every tile has a row and a column",
            fix=f"tile={min(rows, first.rows)}x{min(columns, first.columns)}",
        )
    share = -(-first.rows // rows) * -(-first.columns // columns) / (first.rows * first.columns)
    width = rank.profile.activation_bytes
    needs_gradient = False  # the images themselves need none, so the first convolution's halos do not come back

    def change(layer: Layer, memory: LayerActivationMemory) -> tuple[Layer, LayerActivationMemory, LayerMessages]:
        if not any(isinstance(shape_of(op), ConvolutionShape) for op in layer.ops):
            return layer, memory, ()
        nonlocal needs_gradient
        messages, needs_gradient = _tile_messages(layer, tile, width, needs_gradient), True
        messages = messages if halo else tuple(m for m in messages if m.collective != "send")
        ops = tuple(_tile_op(op, share, rows, columns) for op in layer.ops)
        own = _scaled_memory(memory, share)
        return replace(layer, ops=ops, output=scaled(layer.output, share)), own, messages

    return map_layers(rank, change)


def _scaled_memory(memory: LayerActivationMemory, share: float) -> LayerActivationMemory:
    return LayerActivationMemory(*(scaled(a, share) for a in (memory.saved, memory.forward, memory.backward)))


def _tile_op(op: ProfiledOp, share: float, rows: int, columns: int) -> ProfiledOp:
    made, shape = scaled_op(op, share), shape_of(op)
    if not isinstance(shape, ConvolutionShape):
        return made
    local = replace(shape, rows=-(-shape.rows // rows), columns=-(-shape.columns // columns))
    return replace(made, dims=dims(local))


def _tile_messages(layer: Layer, tile: tuple[int, int], width: int, needs_gradient: bool) -> LayerMessages:
    """Halos that a tile with neighbours on both sides sends (with two tiles there is one side), and norm statistics."""
    messages: list[LayerMessage] = []
    rows, columns = tile
    for op in layer.ops:
        shape = shape_of(op)
        if isinstance(shape, ConvolutionShape):
            long = -(-shape.columns // columns) * shape.inputs * width * op.count
            high = -(-shape.rows // rows) * shape.inputs * width * op.count
            halos = _halo("rows", rows, shape.kernel_rows - shape.stride_rows, long)
            halos += _halo("columns", columns, shape.kernel_columns - shape.stride_columns, high)
            messages += [m for m in halos if needs_gradient or m.phase == "forward"]
            needs_gradient = True
        elif op.name == GROUP_NORM:
            axes = [axis for axis, n in (("rows", rows), ("columns", columns)) if n > 1]
            size = Affine(STATISTICS_BYTES)
            messages += [
                LayerMessage(a, p, "all_reduce", size, wide=True) for a in axes for p in ("forward", "backward")
            ]
    return tuple(messages)


def _halo(axis: str, n: int, overlap: int, size: int) -> list[LayerMessage]:
    if n == 1 or overlap < 1:
        return []
    lines = overlap if n > 2 else -(-overlap // 2)
    sent = Affine(0.0, float(lines * size))
    return [LayerMessage(axis, "forward", "send", sent), LayerMessage(axis, "backward", "send", sent)]


# -- tokens


def split_tokens(rank: RankModel, n: int) -> RankModel:
    """The part of the busiest of n context-parallel ranks."""
    if n == 1:
        return rank
    profile = rank.profile
    tokens = tokens_of(profile)
    if not tokens:
        return not_split(rank, f"cp={n}", "tokens")
    if tokens < n:
        raise PlanError(f"cp={n} for {tokens} tokens", rule="every rank has a token", fix=f"cp={tokens} or less")
    share = -(-tokens // n) / tokens
    width = profile.activation_bytes

    def change(layer: Layer, memory: LayerActivationMemory) -> tuple[Layer, LayerActivationMemory, LayerMessages]:
        causal = any(s.causal for s in map(shape_of, layer.ops) if isinstance(s, AttentionShape))
        ops = tuple(_token_op(op, share, n, causal) for op in layer.ops)
        own = _scaled_memory(memory, share)
        return replace(layer, ops=ops, output=scaled(layer.output, share)), own, _ring(layer, share, n, width)

    if not any(isinstance(shape_of(op), AttentionShape) for x in profile.layers for op in x.ops):
        note = f"cp={n}: {profile.name} shows no fused attention; what the engine gathers in its place is not counted"
        rank = replace(rank, notes=(*rank.notes, note))
    return map_layers(rank, change)


def _token_op(op: ProfiledOp, share: float, n: int, causal: bool) -> ProfiledOp:
    made = scaled_op(op, share)
    if causal and op.kind in ("attention", "attention_backward"):
        made = replace(made, flops=scaled(op.flops, share * (2 * n - 1) / n))
    shape = shape_of(op)
    if isinstance(shape, MatmulShape) and shape.rows > 1:
        return replace(made, dims=dims(replace(shape, rows=round(shape.rows * share))))
    if (isinstance(shape, EmbeddingShape) and shape.tokens) or isinstance(shape, AttentionShape):
        return replace(made, dims=dims(replace(shape, tokens=round(shape.tokens * share))))
    return made


def _ring(layer: Layer, share: float, n: int, width: int) -> LayerMessages:
    """Keys and values n - 1 times in the forward; in the backward again, and their gradients behind them."""
    messages: list[LayerMessage] = []
    for op in layer.ops:
        shape = shape_of(op)
        if isinstance(shape, AttentionShape):
            tokens = round(shape.tokens * share)
            pair = Affine(0.0, float(2 * tokens * shape.kv_heads * shape.width * width * op.count))
            messages += [LayerMessage("cp", "forward", "ring", pair)] * (n - 1)
            messages += [LayerMessage("cp", "backward", "ring", pair)] * (n - 1)
            messages += [LayerMessage("cp", "backward", "ring", pair, wide=True)] * (n - 1)
    return tuple(messages)
