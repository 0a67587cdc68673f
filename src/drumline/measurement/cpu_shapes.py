"""Shapes at which the matmuls, convolutions, attention, recurrent layers and norms of a CPU rank are measured.

They are smaller than those of a GPU: a case takes at most some milliseconds.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..costs.shape_interpolation import kernel_values, kernel_work
from .cpu_clock import CpuClock
from .gpu_shapes import Case, halton, shuffled
from .kernels import ShapeTiming
from .resume_journal import ResumeJournal

MAX_OPERATIONS = 1.2e9
"""Operations of the largest case."""
LIMITS = {"matmul": 4.0, "attention": 2.5, "conv": 6.0, "recurrent": 3.0, "norm": 2.5}
"""Seconds for the shapes of each kind; a slow rank measures fewer shapes."""


def measure_cpu_shapes(
    clock: CpuClock, report: Callable[[str], None], journal: ResumeJournal, between: Callable[[], None]
) -> list[ShapeTiming]:
    """All kernels at all shapes, in fp32. `between` is called between two cases."""
    timings = []
    for kind, (stage, cases) in _KINDS.items():
        report(stage)
        end = time.monotonic() + LIMITS[kind]
        for kernel, shape, action in cases():
            if time.monotonic() > end:
                break  # the order covers all regions early
            alike = "pointwise" if kind == "norm" else "matmul"
            run = functools.partial(clock, action, 4.0 * kernel_values(kernel, shape), alike=alike)
            timings.append(ShapeTiming(kernel, tuple(map(float, shape)), journal.timed((kernel, "fp32", *shape), run)))
            start = time.monotonic()
            between()
            end += time.monotonic() - start
    return timings


def matmul_shapes() -> list[tuple[int, int, int, int]]:
    """Layers and their gradients over few and many rows; sizes of all aspect ratios; batched small matmuls."""
    layers = (
        (64, 64),
        (256, 64),
        (128, 128),
        (256, 256),
        (1024, 256),
        (256, 1024),
        (768, 768),
        (512, 2048),
        (2048, 512),
        (2048, 1024),
        (16, 512),
        (4000, 128),
    )
    many = (8, 32, 128, 512, 2048)
    shapes = [(1, rows, n, k) for rows in many for n, k in layers]
    shapes += [(1, n, k, rows) for rows in many for n, k in layers]
    for a, b, c in zip(halton(40, 2), halton(40, 3), halton(40, 5), strict=True):
        m, n, k = (8 * round(2 * 2 ** (7 * x)) for x in (a, b, c))
        shapes.append((1, m, n, k))
    shapes += [(b, s, s, d) for b in (8, 64) for s in (32, 128) for d in (16, 64)]
    shapes += [(b, s, d, s) for b in (8, 64) for s in (32, 128) for d in (16, 64)]
    return shuffled([s for s in dict.fromkeys(shapes) if kernel_work("matmul", s) <= MAX_OPERATIONS])


def _matmuls() -> Iterator[Case]:
    for i, (b, m, n, k) in enumerate(matmul_shapes()):
        if b > 1:
            x, y = torch.randn(b, m, k), torch.randn(b, k, n)
        elif i % 2:  # operands as in the gradient of a weight
            x, y = torch.randn(k, m).t(), torch.randn(k, n)
        else:  # operands as in the forward of a layer
            x, y = torch.randn(m, k), torch.randn(n, k).t()
        yield "matmul", (b, m, n, k), lambda x=x, y=y: x @ y  # type: ignore[misc]  # bound now, used at once


def _attentions() -> Iterator[Case]:
    for heads, s, d, part in shuffled(list(itertools.product((4, 16, 64), (16, 64, 128, 256), (16, 32, 64), (1, 2)))):
        shape = (heads, s, s, d, part)
        if kernel_work("attention", shape) > MAX_OPERATIONS / 2:
            continue
        q, k, v = (torch.randn(max(1, heads // 4), 4, s, d, requires_grad=True) for _ in range(3))

        def run(q: Any = q, k: Any = k, v: Any = v, causal: bool = part == 2) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

        yield "attention", shape, run
        yield "attention_backward", shape, _backward(run(), (q, k, v))


FILTERS_3X3 = (
    (1, 16),
    (3, 16),
    (3, 32),
    (3, 64),
    (8, 16),
    (16, 16),
    (16, 32),
    (32, 16),
    (32, 32),
    (32, 64),
    (64, 32),
    (64, 64),
    (64, 128),
    (128, 64),
    (128, 128),
    (128, 256),
    (256, 256),
)
"""Channels in and out, of 3 x 3 filters."""
OTHER_FILTERS = (
    (32, 8, 1, 1),
    (16, 64, 1, 1),
    (64, 16, 1, 1),
    (64, 64, 1, 1),
    (64, 128, 1, 1),
    (128, 128, 1, 1),
    (128, 256, 1, 2),
    (16, 32, 1, 2),
    (32, 64, 1, 2),
    (16, 32, 3, 2),
    (32, 64, 3, 2),
    (64, 128, 3, 2),
    (3, 32, 3, 2),
    (3, 32, 5, 1),
    (16, 32, 5, 1),
    (32, 32, 5, 1),
    (3, 32, 7, 2),
    (3, 64, 7, 2),
    (16, 32, 2, 2),
    (32, 64, 2, 2),
    (3, 64, 4, 4),
)
"""Channels in and out, side of the filter, stride."""
DEPTHWISE = ((16, 32), (32, 16), (64, 32), (96, 8), (96, 24), (240, 8), (384, 16))
"""Channels of depthwise filters, and the side of the output."""
GROUPED = ((4, 8, 16), (8, 4, 32), (4, 32, 8), (8, 16, 16), (16, 8, 16))
"""Channels per group, groups, and the side of the output."""
MAX_CONV_WORK, MIN_CONV_WORK, MAX_CONV_INPUT = 2e8, 2e6, 2**21
"""Most and least operations of a convolution, and most values of its input."""


def convolution_shapes() -> list[tuple[int, int, int, int, int, int, int]]:
    """Samples, channels in and out of a group, side of the output and of the filter, stride, groups."""
    images = ((8, 4), (8, 8), (8, 16), (16, 16), (8, 32), (8, 64))  # samples times pixels matter
    shapes = [(n, a, b, side, 3, 1, 1) for a, b in FILTERS_3X3 for n, side in images[::2]]
    shapes += [(n, a, b, side, 3, 1, 1) for a, b in FILTERS_3X3[1::2] for n, side in images[1::2]]
    shapes += [(n, a, b, side, w, stride, 1) for a, b, w, stride in OTHER_FILTERS for n, side in images[1::2]]
    shapes += [(8, 1, 1, side, w, stride, c) for c, side in DEPTHWISE for w, stride in ((3, 1), (3, 2), (5, 1), (7, 1))]
    shapes += [(8, c, c, side, 3, stride, groups) for c, groups, side in GROUPED for stride in (1, 2)]
    return shuffled(
        [
            s
            for s in shapes
            if _values(s) <= MAX_CONV_INPUT and (s[6] > 1 or MIN_CONV_WORK <= _conv_work(s) <= MAX_CONV_WORK)
        ]
    )


def _values(s: tuple[int, int, int, int, int, int, int]) -> int:
    """Values of the input."""
    n, cin, _, side, _, stride, groups = s
    return n * cin * groups * (side * stride) ** 2


def _conv_work(s: tuple[int, int, int, int, int, int, int]) -> float:
    n, cin, cout, side, window, stride, groups = s
    return kernel_work("conv", (n, cin, cout, side * side, window * window, stride, groups, 1))


def _convolutions() -> Iterator[Case]:
    for n, cin, cout, side, window, stride, groups in convolution_shapes():
        padding = window // 2 if window % 2 else 0
        wide = side * stride if padding or stride > 1 else side + window - 1
        x = torch.randn(n, cin * groups, wide, wide, requires_grad=True)
        w = torch.randn(cout * groups, cin, window, window, requires_grad=True)

        def run(x: Any = x, w: Any = w, stride: int = stride, padding: int = padding, groups: int = groups) -> Any:
            return F.conv2d(x, w, stride=stride, padding=padding, groups=groups)

        y = run()
        assert math.prod(y.shape[2:]) == side * side
        shape = (n, cin, cout, side * side, window * window, stride, groups, 1)
        yield "conv", shape, run
        yield "conv_backward", shape, _backward(y, (x, w))


def _recurrents() -> Iterator[Case]:
    for steps, samples, (width, state) in shuffled(
        list(itertools.product((8, 24, 80), (4, 12, 48), ((32, 32), (64, 128), (128, 128), (96, 320), (320, 320))))
    ):
        shape = (steps, samples, width, state)
        if kernel_work("recurrent", shape) > MAX_OPERATIONS:
            continue
        layer = nn.LSTM(width, state)
        x = torch.randn(steps, samples, width, requires_grad=True)
        yield "recurrent", shape, lambda layer=layer, x=x: layer(x)  # type: ignore[misc]  # bound now, used at once
        yield "recurrent_backward", shape, _backward(layer(x)[0], (x, *layer.parameters()))


def _norms() -> Iterator[Case]:
    """Batch norms and layer norms."""
    for c, side, n in shuffled(list(itertools.product((8, 32, 64, 128), (4, 8, 16, 32, 64), (4, 16, 32)))):
        if not 2**12 <= n * c * side * side <= 2**20:
            continue
        x = torch.randn(n, c, side, side, requires_grad=True)
        weight, bias = (torch.ones(c, requires_grad=True) for _ in range(2))
        mean, variance = torch.zeros(c), torch.ones(c)

        def norm(x: Any = x, w: Any = weight, b: Any = bias, m: Any = mean, v: Any = variance) -> torch.Tensor:
            return F.batch_norm(x, m, v, w, b, training=True)

        yield "batch_norm", (n, c, side * side), norm
        yield "batch_norm_backward", (n, c, side * side), _backward(norm(), (x, weight, bias))
    for rows, width in itertools.product((32, 256, 1024, 4096), (32, 64, 128, 256, 512, 1024)):
        if rows * width > 2**21:
            continue
        x = torch.randn(rows, width, requires_grad=True)
        scale, shift = (torch.ones(width, requires_grad=True) for _ in range(2))

        def rows_of(x: Any = x, scale: Any = scale, shift: Any = shift) -> torch.Tensor:
            return F.layer_norm(x, x.shape[-1:], scale, shift)

        yield "norm", (rows, width), rows_of
        yield "norm_backward", (rows, width), _backward(rows_of(), (x, scale, shift))


def _backward(y: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> Callable[[], object]:
    gradient = torch.randn_like(y)
    return lambda: torch.autograd.grad(y, inputs, gradient, retain_graph=True)


_KINDS: dict[str, tuple[str, Callable[[], Iterator[Case]]]] = {
    "matmul": ("matmul", _matmuls),
    "attention": ("attention", _attentions),
    "conv": ("conv", _convolutions),
    "recurrent": ("conv", _recurrents),
    "norm": ("memory", _norms),
}
"""The reported stage of each kind, and its cases."""
