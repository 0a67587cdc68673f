"""Operators on images that are cut into tiles, with the exact result of the whole image, forward and backward.

Each function takes this rank's part of a tensor that is split along `dim` at `bounds`, and returns its part of the
result and the result's bounds. Rows of other ranks come by halo exchange.
"""

from .conv import conv, conv_transpose
from .norm import batch_norm, group_norm, group_norm_over, instance_norm, layer_norm
from .pad import pad
from .pool import adaptive_avg_pool, adaptive_max_pool, avg_pool, max_pool
from .resize import pixel_shuffle, pixel_unshuffle, resize
from .rows import SlidePlan, plan_slide, plan_transposed_slide

__all__ = [
    "SlidePlan",
    "adaptive_avg_pool",
    "adaptive_max_pool",
    "avg_pool",
    "batch_norm",
    "conv",
    "conv_transpose",
    "group_norm",
    "group_norm_over",
    "instance_norm",
    "layer_norm",
    "max_pool",
    "pad",
    "pixel_shuffle",
    "pixel_unshuffle",
    "plan_slide",
    "plan_transposed_slide",
    "resize",
]
