"""Small programs for the image rules, with the splits for which something is gathered."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from rule_contract import Case, run_cases

T = torch.Tensor
aten = torch.ops.aten

CONVOLUTIONS = [
    Case(
        "conv",
        lambda a, b, c: F.conv2d(a, b, c, padding=1),
        ((2, 4, 7, 6), (6, 4, 3, 3), (6,)),
        "a2/segments a3/segments b2 b3",
    ),
    Case(
        "conv without bias",
        lambda a, b: F.conv2d(a, b, None, 2, 1),
        ((2, 3, 7, 6), (4, 3, 3, 3)),
        "a2/segments a3/segments b2 b3",
    ),
    Case(
        "dilated conv",
        lambda a, b: F.conv2d(a, b, None, 1, 2, 2),
        ((1, 2, 9, 5), (2, 2, 3, 3)),
        "a2/segments a3/segments b2 b3",
    ),
    Case(
        "conv that keeps its size",
        lambda a, b: F.conv2d(a, b, None, 1, "same"),
        ((1, 2, 7, 5), (2, 2, 2, 4)),
        "a2/segments a3/segments b2 b3",
    ),
    Case(
        "pointwise conv",
        lambda a, b, c: F.conv2d(a, b, c),
        ((2, 3, 4, 5), (4, 3, 1, 1), (4,)),
        "a2/segments a3/segments",
    ),
    Case(
        "grouped conv",
        lambda a, b, c: F.conv2d(a, b, c, padding=1, groups=3),
        ((2, 6, 5, 4), (9, 2, 3, 3), (9,)),
        pairs=False,
        gathers="*",
    ),
    Case(
        "depthwise conv",
        lambda a, b, c: F.conv2d(a, b, c, padding=1, groups=4),
        ((1, 4, 5, 4), (4, 1, 3, 3), (4,)),
        "a2/segments a3/segments b2 b3",
    ),
    Case("conv of lines", lambda a, b, c: F.conv1d(a, b, c, 2, 1), ((2, 3, 9), (4, 3, 3), (4,)), "a2/segments b2"),
    Case(
        "conv of volumes", lambda a, b: F.conv3d(a, b, None, 1, 1), ((1, 2, 4, 3, 3), (2, 2, 3, 3, 3)), "*", pairs=False
    ),
    Case(
        "transposed conv",
        lambda a, b, c: F.conv_transpose2d(a, b, c, 2, 1, 1),
        ((2, 3, 5, 4), (3, 4, 3, 3), (4,)),
        "a2/segments a3/segments b2 b3",
    ),
    Case(
        "transposed conv of two",
        lambda a, b: F.conv_transpose2d(a, b, None, 2),
        ((2, 3, 5, 4), (3, 4, 2, 2)),
        "a2/segments a3/segments b2 b3",
    ),
    Case(
        "transposed conv with gaps",
        lambda a, b, c: F.conv_transpose2d(a, b, c, 3),
        ((1, 2, 4, 3), (2, 2, 2, 2), (2,)),
        "a2/segments a3/segments b2 b3",
    ),
    Case(
        "grouped transposed conv",
        lambda a, b, c: F.conv_transpose2d(a, b, c, 2, 1, groups=2),
        ((1, 4, 5, 4), (4, 3, 3, 3), (6,)),
        "*",
        pairs=False,
    ),
    Case(
        "transposed conv of lines",
        lambda a, b: F.conv_transpose1d(a, b, None, 2, 1, 1, dilation=2),
        ((2, 2, 6), (2, 3, 3)),
        "a2/segments b2",
    ),
]

ROWS = "a2/segments a3/segments"
POOLS = [
    Case("max pool", lambda a: F.max_pool2d(a, 2), ((2, 3, 7, 6),), ROWS),
    Case("max pool that overlaps", lambda a: F.max_pool2d(a, 3, 2, 1), ((2, 3, 7, 6),), ROWS),
    Case("max pool, rounded up", lambda a: F.max_pool2d(a, 3, 2, 1, ceil_mode=True), ((1, 2, 8, 6),), ROWS),
    Case("max pool of lines", lambda a: F.max_pool1d(a, 3, 2, 1, 2), ((2, 3, 9),), "a2/segments"),
    Case(
        "max pool of volumes", lambda a: F.max_pool3d(a, 2), ((1, 2, 4, 5, 4),), "a2/segments a3/segments a4/segments"
    ),
    Case("max pool with places unread", lambda a: F.max_pool2d(a, 2, return_indices=True)[0], ((2, 3, 7, 6),), ROWS),
    Case("max pool with places", lambda a: F.max_pool2d(a, 2, return_indices=True), ((2, 3, 7, 6),), "a2 a3"),
    Case("average pool", lambda a: F.avg_pool2d(a, 2), ((2, 3, 7, 6),), ROWS),
    Case("average pool that overlaps", lambda a: F.avg_pool2d(a, 3, 2, 1), ((2, 3, 7, 6),), ROWS),
    Case("average pool without padding", lambda a: F.avg_pool2d(a, 3, 2, 1, True, False), ((1, 2, 8, 6),), ROWS),
    Case("average pool by 5", lambda a: F.avg_pool2d(a, 3, 2, 1, divisor_override=5), ((1, 2, 8, 6),), ROWS),
    Case("average pool of lines", lambda a: F.avg_pool1d(a, 3, 2, 1), ((2, 3, 9),), "a2/segments"),
    Case("global average", lambda a: F.adaptive_avg_pool2d(a, 1), ((2, 3, 5, 6),), ROWS),
    Case("average to a size", lambda a: F.adaptive_avg_pool2d(a, (3, 4)), ((2, 3, 7, 6),), ROWS),
    Case("average to half", lambda a: F.adaptive_avg_pool2d(a, (4, 3)), ((2, 3, 8, 6),), ROWS),
    Case("average of lines", lambda a: F.adaptive_avg_pool1d(a, 4), ((2, 3, 9),), "a2/segments"),
    Case("global maximum", lambda a: F.adaptive_max_pool2d(a, 1), ((2, 3, 5, 6),), ROWS),
    Case("maxima to a size", lambda a: F.adaptive_max_pool2d(a, 3), ((2, 3, 7, 6),), "a2 a3"),
]

SHAPES = [
    Case("zeros around", lambda a: F.pad(a, (1, 2, 3, 0)), ((2, 3, 5, 6),), ROWS),
    Case("fives around", lambda a: F.pad(a, (1, 2), value=5.0), ((2, 3, 5, 6),), "a3/segments"),
    Case("cropped", lambda a: F.pad(a, (-1, 2, 0, -2)), ((2, 3, 5, 6),), ROWS),
    Case("reflected", lambda a: F.pad(a, (1, 2, 3, 1), mode="reflect"), ((2, 3, 5, 6),), ROWS),
    Case("replicated", lambda a: F.pad(a, (1, 2, 3, 1), mode="replicate"), ((2, 3, 5, 6),), ROWS),
    Case("circular", lambda a: F.pad(a, (1, 2, 3, 1), mode="circular"), ((2, 3, 5, 6),), ROWS),
    Case("reflected by name", lambda a: aten.reflection_pad2d(a, [1, 1, 2, 0]), ((2, 3, 5, 6),), ROWS),
    Case("zeros by name", lambda a: aten.constant_pad_nd(a, [1, 1, 2, 0], 0.5), ((2, 3, 5, 6),), ROWS),
    Case("pixel shuffle", lambda a: F.pixel_shuffle(a, 2), ((2, 16, 3, 5),), "*"),
    Case("pixel unshuffle", lambda a: F.pixel_unshuffle(a, 2), ((2, 3, 6, 8),), ROWS),
    Case("channel shuffle", lambda a: F.channel_shuffle(a, 2), ((2, 4, 3, 5),), "a1"),
    Case(
        "points of an image",
        lambda a, b: F.grid_sample(a, b.tanh(), align_corners=False),
        ((2, 3, 5, 6), (2, 4, 3, 2)),
        "a2 a3 b3",
        pairs=False,
    ),
]

RESIZES = [
    Case("nearest, twice", lambda a: F.interpolate(a, scale_factor=2), ((2, 3, 5, 4),), ROWS),
    Case("nearest, to a size", lambda a: F.interpolate(a, size=(7, 9)), ((1, 2, 5, 4),), ROWS),
    Case("nearest, smaller", lambda a: F.interpolate(a, size=(4, 3)), ((1, 2, 9, 8),), ROWS),
    Case("exact nearest", lambda a: F.interpolate(a, size=(7, 9), mode="nearest-exact"), ((1, 2, 5, 4),), ROWS),
    Case("bilinear, twice", lambda a: F.interpolate(a, scale_factor=2, mode="bilinear"), ((2, 3, 5, 4),), ROWS),
    Case(
        "bilinear, corners",
        lambda a: F.interpolate(a, size=(9, 7), mode="bilinear", align_corners=True),
        ((1, 2, 5, 4),),
        ROWS,
    ),
    Case("bilinear, 1.7 times", lambda a: F.interpolate(a, scale_factor=1.7, mode="bilinear"), ((1, 2, 5, 4),), ROWS),
    Case("bicubic", lambda a: F.interpolate(a, size=(9, 7), mode="bicubic"), ((1, 2, 5, 4),), ROWS),
    Case("bicubic, twice", lambda a: F.interpolate(a, scale_factor=2, mode="bicubic"), ((1, 2, 5, 4),), ROWS),
    Case("linear", lambda a: F.interpolate(a, scale_factor=3, mode="linear"), ((2, 3, 5),), "a2/segments"),
    Case("trilinear", lambda a: F.interpolate(a, size=(5, 4, 4), mode="trilinear"), ((1, 2, 3, 3, 2),), "*"),
]


def _batch_norm(a: T, b: T, c: T) -> T:
    return F.batch_norm(a, None, None, b, c, True)


def _batch_norm_at_rest(a: T, b: T, c: T) -> T:
    return F.batch_norm(a, b.detach() * 2, b.detach().square() + 0.5, b, c, False)


NORMS = [
    Case(
        "group norm",
        lambda a, b, c: F.group_norm(a, 2, b, c),
        ((2, 4, 5, 3), (4,), (4,)),
        "a1/segments b0 c0",
        pairs=False,
    ),
    Case("group norm without weights", lambda a: F.group_norm(a, 3), ((2, 6, 5),), "a1/segments"),
    Case(
        "layer norm of images",
        lambda a, b, c: F.layer_norm(a, (4, 5, 3), b, c),
        ((2, 4, 5, 3), (4, 5, 3), (4, 5, 3)),
        "*",
        pairs=False,
    ),
    Case(
        "instance norm",
        lambda a, b, c: F.instance_norm(a, None, None, b, c),
        ((2, 4, 5, 3), (4,), (4,)),
        "b0 c0",
        pairs=False,
    ),
    Case("batch norm", _batch_norm, ((3, 4, 5, 3), (4,), (4,)), "b0 c0", pairs=False),
    Case("batch norm at rest", _batch_norm_at_rest, ((3, 4, 5, 3), (4,), (4,)), "*", pairs=False),
]

FAMILIES = {"convolutions": CONVOLUTIONS, "pools": POOLS, "shapes": SHAPES, "resizes": RESIZES, "norms": NORMS}


def run_family(name: str) -> list[str]:
    """On every rank of a world."""
    return run_cases(FAMILIES[name])
