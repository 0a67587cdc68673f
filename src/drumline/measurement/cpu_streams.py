"""Kernels of a CPU rank that its memory bounds, at many sizes: each operator under its own name, because on a CPU what
is alike in kind may differ by a factor of ten. What a call moves is counted as a trace counts it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..costs.work import ARRANGED
from ..tracing.kinds import kind_of_call, picked_from, size_of, tensors
from ..tracing.tracing import Moved
from .clock import Timing
from .journal import Journal
from .kernels import Point
from .shared import Clock

SIZES = tuple(2**k for k in (8, 11, 14, 16, 18, 20, 22))
"""Values of the main tensor."""
FRESH = 9 * 2**20
"""Values of a tensor that is never kept for the next one: the C library hands 32 MB and more back at once, so that
every page of the next one is made anew."""
BUDGET = 0.006
"""Seconds for one case."""
ROW, CHANNELS, SIDE, LARGEST = 128, 16, 16, 2**20
"""Values of a row; channels and side of an image, and values of a batch of them at most."""

Action = Callable[[], object]
A = torch.ops.aten


class Counted(TorchDispatchMode):
    """The largest call of an action: what it is called, its kind, and the bytes that it reads and writes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.name, self.kind, self.bytes = "", "", 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        inputs, outputs = tensors((args, kwargs or {})), tensors(out)
        table = picked_from(name, args)
        written = sum(map(size_of, outputs))
        moved = sum(size_of(t) for t in inputs if t is not table) + written
        moved += written if table is not None and "backward" not in name else 0.0
        fresh = {t.untyped_storage()._cdata for t in outputs} - {t.untyped_storage()._cdata for t in inputs}
        if (fresh or func._schema.is_mutable) and not name.startswith("empty") and moved > self.bytes:
            self.name, self.kind, self.bytes = name, kind_of_call(name, inputs, outputs), moved
        return out


def measure_cpu_streams(clock: Clock, journal: Journal, between: Callable[[], None]) -> list[Point]:
    """Every operator at every size; one that its kind is named after stands for the others of the kind.

    `between` two of them something else may be done.
    """
    points = []
    for n in SIZES:
        for stands_for, action in _cases(n):
            with Counted() as counted:
                action()
            run = functools.partial(clock, action, counted.bytes, budget=BUDGET)
            timing = journal.timed((counted.name, counted.kind, n), run)
            name = counted.kind if counted.kind in ARRANGED else counted.name
            points += [Point(k, counted.bytes, timing) for k in dict.fromkeys((name, *stands_for))]
            between()
        points.append(_update(n, clock))
    return points + _fresh(clock)


def _fresh(clock: Clock) -> list[Point]:
    """What it takes to make memory, by byte; and the operators that large tensors meet most."""
    x, y = torch.ones(FRESH), torch.ones(FRESH)
    made = clock(lambda: torch.zeros(FRESH).add_(0.0), 4.0 * FRESH)
    again = clock(lambda: y.zero_().add_(0.0), 4.0 * FRESH)
    pages = Timing(max(1e-6, made.seconds - again.seconds), made.spread)
    points = [Point("fresh", 4.0 * FRESH, pages)]
    for kinds, action, moved in (
        (("add", "pointwise"), lambda: x + y, 3),
        (("gelu", "special"), lambda: A.gelu(x), 2),
        (("mul",), lambda: x * y, 3),
        (("_log_softmax", "softmax"), lambda: A._log_softmax(x.view(-1, ROW), -1, False), 2),
    ):
        timing = clock(action, 4.0 * FRESH * moved)
        points += [Point(kind, 4.0 * FRESH * moved, timing) for kind in kinds]
    return points


def _update(n: int, clock: Clock) -> Point:
    """Adam's fused kernel on a few tensors; what one of them takes."""
    many = 8 if n <= 2**18 else 2
    p, g, m, v, steps = ([torch.zeros(size) for _ in range(many)] for size in (n, n, n, n, 1))

    def update() -> None:
        torch._fused_adamw_(
            p,
            g,
            m,
            v,
            [],
            steps,
            lr=1e-3,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.01,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )

    with Moved() as moved:
        update()
    timing = clock(update, moved.bytes)
    return Point("update", moved.bytes / many, Timing(timing.seconds / many, timing.spread))


def _cases(n: int) -> Iterator[tuple[tuple[str, ...], Action]]:
    """What else each stands for, and what to time."""
    x, y = torch.randn(n), torch.randn(n)
    yield ("pointwise",), lambda: x + y
    yield (), lambda: x * y
    yield (), lambda: x.add_(y, alpha=1e-6)
    yield (), lambda: x.clone()
    yield (), lambda: torch.zeros_like(x)
    yield (), lambda: x.relu()
    yield (), lambda: A.threshold_backward(x, y, 0)
    yield from _costly(x, y)
    yield from _rows(x, y)
    if CHANNELS * SIDE * SIDE <= n <= LARGEST:
        yield from _images(x)


def _costly(x: torch.Tensor, y: torch.Tensor) -> Iterator[tuple[tuple[str, ...], Action]]:
    yield ("special",), lambda: A.gelu(x)
    yield (), lambda: A.gelu_backward(x, y)
    yield (), lambda: A.silu(x)
    yield (), lambda: A.silu_backward(x, y)
    yield (), lambda: x.tanh()
    yield (), lambda: A.tanh_backward(x, y)
    yield (), lambda: x.sigmoid()
    yield (), lambda: A.sigmoid_backward(x, y)
    yield (), lambda: x.exp()
    yield (), lambda: x.pow(2)
    yield (), lambda: A.bernoulli_.float(x, 0.9)


def _rows(x: torch.Tensor, y: torch.Tensor) -> Iterator[tuple[tuple[str, ...], Action]]:
    """Rows are 128 wide; tables have 1024 of them."""
    n, rows, others = x.numel(), x.view(-1, ROW), y.view(-1, ROW)
    places = torch.randint(0, 1024, (n // ROW,))
    table = torch.randn(1024, ROW)
    yield ("softmax",), lambda: A._softmax(rows, -1, False)
    yield ("softmax_backward",), lambda: A._softmax_backward_data(rows, others, -1, torch.float32)
    yield (), lambda: A._log_softmax(rows, -1, False)
    yield (), lambda: A._log_softmax_backward_data(rows, others, -1, torch.float32)
    yield ("reduce",), lambda: rows.sum(0)
    yield (), lambda: rows.mean(-1)
    yield (), lambda: A.mse_loss(x, y)
    yield ("gather",), lambda: A.embedding(table, places)
    yield ("gather_backward",), lambda: A.embedding_dense_backward(rows, places, 1024, -1, False)
    yield ("cat",), lambda: torch.cat((x, y))
    if n >= 8 * ROW:
        yield (), lambda: x.view(-1, 4, ROW // 4).transpose(0, 1).contiguous()
        yield (), lambda: x.view(-1, ROW // 2, 2).transpose(-1, -2).contiguous()


def _images(x: torch.Tensor) -> Iterator[tuple[tuple[str, ...], Action]]:
    image = x.view(-1, CHANNELS, SIDE, SIDE)
    gradient = torch.randn_like(image)
    samples = len(image)
    weight = torch.ones(CHANNELS)
    mean, spread = torch.zeros(samples, 4), torch.ones(samples, 4)
    shape = (samples, CHANNELS, SIDE * SIDE, 4)
    yield (), lambda: A.native_group_norm(image, weight, weight, *shape, 1e-5)
    yield (), lambda: A.native_group_norm_backward(gradient, image, mean, spread, weight, *shape, [True, True, True])
    out, indices = A.max_pool2d_with_indices(image, [2, 2], [2, 2])
    yield ("pool",), lambda: A.max_pool2d_with_indices(image, [2, 2], [2, 2])
    yield (
        ("pool_backward",),
        lambda: A.max_pool2d_with_indices_backward(out, image, [2, 2], [2, 2], [0, 0], [1, 1], False, indices),
    )
    yield (), lambda: A.avg_pool2d(image, [2, 2], [2, 2])
    yield (), lambda: A.avg_pool2d_backward(out, image, [2, 2], [2, 2], [0, 0], False, True, None)
    wide = [2 * SIDE, 2 * SIDE]
    large = torch.randn(samples, CHANNELS, *wide)
    yield (), lambda: A.upsample_nearest2d(image, wide)
    yield (), lambda: A.upsample_nearest2d_backward(large, wide, list(image.shape))
    yield (), lambda: A.upsample_bilinear2d(image, wide, False)
    yield (), lambda: A.upsample_bilinear2d_backward(large, wide, list(image.shape), False)
