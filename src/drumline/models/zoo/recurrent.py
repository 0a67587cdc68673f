"""A multi-layer perceptron and a recurrent language model by formula: the smallest models of the zoo."""

from __future__ import annotations

from ..profile import Affine, Profile
from .assemble import LayerDraft, assemble
from .parts import INDEX, SINGLE, VALUE, LayerPart, activation, cross_entropy, embedding, linear, log2, op

_VOCABULARY = 10_000


def mlp(layers: int, width: int, batch_size: int | None) -> Profile:
    """`layers` linear maps of one width with relu between them, and the mean squared error of the last."""
    batch = batch_size or 1024
    drafts: list[LayerDraft] = []
    if layers > 1:
        relu = activation("relu", width, kind="pointwise")
        drafts.append(LayerDraft("layers.0", "Linear", (linear(1, width, width, first=True), relu), VALUE * width))
    if layers > 2:
        inner = linear(1, width, width, keep=False), activation("relu", width, kind="pointwise")
        drafts.append(LayerDraft("layers.1", "Linear", inner, VALUE * width, repeats=layers - 2))
    alone = layers == 1
    drafts.append(
        LayerDraft("head", "Head", (linear(1, width, width, keep=alone, first=alone), _squared_error(width)), 0)
    )
    notes = (f"batch of {batch}, {width} values in and out",)
    return assemble(f"mlp:{layers}x{width}", drafts, batch_size=batch, input=2 * SINGLE * width, notes=notes)


def lstm(layers: int, width: int, batch_size: int | None, sequence: int | None) -> Profile:
    """Word embedding, `layers` LSTM layers of one width, and a head of its own over a vocabulary of 10 000."""
    batch, s, v = batch_size or 256, sequence or 128, _VOCABULARY
    output = VALUE * s * width
    drafts = (
        LayerDraft("embedding", "Embedding", (embedding(s, v, width),), output),
        LayerDraft("layers.0", "LSTM", (lstm_layer(s, width),), output, repeats=layers),
        LayerDraft("head", "Head", (linear(s, width, v), cross_entropy(s, v)), 0),
    )
    notes = (
        f"batch of {batch}, sequences of {s} tokens, vocabulary of {v}",
        "recurrent weights are read again at every token",
    )
    return assemble(f"lstm:{layers}x{width}", drafts, batch_size=batch, input=2 * INDEX * s, notes=notes)


def lstm_layer(s: int, h: int) -> LayerPart:
    """Four gates from input and state at each of s tokens. It keeps its input, the gates and the cell."""
    work = 2 * s * 8 * h * h
    weights = VALUE * (4 * h * h + s * 4 * h * h + 8 * h)
    moved = VALUE * s * h * (1 + 4 + 1 + 1)  # input, gates, cell, output
    made = VALUE * s * h * (4 + 1 + 1)
    step = 1 + log2(h) + 6  # the product with the state, its sum with the input's, and five pointwise operations
    return LayerPart(
        (
            op("lstm", "recurrent", "forward", flops=work, fixed=weights, per_sample=moved, made=made),
            op("lstm_backward", "recurrent", "backward", flops=2 * work, fixed=2 * weights, per_sample=2 * moved),
        ),
        weights=(4 * h * h, 4 * h * h, 4 * h, 4 * h),
        saved=Affine(0.0, float(VALUE * s * h * (1 + 4 + 1))),
        gradients=VALUE * s * h * (1 + 4 + 1),
        depth=(1 + log2(h) + s * step, 1 + log2(4 * h) + s * (1 + log2(4 * h) + 6)),
    )


def _squared_error(n: int) -> LayerPart:
    return LayerPart(
        (
            op("mse_loss", "reduce", "forward", fixed=SINGLE, per_sample=2 * SINGLE * n),
            op("mse_loss_backward", "pointwise", "backward", per_sample=3 * SINGLE * n),
        ),
        saved=Affine(0.0, float(SINGLE * n)),
        temporary=SINGLE * n,
        gradients=SINGLE * n,
        depth=(2 + log2(n), 1),
    )
