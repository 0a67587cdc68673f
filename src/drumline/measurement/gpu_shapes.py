"""Shapes at which the matmuls, convolutions, attention and recurrent layers of a GPU are measured, per type.

They are the shapes of common models and some between them; `costs.shape_interpolation` interpolates. The work of a case
is bounded, so that all cases of a type take seconds.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..costs.shape_interpolation import GROUP_NORM, ROW_SUMS, UNALIGNED_MATMUL, kernel_work
from ..runtime.numerics.float32_settings import float32_in
from ..torchkit.recurrent import silence_rnn_contiguity_warning
from .kernels import ShapeTiming
from .resume_journal import ResumeJournal
from .timing import Timing, gpu_event_seconds, host_launch_seconds, time_gpu

TYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Types of a GPU's matmuls, as plans name them."""

MAX_OPERATIONS = {"fp32": 1.5e11, "tf32": 6e11, "bf16": 1.5e12, "fp16": 1.5e12}
"""Operations of the largest case."""


MAX_SLEEP_S = 0.06
"""Longest sleep of a GPU while a recurrent layer is launched."""


Case = tuple[str, tuple[int, ...], Callable[[], object]]
"""Kernel, shape, and the action to time."""


def float32_precision(name: str) -> AbstractContextManager[None]:
    """Compute float32 in tf32 or not, as the engine does for a plan of that precision."""
    return float32_in("tf32" if name == "tf32" else "ieee", torch.device("cuda"))


def measure_shapes(
    device: torch.device, name: str, report: Callable[[str], None], journal: ResumeJournal, between: Callable[[], None]
) -> list[ShapeTiming]:
    """All kernels at all shapes, in one type. `between` is called between two cases."""
    timings = []
    with float32_precision(name):
        for stage, cases, limit in (
            ("matmul", _matmuls, 2.5 if name == "fp16" else 3.5),
            ("attention", _attentions, 6.0 if name == "bf16" else 3.0),
            ("conv", _convolutions, 9.0 if name == "bf16" else 5.0),
            ("conv", _recurrents, 3.0),
            ("memory", _norms, 2.0),
        ):
            report(stage)
            end = time.monotonic() + limit
            for kernel, shape, action in cases(device, TYPES[name], MAX_OPERATIONS[name], name):
                if time.monotonic() > end:
                    break  # a slow device measures fewer shapes; the order covers all kinds early
                by = _time_recurrent if kernel.startswith("recurrent") else time_gpu
                timing = journal.timed((kernel, name, *shape), functools.partial(by, action))
                timings.append(ShapeTiming(kernel, tuple(map(float, shape)), timing))
                start = time.monotonic()
                between()
                end += time.monotonic() - start
    return timings


def _time_recurrent(action: Callable[[], object]) -> Timing:
    """GPU time of a recurrent layer, which has thousands of kernels: the GPU sleeps until all are launched. The launch
    time of the host is measured separately (`host_overhead.py`).
    """
    action()
    ahead = min(MAX_SLEEP_S, 1.5 * host_launch_seconds(action))
    return Timing(gpu_event_seconds(action, 1, ahead), 0.0)


def halton(count: int, base: int) -> list[float]:
    """A deterministic sequence that fills the interval from 0 to 1 evenly."""
    numbers = []
    for i in range(1, count + 1):
        value, share, n = 0.0, 1.0, i
        while n:
            share /= base
            value += share * (n % base)
            n //= base
        numbers.append(value)
    return numbers


def matmul_shapes(most: float) -> list[tuple[int, int, int, int]]:
    """Rows, columns and inner dims from 64 to 65536, of all aspect ratios; and batched small matmuls."""
    shapes = [(1, n, n, n) for n in (256, 512, 1024, 2048, 4096, 8192)]
    layers = ((768, 768), (3072, 768), (1024, 4096), (4096, 4096))
    shapes += [(1, t, n, k) for t in (2048, 8192, 32768) for n, k in layers]
    shapes += [(1, n, k, t) for t in (2048, 8192, 32768) for n, k in layers]
    for a, b, c in zip(halton(90, 2), halton(90, 3), halton(90, 5), strict=True):
        m, n, k = (64 * round(2 ** (10 * x)) for x in (a, b, c))
        shapes.append((1, m, n, k))
    shapes += [(b, s, s, d) for b in (64, 256) for s in (256, 512, 1024) for d in (64, 128)]
    shapes += [(b, s, d, s) for b in (64, 256) for s in (256, 512, 1024) for d in (64, 128)]
    return shuffled([s for s in dict.fromkeys(shapes) if 2e7 <= kernel_work("matmul", s) <= most])


def shuffled(shapes: list[Any]) -> list[Any]:
    """Shuffled in the same order in every run."""
    random.Random(0).shuffle(shapes)
    return shapes


def farthest_first(shapes: list[Any]) -> list[Any]:
    """Order whose prefixes cover the whole range: the middle shape, then always the farthest from those chosen."""
    import numpy as np

    logs = np.log(np.array(shapes, dtype=float))
    order = [int(((logs - logs.mean(0)) ** 2).sum(1).argmin())]
    nearest = ((logs - logs[order[0]]) ** 2).sum(1)
    while len(order) < len(shapes):
        order.append(int(nearest.argmax()))
        nearest = np.minimum(nearest, ((logs - logs[order[-1]]) ** 2).sum(1))
        nearest[order] = -1.0
    return [shapes[i] for i in order]


def _matmuls(device: torch.device, dtype: torch.dtype, most: float, name: str) -> Iterator[Case]:
    shapes = matmul_shapes(most)
    for i, (b, m, n, k) in enumerate(shapes if name != "fp16" else shapes[::3]):
        if b > 1:
            x, y = _normal(device, dtype, b, m, k), _normal(device, dtype, b, k, n)
        elif i % 2:  # operands as in the gradient of a weight
            x, y = _normal(device, dtype, k, m).t(), _normal(device, dtype, k, n)
        else:  # operands as in the forward of a layer
            x, y = _normal(device, dtype, m, k), _normal(device, dtype, n, k).t()
        yield "matmul", (b, m, n, k), lambda x=x, y=y: x @ y  # type: ignore[misc]  # bound now, used at once
    if name != "bf16":
        return
    for t in (2048, 16384):
        for width in (768, 4096):
            for words in (1018, 10010, 30522):
                for m, n, k in ((t, words, width), (t, width, words), (words, width, t)):
                    x, y = _normal(device, dtype, m, k), _normal(device, dtype, k, n)
                    yield UNALIGNED_MATMUL, (1, m, n, k), lambda x=x, y=y: x @ y  # type: ignore[misc]  # as above


def _attentions(device: torch.device, dtype: torch.dtype, most: float, name: str) -> Iterator[Case]:
    if name == "fp16":
        return
    lengths = (128, 196, 512, 1024, 2048, 4096)
    # half-precision kernels are compiled at their first call, which takes a second for some shapes
    for heads, s, d, part in farthest_first(list(itertools.product((48, 192, 512), lengths, (64, 128), (1, 2)))):
        shape = (heads, s, s, d, part)
        if kernel_work("attention", shape) > most / 4 or heads * s * d > 2**25:
            continue
        q, k, v = (_normal(device, dtype, heads // 16, 16, s, d).requires_grad_() for _ in range(3))

        def run(q: Any = q, k: Any = k, v: Any = v, causal: bool = part == 2) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

        yield "attention", shape, run
        yield "attention_backward", shape, _backward(run(), (q, k, v))


FILTERS_3X3 = (
    (64, 56),
    (128, 28),
    (256, 14),
    (512, 7),
    (64, 224),
    (128, 112),
    (256, 56),
    (512, 28),
    (512, 14),
    (32, 32),
    (96, 40),
)
"""Channels and side of the output, of 3 x 3 filters."""
FILTERS_1X1 = (
    (64, 64, 56),
    (64, 256, 56),
    (256, 64, 56),
    (256, 128, 56),
    (128, 512, 28),
    (512, 128, 28),
    (512, 256, 28),
    (256, 1024, 14),
    (1024, 256, 14),
    (1024, 512, 14),
    (512, 2048, 7),
    (2048, 512, 7),
    (96, 384, 40),
)
"""Channels in and out and side of the output, of 1 x 1 filters."""
STRIDED_FILTERS = (
    (3, 64, 112, 7, 2),
    (3, 768, 14, 16, 16),
    (3, 96, 56, 4, 4),
    (96, 192, 28, 2, 2),
    (192, 384, 14, 2, 2),
    (384, 768, 7, 2, 2),
    (128, 128, 28, 3, 2),
    (256, 256, 14, 3, 2),
    (512, 512, 7, 3, 2),
    (256, 512, 28, 1, 2),
    (512, 1024, 14, 1, 2),
    (1024, 2048, 7, 1, 2),
    (3, 64, 224, 3, 1),
    (3, 32, 112, 3, 2),
)
"""Channels in and out, side of the output, side of the filter, stride."""
DEPTHWISE_FILTERS = ((96, 56, 7), (192, 28, 7), (384, 14, 7), (768, 7, 7), (32, 112, 3), (144, 56, 3), (384, 14, 3))
"""Channels, side of the output, side of the filter."""
GROUPED_FILTERS = (
    (4, 56, 1, 32),
    (16, 56, 1, 4),
    (16, 14, 1, 32),
    (32, 28, 1, 8),
    (64, 14, 1, 8),
    (64, 7, 1, 16),
    (16, 56, 2, 4),
    (32, 28, 2, 8),
    (64, 7, 2, 16),
    (1, 56, 2, 96),
    (1, 14, 2, 256),
)
"""Channels of a group, side of the output, stride, groups; filters are 3 x 3."""


def convolution_shapes() -> list[tuple[int, int, int, int, int, int, int]]:
    """Samples, channels in and out of a group, side of the output and of the filter, stride, groups."""
    shapes = [(c, c, p, 3, 1, 1) for c, p in FILTERS_3X3]
    shapes += [(c // 2, c, p, 3, 1, 1) for c, p in FILTERS_3X3[5:8]]
    shapes += [(a, b, p, 1, 1, 1) for a, b, p in FILTERS_1X1]
    shapes += [(a, b, p, w, s, 1) for a, b, p, w, s in STRIDED_FILTERS]
    shapes += [(1, 1, p, w, 1, c) for c, p, w in DEPTHWISE_FILTERS] + [
        (c, c, p, 3, s, g) for c, p, s, g in GROUPED_FILTERS
    ]
    return [(n, *rest) for rest in shapes for n in (16, 128)]


def _layouts() -> list[tuple[int, ...]]:
    """All in the default layout; depthwise and strided ones also with channels last, as models use them.

    In half precision the first call of a shape takes a tenth of a second: any prefix covers all kinds.
    """
    shapes = convolution_shapes()
    return farthest_first([(*s, 1) for s in shapes] + [(*s, 2) for s in shapes if s[6] > 1 or s[5] > 1])


def _convolutions(device: torch.device, dtype: torch.dtype, most: float, name: str) -> Iterator[Case]:
    if name in ("fp16", "fp32"):  # fp16 is as bf16; exact fp32 is priced by its matmuls
        return
    for n, cin, cout, side, window, stride, groups, layout in _layouts():
        shape = (n, cin, cout, side * side, window * window, stride, groups, layout)
        padding = window // 2 if stride == 1 or window % 2 else 0
        wide = side * stride if padding or stride > 1 else side + window - 1
        if kernel_work("conv", shape) > most or n * groups * cin * wide**2 > 2**29:
            continue
        order = torch.channels_last if layout == 2 else torch.contiguous_format
        x = _normal(device, dtype, n, cin * groups, wide, wide).to(memory_format=order).requires_grad_()
        w = _normal(device, dtype, cout * groups, cin, window, window).requires_grad_()

        def run(x: Any = x, w: Any = w, stride: int = stride, padding: int = padding, groups: int = groups) -> Any:
            return F.conv2d(x, w, stride=stride, padding=padding, groups=groups)

        y = run()
        if math.prod(y.shape[2:]) != side * side:
            continue
        yield "conv", shape, run
        yield "conv_backward", shape, _backward(y, (x, w))


def _recurrents(device: torch.device, dtype: torch.dtype, most: float, name: str) -> Iterator[Case]:
    if name not in ("tf32", "bf16"):  # fp32 is as tf32, and fp16 as bf16
        return
    silence_rnn_contiguity_warning()
    shapes = list(itertools.product((16, 64, 256), (256, 1024), (64, 256), (1, 4)))
    for samples, width, steps, layers in farthest_first(shapes):
        shape = (steps, samples, width, width, layers)
        if layers * kernel_work("recurrent", shape) > MAX_OPERATIONS["bf16"]:
            continue
        layer = nn.LSTM(width, width, layers, device=device, dtype=dtype)
        x = _normal(device, dtype, steps, samples, width).requires_grad_()
        parameters = list(layer.parameters())
        yield "recurrent", shape, lambda layer=layer, x=x: layer(x)  # type: ignore[misc]  # bound now
        yield "recurrent_backward", shape, _backward(layer(x)[0], (x, *parameters))


CHANNELS = (
    (64, 112),
    (64, 56),
    (128, 56),
    (256, 56),
    (128, 28),
    (512, 28),
    (256, 14),
    (1024, 14),
    (512, 7),
    (2048, 7),
    (32, 32),
    (16, 112),
    (32, 112),
    (24, 56),
    (96, 56),
    (40, 28),
    (240, 14),
    (160, 7),
)
"""Channels and side of batches that are normalised."""
GROUPED_CHANNELS = ((1, 64, 56), (1, 128, 28), (1, 384, 14), (1, 768, 7), (32, 64, 64), (32, 256, 32), (32, 512, 16))
"""Groups, channels and side of images that are normalised by groups of channels."""


def _norms(device: torch.device, dtype: torch.dtype, most: float, name: str) -> Iterator[Case]:
    """Norms and row sums: memory-bound, but their rate depends on how many rows or channels run in parallel."""
    if name not in ("fp32", "bf16"):
        return
    for c, side in CHANNELS:
        for n in (16, 128):
            x = _normal(device, dtype, n, c, side, side).requires_grad_()
            weight, bias = (torch.ones(c, device=device, requires_grad=True) for _ in range(2))
            mean, variance = torch.zeros(c, device=device), torch.ones(c, device=device)

            def norm(x: Any = x, w: Any = weight, b: Any = bias, m: Any = mean, v: Any = variance) -> torch.Tensor:
                return F.batch_norm(x, m, v, w, b, training=True)

            yield "batch_norm", (n, c, side * side), norm
            yield "batch_norm_backward", (n, c, side * side), _backward(norm(), (x, weight, bias))
    for groups, c, side in GROUPED_CHANNELS:
        for n in (16, 128):
            x = _normal(device, dtype, n, c, side, side).requires_grad_()
            scale, shift = (torch.ones(c, device=device, dtype=dtype, requires_grad=True) for _ in range(2))

            def by_groups(x: Any = x, scale: Any = scale, shift: Any = shift, groups: int = groups) -> torch.Tensor:
                return F.group_norm(x, groups, scale, shift)

            shape = (n * groups, c // groups * side * side)
            yield GROUP_NORM, shape, by_groups
            yield f"{GROUP_NORM}_backward", shape, _backward(by_groups(), (x, scale, shift))
    for rows in (512, 4096, 16384, 65536, 262144):
        for width in (96, 192, 384, 768, 1024, 2048, 4096):
            if not 2**17 <= rows * width <= 2**27:
                continue
            x = _normal(device, dtype, rows, width).requires_grad_()
            scale, shift = (torch.ones(width, device=device, dtype=dtype, requires_grad=True) for _ in range(2))

            def rows_of(x: Any = x, scale: Any = scale, shift: Any = shift) -> torch.Tensor:
                return F.layer_norm(x, x.shape[-1:], scale, shift)

            yield "norm", (rows, width), rows_of
            yield "norm_backward", (rows, width), _backward(rows_of(), (x, scale, shift))
            yield ROW_SUMS, (rows, width), functools.partial(torch.sum, x.detach(), 0)


def _backward(y: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> Callable[[], object]:
    gradient = torch.randn_like(y)
    return lambda: torch.autograd.grad(y, inputs, gradient, retain_graph=True)


def _normal(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random numbers: matmuls of zeros take less power and run faster."""
    return torch.empty(shape, device=device, dtype=dtype).normal_()
