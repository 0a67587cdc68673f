"""What this rank's device computes per second: one curve over size for each kind of operator.

All ranks measure at the same time, because that is how they will train: they share memory and caches.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .clock import Timing, clock, settle
from .journal import Journal


@dataclass(frozen=True, slots=True)
class Point:
    """One kernel at one size."""

    kernel: str
    size: float
    """Operations for kernels bound by compute, else bytes read and written."""
    timing: Timing

    @property
    def rate(self) -> float:
        """Size per second."""
        return self.size / self.timing.seconds


_STAGES = {
    "matmul": "matmul", "attention": "attention", "attention_backward": "attention", "conv": "conv",
    "conv_backward": "conv",
}  # fmt: skip

Case = tuple[str, float, Callable[[], object]]
"""Kernel, size, and what to time."""


def measure_kernels(
    device: torch.device, dtype: torch.dtype, report: Callable[[str], None], journal: Journal
) -> list[Point]:
    """Every kernel at every size."""
    points = []
    for kernel, size, action in _cases(device, dtype):
        report(_STAGES.get(kernel, "memory"))
        run = functools.partial(clock, action, budget=0.02, device=device.type)
        points.append(Point(kernel, size, journal.timed((kernel, dtype, size), run)))
    return points


def measure_launch(device: torch.device) -> float:
    """What one operator costs however small it is, with autograd: a long chain of additions, there and back."""
    x = torch.ones(4, device=device, requires_grad=True)
    depth = 100

    def chain() -> None:
        y = x
        for _ in range(depth):
            y = y + 1.0
        y.sum().backward()
        settle(device.type)

    return clock(chain, device=device.type).seconds / (2 * depth)


def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    large = device.type == "cuda"
    yield from _matmuls(device, dtype, (64, 256, 1024, 4096, 8192) if large else (16, 32, 64, 128, 256, 512, 1024))
    yield from _attentions(device, dtype, (256, 1024, 4096) if large else (32, 64, 128, 256))
    yield from _convolutions(device, dtype, (32, 128, 512) if large else (4, 16, 32, 64))
    sizes = (2**12, 2**16, 2**20, 2**24, 2**28) if large else (2**8, 2**12, 2**14, 2**16, 2**18, 2**20, 2**22)
    yield from _streams(device, dtype, sizes)


def _matmuls(device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...]) -> Iterator[Case]:
    for n in sizes:
        # a layer's shape: many rows of activations, a square weight
        a, b = torch.randn(4 * n, n, device=device, dtype=dtype), torch.randn(n, n, device=device, dtype=dtype)
        yield "matmul", 8.0 * n**3, lambda a=a, b=b: a @ b  # type: ignore[misc]  # bound now, used at once


def _attentions(device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...]) -> Iterator[Case]:
    for s in sizes:
        q, k, v = (torch.randn(4, 4, s, 32, device=device, dtype=dtype, requires_grad=True) for _ in range(3))

        def forward(q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        work = 2.0 * 16 * s * s * 64 / 2  # half of it is masked
        yield "attention", work, forward
        yield "attention_backward", 2.5 * work, _backward(forward(), (q, k, v))


def _convolutions(device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...]) -> Iterator[Case]:
    for c in sizes:
        x = torch.randn(16, c, 16, 16, device=device, dtype=dtype, requires_grad=True)
        w = torch.randn(c, c, 3, 3, device=device, dtype=dtype, requires_grad=True)
        work = 2.0 * 16 * 256 * c * c * 9
        yield "conv", work, lambda x=x, w=w: F.conv2d(x, w, padding=1)  # type: ignore[misc]  # as above
        yield "conv_backward", 2 * work, _backward(F.conv2d(x, w, padding=1), (x, w))


def _backward(y: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> Callable[[], object]:
    gradient = torch.ones_like(y)
    return lambda: torch.autograd.grad(y, inputs, gradient, retain_graph=True)


def _streams(device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...]) -> Iterator[Case]:
    """Kernels bound by memory; a, b have n values, rows are 128 wide."""
    width = torch.empty(0, dtype=dtype).element_size()
    for n in sizes:
        a, b = torch.randn(n, device=device, dtype=dtype), torch.randn(n, device=device, dtype=dtype)
        rows = a.view(-1, min(n, 128))
        table = torch.randn(1024, 128, device=device, dtype=dtype)
        places = torch.randint(0, 1024, (max(1, n // 128),), device=device)
        byte = float(n * width)
        cases: list[Case] = [
            ("pointwise", 3 * byte, lambda a=a, b=b: a + b),  # type: ignore[misc]  # bound now, used at once
            ("update", 4 * byte, lambda a=a, b=b: a.addcmul_(b, b, value=1e-9)),  # type: ignore[misc]  # as above
            ("special", 2 * byte, lambda a=a: F.gelu(a)),  # type: ignore[misc]  # as above
            ("norm", 2 * byte, lambda r=rows: F.layer_norm(r, r.shape[-1:])),  # type: ignore[misc]  # as above
            ("softmax", 2 * byte, lambda r=rows: F.log_softmax(r, -1)),  # type: ignore[misc]  # as above
            ("reduce", byte, lambda r=rows: r.sum(0)),  # type: ignore[misc]  # as above
            ("gather", byte + 8.0 * len(places), lambda t=table, p=places: F.embedding(p, t)),  # type: ignore[misc]
        ]
        yield from cases


def geometric_mean(values: list[float]) -> float:
    """Of rates that several ranks measured."""
    return math.exp(sum(math.log(v) for v in values) / len(values))
