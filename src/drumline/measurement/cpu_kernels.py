"""Kernels of a CPU rank: compute-bound ones by shape, memory-bound ones by size, all ranks at once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from ..costs.kernel_time import LAYOUT_KINDS
from ..models.profile import COMPUTE_KINDS
from ..torchkit.dispatch_modes import DispatchMode
from ..torchkit.operators import log_softmax, log_softmax_backward, softmax, softmax_backward
from ..torchkit.schemas import writes_in_place
from ..torchkit.storages import storage_id
from ..tracing.op_costs import kind_of_call, size_of, sparsely_read, tensors
from ..tracing.optimizer import TrafficCounter
from .cpu_clock import CpuClock
from .cpu_shapes import measure_cpu_shapes
from .kernels import KernelPoint, KernelTimings, adamw_update, geometric_mean, points_by_work
from .resume_journal import ResumeJournal
from .speed_probe import PROBE_CURVES, PROBE_SIZES, SpeedProbe, SpeedTracker, probe_rounds, probe_row
from .timing import RateLimited, Timing, timing_of

SIZES = tuple(2**k for k in (8, 11, 14, 16, 18, 20, 22))
"""Values of the main tensor."""
UNCACHED_VALUES = 9 * 2**20
"""Values of a tensor whose memory is not reused: the C library returns 32 MB and more to the system at once, so that
each page of the next tensor is new."""
BUDGET = 0.006
"""Seconds for one case."""
ROW, CHANNELS, SIDE, LARGEST = 128, 16, 16, 2**20
"""Values of a row; channels and side of an image, and values of a batch of them at most."""

Action = Callable[[], object]
A = torch.ops.aten


class LargestCall(DispatchMode):
    """The largest call of an action: its name, its kind, and the bytes that it reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.name, self.kind, self.bytes = "", "", 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        inputs, outputs = tensors((args, kwargs or {})), tensors(out)
        table = sparsely_read(name, args)
        written = sum(map(size_of, outputs))
        moved = sum(size_of(t) for t in inputs if t is not table) + written
        moved += written if table is not None and "backward" not in name else 0.0
        fresh = {storage_id(t) for t in outputs} - {storage_id(t) for t in inputs}
        if (fresh or writes_in_place(func)) and not name.startswith("empty") and moved > self.bytes:
            self.name, self.kind, self.bytes = name, kind_of_call(name, inputs, outputs), moved
        return out


def measure_cpu_elementwise(clock: CpuClock, journal: ResumeJournal, between: Callable[[], None]) -> list[KernelPoint]:
    """All operators at all sizes, each under its own name, because on a CPU operators of one kind differ by up to ten
    times; one operator represents its kind. Bytes are counted as in a trace. `between` is called between two cases.
    """
    points = []
    for n in SIZES:
        for kinds, action in _cases(n):
            with LargestCall() as counted:
                action()
            run = functools.partial(clock, action, counted.bytes, budget=BUDGET)
            timing = journal.timed((counted.name, counted.kind, n), run)
            name = counted.kind if counted.kind in LAYOUT_KINDS else counted.name
            points += [KernelPoint(k, counted.bytes, timing) for k in dict.fromkeys((name, *kinds))]
            between()
        points.append(_update(n, clock))
    return points + _new_pages(clock)


def _new_pages(clock: CpuClock) -> list[KernelPoint]:
    """Cost of new memory pages per byte, and the operators that most often work on large tensors."""
    x, y = torch.ones(UNCACHED_VALUES), torch.ones(UNCACHED_VALUES)
    made = clock(lambda: torch.zeros(UNCACHED_VALUES).add_(0.0), 4.0 * UNCACHED_VALUES)
    reused = clock(lambda: y.zero_().add_(0.0), 4.0 * UNCACHED_VALUES)
    pages = Timing(max(1e-6, made.seconds - reused.seconds), made.spread)
    points = [KernelPoint("new_pages", 4.0 * UNCACHED_VALUES, pages)]
    for kinds, action, moved in (
        (("add", "pointwise"), lambda: x + y, 3),
        (("gelu", "special"), lambda: A.gelu(x), 2),
        (("mul",), lambda: x * y, 3),
        (("_log_softmax", "softmax"), lambda: log_softmax(x.view(-1, ROW), -1, False), 2),
    ):
        timing = clock(action, 4.0 * UNCACHED_VALUES * moved)
        points += [KernelPoint(kind, 4.0 * UNCACHED_VALUES * moved, timing) for kind in kinds]
    return points


def _update(n: int, clock: CpuClock) -> KernelPoint:
    """Adam's fused kernel on a few tensors: the time of one."""
    many = 8 if n <= 2**18 else 2
    p, g, m, v, steps = ([torch.zeros(size) for _ in range(many)] for size in (n, n, n, n, 1))

    def update() -> None:
        adamw_update(p, g, m, v, steps)

    with TrafficCounter() as moved:
        update()
    timing = clock(update, moved.bytes)
    return KernelPoint("update", moved.bytes / many, Timing(timing.seconds / many, timing.spread))


def _cases(n: int) -> Iterator[tuple[tuple[str, ...], Action]]:
    """The kinds that a case represents, and the action."""
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
    yield ("softmax",), lambda: softmax(rows, -1, False)
    yield ("softmax_backward",), lambda: softmax_backward(rows, others, -1, torch.float32)
    yield (), lambda: log_softmax(rows, -1, False)
    yield (), lambda: log_softmax_backward(rows, others, -1, torch.float32)
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


FIRST_PROBES, REST = 16, 0.01
"""Probes before anything is timed, and seconds between them. Single probes between kernels are compared with these;
probes in a row would be so much faster that the rank would always seem disturbed."""
GAP, LEAST = 2.0, 7
"""Seconds between two calls of `between`, for a rank with its own core; and its least number of calls, also if most
cases were timed by an earlier run.
"""


def measure_cpu(
    device: torch.device,
    threads_per_core: float,
    report: Callable[[str], None],
    journal: ResumeJournal,
    between: Callable[[], None] = lambda: None,
) -> KernelTimings:
    """Measure this rank, or resume it. All timings are scaled to the rank's mean speed.

    `between` is called every few seconds between kernels.
    """
    probe, rows = SpeedProbe(device, shares_cores=threads_per_core > 1), []

    def sample() -> None:
        between()
        rows.append(probe_row(probe, shares_cores=threads_per_core > 1))

    often = RateLimited(sample, GAP * threads_per_core)
    samples = probe_rounds(device, FIRST_PROBES, rest=REST)
    first = {k: timing_of([s[k] for s in samples]) for k in PROBE_SIZES}
    reference = {k: journal.timed(("speed probe", k), functools.partial(first.__getitem__, k)) for k in PROBE_SIZES}
    tracker = SpeedTracker(probe, {k: timing.seconds for k, timing in reference.items()})
    clock = CpuClock(threads_per_core, tracker)
    shapes = measure_cpu_shapes(clock, report, journal, often)
    report("memory")
    elementwise = measure_cpu_elementwise(clock, journal, often)
    often.ensure_calls(LEAST)
    slowdown = {k: tracker.mean_slowdown(k) for k in PROBE_SIZES}
    shapes = [replace(s, timing=_times(s.timing, slowdown[_alike(s.kernel)])) for s in shapes]
    elementwise = [replace(p, timing=_times(p.timing, slowdown["pointwise"])) for p in elementwise]
    probes = [KernelPoint(PROBE_CURVES[k], size, _mean([row[k] for row in rows])) for k, size in PROBE_SIZES.items()]
    return KernelTimings({"fp32": points_by_work(shapes, 4.0) + elementwise + probes}, {"fp32": shapes})


def _mean(seconds: list[float]) -> Timing:
    return Timing(geometric_mean(seconds), timing_of(seconds).spread)


def _alike(kernel: str) -> str:
    return "matmul" if kernel in COMPUTE_KINDS else "pointwise"


def _times(timing: Timing, factor: float) -> Timing:
    return Timing(timing.seconds * factor, timing.spread)
