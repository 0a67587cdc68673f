"""Memory-bound kernels of a GPU at many sizes: bytes per second, counted as in a trace.

Inputs change from call to call, so that they come from memory and not from a cache filled by the last call.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from ..torchkit.operators import log_softmax_backward
from .kernels import KernelPoint, adamw_update
from .resume_journal import ResumeJournal
from .timing import time_gpu

SIZES = tuple(2**k for k in (14, 17, 19, 21, 23, 25, 27))
"""Values of the main tensor."""

COLD = 2**27
"""Bytes of the inputs that are cycled through: more than fits in caches."""

ROW, WORDS = 1024, 16384
"""Values of a normalised row, and of a softmax row."""

GATED = 256
"""Values that are multiplied by the same one."""

Call = Callable[[], object]
Many = list[torch.Tensor]
Case = tuple[str, float, Call]
"""Kind, bytes read and written, and the action to time."""


def measure_elementwise(
    device: torch.device, dtype: torch.dtype, journal: ResumeJournal, between: Callable[[], None]
) -> list[KernelPoint]:
    """All kinds at all sizes. `between` is called between two cases."""
    points = []
    for n in SIZES:
        for kind, size, action in _cases(device, dtype, n):
            timing = journal.timed(
                (kind, dtype, n), functools.partial(time_gpu, _rotating_outputs(action, n), budget=0.006)
            )
            points.append(KernelPoint(kind, size, timing))
            between()
    return points


def _rotating_outputs(action: Call, n: int) -> Call:
    """The action with several result buffers in turn: writes to a single one would stay in a cache."""
    kept: deque[object] = deque(maxlen=max(1, min(16, COLD // (4 * n))))
    return lambda: kept.append(action())


def measure_updates(device: torch.device, dtype: torch.dtype) -> list[KernelPoint]:
    """Adam's fused kernel on 32 tensors, from the size of a bias to that of a layer."""
    points = []
    for n in (2**10, 2**14, 2**17, 2**20, 2**22):
        p, g, m, v = [[torch.zeros(n, device=device, dtype=dtype) for _ in range(32)] for _ in range(4)]
        steps = [torch.zeros((), device=device) for _ in range(32)]

        def update(p: Many = p, g: Many = g, m: Many = m, v: Many = v, steps: Many = steps) -> None:
            adamw_update(p, g, m, v, steps)

        moved = 7.0 * n * 32 * p[0].element_size()  # value, gradient and two moments in, all but one out
        points.append(KernelPoint("update", moved, time_gpu(update, budget=0.02)))
    return points


def _cases(device: torch.device, dtype: torch.dtype, n: int) -> Iterator[Case]:
    width = torch.empty(0, dtype=dtype).element_size()
    many = max(3, min(16, COLD // (n * width)))
    flat = _turns([torch.empty(n, device=device, dtype=dtype).normal_() for _ in range(many)])
    byte = float(n * width)

    def rows() -> torch.Tensor:
        return next(flat).view(-1, ROW)

    yield "pointwise", 3 * byte, lambda: next(flat) + next(flat)
    gate = torch.randn(n // GATED, 1, device=device, dtype=dtype)
    yield "broadcast", 2 * byte + gate.numel() * width, lambda: next(flat).view(-1, GATED) * gate
    yield "special", 3 * byte, lambda: torch.ops.aten.gelu_backward(next(flat), next(flat))
    yield "reduce", byte, lambda: rows().sum(0)
    other, wider = (torch.float32, False) if dtype != torch.float32 else (torch.bfloat16, True)
    both = byte + n * torch.empty(0, dtype=other).element_size()
    yield "narrow" if wider else "widen", both, lambda: next(flat).to(other)

    def heads() -> torch.Tensor:
        return next(flat).view(-1, 4, 64).transpose(0, 1)

    yield "cat", 2 * byte, lambda: torch.stack(heads().chunk(4, 1))
    yield "strided", 2 * byte, lambda: heads().contiguous()
    square = _square(n)
    yield "transpose", 2 * byte, lambda: next(flat).view(square).transpose(-1, -2).contiguous()
    if n >= WORDS:
        yield "softmax", 2 * byte, lambda: torch.log_softmax(next(flat).view(-1, WORDS), -1)
        yield (
            "softmax_backward",
            3 * byte,
            lambda: log_softmax_backward(next(flat).view(-1, WORDS), next(flat).view(-1, WORDS), -1, dtype),
        )
    yield from _tables(device, dtype, n, byte, rows)
    if n >= 2**19:
        yield from _images(device, flat, n, byte)


def _tables(
    device: torch.device, dtype: torch.dtype, n: int, byte: float, rows: Callable[[], torch.Tensor]
) -> Iterator[Case]:
    table = torch.empty(32768, ROW, device=device, dtype=dtype).normal_()
    places = torch.randint(0, 32768, (n // ROW,), device=device)
    whole = float(table.numel() * table.element_size())
    yield "gather", 2 * byte + 8.0 * len(places), lambda: F.embedding(places, table)
    yield (
        "gather_backward",
        byte + 8.0 * len(places) + whole,
        lambda: torch.ops.aten.embedding_dense_backward(rows(), places, 32768, -1, False),
    )


def _images(device: torch.device, flat: Iterator[torch.Tensor], n: int, byte: float) -> Iterator[Case]:
    channels = 64
    side = 28
    samples = n // (channels * side * side)
    used = samples * channels * side * side
    share = used / n

    def image() -> torch.Tensor:
        return next(flat)[:used].view(samples, channels, side, side)

    out, indices = _pool(image())
    small = float(out.numel() * out.element_size() + 8 * indices.numel())
    yield "pool", byte * share + small, lambda: _pool(image())
    small_gradient = torch.randn_like(out)
    yield (
        "pool_backward",
        2 * byte * share + small,
        lambda: torch.ops.aten.max_pool2d_with_indices_backward(
            small_gradient, image(), [3, 3], [2, 2], [1, 1], [1, 1], False, indices
        ),
    )
    window: tuple[list[int], ...] = ([3, 3], [1, 1], [1, 1])
    yield "avg_pool2d", 2 * byte * share, lambda: torch.ops.aten.avg_pool2d(image(), *window)
    yield (
        "avg_pool2d_backward",
        3 * byte * share,
        lambda: torch.ops.aten.avg_pool2d_backward(image(), image(), *window, False, True, None),
    )


def _pool(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out, indices = torch.ops.aten.max_pool2d_with_indices(x, [3, 3], [2, 2], [1, 1])
    return out, indices


def _square(n: int) -> tuple[int, int, int]:
    """Matrices of about 1024 x 64, as attention heads are transposed."""
    return (max(1, n // 65536), min(n, 65536) // 64, 64)


def _turns(tensors: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    return itertools.cycle(tensors)
