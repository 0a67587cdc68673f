"""Operators on images that are cut into tiles: the very result of the whole image, forward and backward.

Each function works on this rank's part of a tensor that is split along `dim` at `bounds`, and gives its part of the
result with the bounds of that. What a rank needs of others comes through windows.
"""

from .conv import conv, conv_transpose
from .norm import batch_norm, group_norm, group_norm_over, instance_norm, layer_norm
from .pad import pad
from .pool import adaptive_avg_pool, adaptive_max_pool, avg_pool, max_pool
from .resize import pixel_shuffle, pixel_unshuffle, resize
from .slide import Slide, slide, slide_transposed

__all__ = [
    "Slide",
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
    "resize",
    "slide",
    "slide_transposed",
]
