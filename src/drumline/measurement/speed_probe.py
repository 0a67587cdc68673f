"""Speed of this machine right now, relative to when it was measured. Shared machines speed up and slow down."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from ..clusters import DeviceSpec
from .cgroup import oversubscription
from .timing import synchronize

PROBE_SIZES = {"matmul": 2.0 * 512 * 256 * 256, "pointwise": 3.0 * 4 * 2**19}
"""The probed kernels with their sizes: operations of a matmul, bytes of a sum."""
FLUSHED_VALUES = 2**18
"""Values of other memory touched before each kernel, so that slow memory shows too."""
RECENT_SAMPLES = 4
"""Samples that give the current slowdown; a single one is too short."""
MAX_LOG_SLOWDOWN = math.log(1.7)
"""Largest fluctuation of a core's speed by itself, as a logarithm. More is caused by another program."""
MATMUL_WEIGHT = 0.6
"""Weight of the matmul in the speed of a step; the rest is the elementwise kernel."""


class SpeedProbe:
    """Times a matmul and an elementwise kernel, in about a millisecond; by CPU time if ranks share cores."""

    def __init__(self, device: torch.device, *, shares_cores: bool) -> None:
        self._device = device.type
        self._now = time.process_time if shares_cores else time.perf_counter
        shapes = (512, 256), (256, 256), (2**19,), (2**19,)
        self._tensors = tuple(torch.randn(shape, device=device) for shape in shapes)
        self._others = torch.ones(FLUSHED_VALUES if device.type == "cpu" else 0)
        self()

    def __call__(self) -> dict[str, float]:
        """Seconds of each kernel."""
        a, b, x, y = self._tensors
        return {"matmul": self._least(lambda: a @ b), "pointwise": self._least(lambda: x + y)}

    def _least(self, action: Callable[[], object]) -> float:
        """The smaller of two times, without interrupts."""
        times = []
        for _ in range(2):
            self._others.add_(1.0)
            start = self._now()
            action()
            synchronize(self._device)
            times.append(self._now() - start)
        return max(1e-9, min(times))


class SpeedTracker:
    """Tracks the slowdown of a rank over time, relative to reference times.

    A core shared with other machines is up to 1.5 times slower for milliseconds or seconds. Timings taken meanwhile are
    scaled to the rank's mean speed, so that kernels timed at different moments are comparable.
    """

    def __init__(self, probe: SpeedProbe, reference: Mapping[str, float]) -> None:
        self._probe, self._reference = probe, reference
        self._log_slowdowns: dict[str, list[float]] = {kernel: [] for kernel in reference}
        for _ in range(RECENT_SAMPLES):
            self.sample()

    def sample(self) -> None:
        """Take one more sample."""
        now = self._probe()
        for kernel, seconds in self._reference.items():
            self._log_slowdowns[kernel].append(
                max(-MAX_LOG_SLOWDOWN, min(MAX_LOG_SLOWDOWN, math.log(now[kernel] / seconds)))
            )

    def is_undisturbed(self) -> bool:
        """Whether no other program disturbed the last sample."""
        return all(abs(slowdowns[-1]) < MAX_LOG_SLOWDOWN for slowdowns in self._log_slowdowns.values())

    def recent_slowdown(self, kernel: str) -> float:
        """Time of the kernel relative to the reference, by the last samples."""
        return math.exp(statistics.mean(self._log_slowdowns[kernel][-RECENT_SAMPLES:]))

    def mean_slowdown(self, kernel: str) -> float:
        """The same, by all samples."""
        return math.exp(statistics.mean(self._log_slowdowns[kernel]))


ROUNDS_BEFORE, ROUNDS_AFTER = 32, 16
"""Rounds of probes before a run, for half a second so that one disturbance does not decide; and after it."""
PROBES_PER_ROUND = 8
"""Probes of a round, if ranks do not share cores. They follow each other without a pause: after 10 ms of sleep a matmul
of two threads takes 1.7 times as long, an elementwise kernel of one thread 1.2 times, and steps do not sleep."""
PROBE_CURVES = {"matmul": "probe_matmul", "pointwise": "probe_pointwise"}
"""Curves of such rounds taken during the measurement of a CPU; the other curves mix many shapes, and a single probe
between other kernels is slower than one of a row."""
MAX_ATTEMPTS, SLOW, SLOWEST = 3, math.log(1.35), math.log(2.0)
"""Attempts on a machine that seems that slow: another program may be about to end, and the fastest attempt counts. And
the largest slowdown of a run: threads that wait for each other slow a short matmul more than a step."""
FLUCTUATION = 0.35
"""Largest short-lived change of a shared core's speed, as a logarithm. Larger changes last."""
PERSISTENCE_BEFORE, PERSISTENCE_AROUND = 0.2, 0.3
"""Share of a short-lived change that remains in a run of some seconds: if probed before the run; if probed before and
after. Measured on CPUs: docs/calibration.md."""


def current_speed(curves: DeviceSpec, device: torch.device, *, rounds: int = ROUNDS_BEFORE) -> float:
    """Current speed of the ranks relative to their measured speed, as the mean over ranks.

    Waiting for the slowest rank is priced separately (`Cluster.straggler_slowdown`).
    """
    reference = {}
    for kernel, size in PROBE_SIZES.items():
        curve = curves.curve_of(PROBE_CURVES[kernel], "fp32") or curves.curve_of(kernel, "fp32")
        if curve is None:
            return 1.0
        reference[kernel] = size / curve.at(size)
    speeds: list[float] = []
    while not speeds or (speeds[-1] < -SLOW and len(speeds) < MAX_ATTEMPTS):
        speeds.append(_log_speed(reference, probe_rounds(device, rounds), device))
    return math.exp(max(-SLOWEST, *speeds))


def _log_speed(reference: Mapping[str, float], samples: list[dict[str, float]], device: torch.device) -> float:
    """Logarithm of the speed, equal on all ranks."""
    share = sum(
        weight * statistics.median(math.log(reference[kernel] / now[kernel]) for now in samples)
        for kernel, weight in (("matmul", MATMUL_WEIGHT), ("pointwise", 1 - MATMUL_WEIGHT))
    )
    if dist.is_initialized():
        total = torch.tensor([share], dtype=torch.float64, device=device)
        dist.all_reduce(total)
        share = float(total.item()) / dist.get_world_size()
    return share


def expected_speed(before: float, device: torch.device) -> float:
    """Expected speed of a run, from the speed before it: short-lived changes will partly be gone."""
    return math.exp(_persistent(math.log(before), PERSISTENCE_BEFORE)) if device.type == "cpu" else before


def speed_during_run(before: float, after: float, device: torch.device) -> float:
    """Speed of a run, from the speeds before and after it."""
    both = (math.log(before) + math.log(after)) / 2
    return math.exp(_persistent(both, PERSISTENCE_AROUND) if device.type == "cpu" else both)


def _persistent(change: float, share: float) -> float:
    short_lived = max(-FLUCTUATION, min(FLUCTUATION, change))
    return change - (1 - share) * short_lived


def probe_rounds(device: torch.device, rounds: int, *, rest: float = 0.0) -> list[dict[str, float]]:
    """Seconds of the kernels in each round, all ranks at once. With a `rest`, single probes with that pause between."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    shares_cores = device.type == "cpu" and oversubscription(ranks, torch.get_num_threads()) > 1
    probe = SpeedProbe(device, shares_cores=shares_cores)
    samples = []
    for i in range(rounds):
        if ranks > 1 and (shares_cores or i == 0):
            dist.barrier()  # ranks that share cores are as slow as in a step only while all compute
        samples.append(probe_row(probe, shares_cores=shares_cores or rest > 0))
        if rest:
            time.sleep(rest)
    return samples


def probe_row(probe: SpeedProbe, *, shares_cores: bool) -> dict[str, float]:
    """Median of some probes in a row; a single probe if ranks share cores."""
    row = [probe() for _ in range(1 if shares_cores else PROBES_PER_ROUND)]
    return {kernel: statistics.median(sample[kernel] for sample in row) for kernel in PROBE_SIZES}
