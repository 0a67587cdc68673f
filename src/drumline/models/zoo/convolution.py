"""Networks of convolutions by formula: ResNet, VGG and U-Net, with square images."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from ..op_shapes import ConvolutionShape
from ..profile import Affine, Profile
from .assemble import MOMENTUM, LayerDraft, assemble
from .parts import INDEX, SINGLE, VALUE, LayerPart, activation, add, copy, cross_entropy, kept, linear, log2, op

RESNET = {"18": (2, 2, 2, 2), "34": (3, 4, 6, 3), "50": (3, 4, 6, 3), "101": (3, 4, 23, 3), "152": (3, 8, 36, 3)}
"""Blocks of each stage. From 50 on, blocks narrow, convolve and widen again."""
VGG = {"11": (1, 1, 2, 2, 2), "16": (2, 2, 3, 3, 3), "19": (2, 2, 4, 4, 4)}
"""Convolutions of each stage."""
_CLASSES = 1000
_IMAGE = 224


def resnet(size: str, batch_size: int | None) -> Profile:
    """A stem, four stages of residual blocks, and a classifier; the middle convolution of a block takes the stride."""
    batch = batch_size or 256
    wide = int(size) >= 50
    drafts = [LayerDraft("stem", "Stem", _stem(), VALUE * 64 * 56 * 56)]
    c, side = 64, 56
    for stage, blocks in enumerate(RESNET[size]):
        width, stride = 64 << stage, 1 if stage == 0 else 2
        out, name = width * 4 if wide else width, f"layer{stage + 1}"
        parts, after = _residual(c, width, out, side, stride, keep=stage == 0), side // stride
        output = VALUE * out * after * after
        drafts.append(LayerDraft(f"{name}.0", "Residual", parts, output, carried=output))
        equal = _residual(out, width, out, after, 1)
        drafts.append(LayerDraft(f"{name}.1", "Residual", equal, output, carried=output, repeats=blocks - 1))
        c, side = out, after
    pool = pooled("mean", c * side * side, c, indices=False)
    drafts.append(LayerDraft("head", "Head", (pool, linear(1, c, _CLASSES), cross_entropy(1, _CLASSES)), 0))
    notes = (f"batch of {batch}, images of 224 x 224, {_CLASSES} classes",)
    return assemble(
        f"resnet{size}", drafts, batch_size=batch, input=_picture(_IMAGE, 1), notes=notes, optimizer=MOMENTUM
    )


def vgg(size: str, batch_size: int | None) -> Profile:
    """Stages of 3 x 3 convolutions, each halved by a pool, then three wide linear layers."""
    batch = batch_size or 256
    drafts: list[LayerDraft] = []
    c, side = 3, _IMAGE
    for stage, convolutions in enumerate(VGG[size]):
        width = min(64 << stage, 512)
        for i in range(convolutions):
            # the relu before keeps this convolution's input; a pool, or the image, does not
            parts = [conv(c, width, 3, side, bias=True, keep=i == 0, first=c == 3), _relu(width * side * side)]
            last = i == convolutions - 1
            if last:
                parts.append(pooled("max", width * side * side, width * side * side // 4))
            output = VALUE * width * side * side // (4 if last else 1)
            drafts.append(LayerDraft(f"features.{len(drafts)}", "Convolution", tuple(parts), output))
            c = width
        side //= 2
    wide = 4096
    inner = linear(1, c * side * side, wide), linear(1, wide, wide, keep=False)
    drafts += [LayerDraft(f"classifier.{i}", "Linear", (x, _relu(wide)), VALUE * wide) for i, x in enumerate(inner)]
    drafts.append(LayerDraft("head", "Head", (linear(1, wide, _CLASSES, keep=False), cross_entropy(1, _CLASSES)), 0))
    notes = (f"batch of {batch}, images of 224 x 224, {_CLASSES} classes",)
    return assemble(f"vgg{size}", drafts, batch_size=batch, input=_picture(_IMAGE, 1), notes=notes, optimizer=MOMENTUM)


def unet(batch_size: int | None) -> Profile:
    """Four halvings and four doublings of a 512 x 512 image, each level connected to its mirror image."""
    batch, side, classes = batch_size or 16, 512, 2
    widths = (64, 128, 256, 512, 1024)
    drafts = [LayerDraft("inc", "DoubleConvolution", tuple(_double(3, 64, side, first=True)), VALUE * 64 * side * side)]
    for i, (c, width) in enumerate(itertools.pairwise(widths)):
        pool = pooled("max", c * side * side, c * side * side // 4)
        side //= 2
        parts = (pool, *_double(c, width, side))
        drafts.append(LayerDraft(f"down{i + 1}", "Down", parts, VALUE * width * side * side))
    for i, (c, width) in enumerate(itertools.pairwise(widths[::-1])):
        grow = _transposed(c, width, side)
        side *= 2
        join = copy("cat", 2 * width * side * side)
        skip = VALUE * width * side * side
        parts = (grow, join, *_double(2 * width, width, side))
        drafts.append(LayerDraft(f"up{i + 1}", "Up", parts, skip, carried=skip))
    logits = conv(64, classes, 1, side, bias=True), cross_entropy(side * side, classes)
    drafts.append(LayerDraft("head", "Head", logits, 0))
    notes = (f"batch of {batch}, images of {side} x {side}, {classes} classes of every pixel",)
    return assemble("unet", drafts, batch_size=batch, input=_picture(side, side * side), notes=notes)


def conv(
    c: int, n: int, k: int, side: int, *, stride: int = 1, bias: bool = False, keep: bool = False, first: bool = False
) -> LayerPart:
    """c to n channels by k x k windows; `stride` divides the size. `keep` and `first` as for `linear`."""
    after = -(-side // stride)
    return _convolution(
        weight=c * n * k * k,
        bias=n if bias else 0,
        work=2 * c * n * k * k * after * after,
        values=(c * side * side, n * after * after),
        chain=(c * k * k, n * k * k),
        keep=keep,
        first=first,
        shape=ConvolutionShape(c, n, side, side, k, k, stride, stride, 1, int(bias)),
    )


def _transposed(c: int, n: int, side: int) -> LayerPart:
    """c to n channels at twice the size: each value spreads over its own 2 x 2 window."""
    return _convolution(
        weight=c * n * 4,
        bias=n,
        work=2 * c * n * 4 * side * side,
        values=(c * side * side, n * 4 * side * side),
        chain=(c, n * 4),
        keep=False,
        first=False,
        shape=ConvolutionShape(c, n, side, side, 2, 2, 2, 2, 1, 1),
    )


def _convolution(
    *,
    weight: int,
    bias: int,
    work: int,
    values: tuple[int, int],
    chain: tuple[int, int],
    keep: bool,
    first: bool,
    shape: ConvolutionShape,
) -> LayerPart:
    """`values` in and out a sample; `chain`: number of products summed, forward and for the input's gradient."""
    x, y = values
    read, moved = VALUE * (weight + bias), VALUE * (x + y)
    times = 1 if first else 2  # the gradient of the weight, and of the input
    return LayerPart(
        (
            op("convolution", "conv", "forward", flops=work, fixed=read, per_sample=moved, made=VALUE * y, shape=shape),
            op(
                "convolution_backward",
                "conv_backward",
                "backward",
                flops=times * work,
                fixed=times * read,
                per_sample=times * moved,
            ),
        ),
        weights=(weight, bias) if bias else (weight,),
        saved=kept(x if keep else 0),
        gradients=VALUE * (y if first else x + y),
        depth=(1 + log2(chain[0]) + bool(bias), 1 + log2(chain[1])),
    )


def _batch_norm(c: int, values: int) -> LayerPart:
    """Normalisation of c channels over the batch: one pass for the statistics, one to apply them."""
    moved = VALUE * values
    return LayerPart(
        (
            op("native_batch_norm", "norm", "forward", fixed=6 * SINGLE * c, per_sample=3 * moved, made=moved),
            op("native_batch_norm_backward", "norm", "backward", fixed=5 * SINGLE * c, per_sample=5 * moved),
        ),
        weights=(c, c),
        saved=kept(values, fixed=2.0 * SINGLE * c),
        gradients=2 * moved,
        depth=(2 * (log2(values // c) + 1) + 3, 2 * log2(values // c) + 4),
        buffers=2 * SINGLE * c + INDEX,
    )


def _relu(values: int) -> LayerPart:
    """In place; it keeps its output, which is the next part's input."""
    return activation("relu", values, kind="pointwise", in_place=True)


def pooled(name: str, before: int, after: int, *, indices: bool = True) -> LayerPart:
    """The maximum or the mean of windows; a maximum keeps its index."""
    index = INDEX * after if indices else 0
    moved = VALUE * (before + after) + index
    return LayerPart(
        (
            op(f"{name}_pool2d", "reduce", "forward", per_sample=moved, made=VALUE * after + index),
            op(f"{name}_pool2d_backward", "reduce", "backward", per_sample=moved),
        ),
        saved=Affine(0.0, float(index)),
        temporary=VALUE * after,
        gradients=VALUE * (before + after),
        depth=(log2(before / after), 1),
    )


def _stem() -> tuple[LayerPart, ...]:
    side = 112
    values = 64 * side * side
    return (
        conv(3, 64, 7, _IMAGE, stride=2, keep=True, first=True),
        _batch_norm(64, values),
        _relu(values),
        pooled("max", values, values // 4),
    )


def _residual(c: int, width: int, out: int, side: int, stride: int, *, keep: bool = False) -> tuple[LayerPart, ...]:
    """Two 3 x 3 convolutions, or 1 x 1, 3 x 3, 1 x 1 if `out` is wider, with a residual connection."""
    after = side // stride
    parts: list[LayerPart] = []
    if out == width:
        parts += _conv_norm(c, width, 3, side, stride, keep=keep)
    else:
        parts += _conv_norm(c, width, 1, side, 1, keep=keep)
        parts += [_relu(width * side * side), *_conv_norm(width, width, 3, side, stride)]
    parts += [_relu(width * after * after), *_conv_norm(width, out, 3 if out == width else 1, after, 1)]
    if c != out or stride != 1:
        parts += [part.parallel_branch for part in _conv_norm(c, out, 1, side, stride)]
    values = out * after * after
    return (*parts, add(values, in_place=True), _relu(values))


def _conv_norm(c: int, n: int, k: int, side: int, stride: int, *, keep: bool = False) -> Iterator[LayerPart]:
    after = side // stride
    yield conv(c, n, k, side, stride=stride, keep=keep)
    yield _batch_norm(n, n * after * after)


def _double(c: int, n: int, side: int, *, first: bool = False) -> Iterator[LayerPart]:
    """Twice: convolution, norm, relu. Its input is new (an image, a pool, a concatenation), so it is kept here."""
    values = n * side * side
    for i in (0, 1):
        yield conv(n if i else c, n, 3, side, keep=i == 0, first=first and i == 0)
        yield _batch_norm(n, values)
        yield _relu(values)


def _picture(side: int, targets: int) -> float:
    return float(SINGLE * 3 * side * side + INDEX * targets)
