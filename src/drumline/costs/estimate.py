"""The `Estimate` value: predicted time and memory of one step, in parts that add up; and the `Throughput` of a step."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ConfigDict

from ..clusters import Cluster
from ..core import files
from ..core.display import NotebookValue
from ..core.errors import CorruptFile
from ..core.units import format_bytes, format_count, format_seconds
from ..models.profile import Profile
from ..plans import Plan
from ..theory.roofline import compute_type
from .rank_model import tokens_of


@dataclass(frozen=True, slots=True)
class Estimate(NotebookValue):
    """One plan's predicted step."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    plan: str
    step_seconds: float
    parts: dict[str, float]
    """Seconds by part (`forward`, `backward`, `recompute`, `communication`, `optimizer`, `overhead`, of a pipeline
    `bubble`, and of ranks that differ `waiting`); their sum is the step. Communication is what is not hidden behind
    computation."""
    memory_bytes: float
    """Most bytes of tensors alive on one rank."""
    memory_parts: dict[str, float]
    """Bytes by part (`parameters`, `gradients`, `optimizer`, `activations`, `communication`) at that moment."""
    memory_limit: float
    """Available to the tensors of one rank: the device's memory without the framework's own."""
    hidden_seconds: float = 0.0
    """Communication that runs behind computation."""
    error: float = 0.0
    """Stated bound on the relative error of the time."""
    origin: str = ""
    """Where its numbers come from."""
    notes: tuple[str, ...] = field(default=())
    host_bytes: float = 0.0
    """Bytes of one rank's tensors that are offloaded to host memory, or of the parameter servers on one host; not among
    `memory_bytes`."""
    host_limit: float = 0.0
    """Host memory available to them; 0 where nothing is there."""
    raw_seconds: float = 0.0
    """The step before corrections from runs on these machines; 0 where it was not corrected."""
    runs: int = 0
    """Runs that corrected it."""
    own_runs: int = 0
    """Those of this model, under any plan."""
    reserve_bytes: float = 0.0
    """Of `memory_limit`, what a search keeps free; 0 where a plan was priced alone."""
    staleness: float = 0.0
    """Mean number of updates between the weights that a gradient is computed on and those that it is applied to."""

    data_seconds: float = 0.0
    """One process loads one rank's samples of a step; 0 where it was not measured."""
    data_wait_seconds: float = 0.0
    """The wait for data between steps, not part of the step."""
    input_text: str = ""
    """The data part in words."""

    @property
    def fits(self) -> bool:
        """Whether the memory of the device, and of the host if something is offloaded, is sufficient."""
        return self.memory_bytes <= self.memory_limit and self.host_bytes <= self.host_limit

    @property
    def in_reserve(self) -> bool:
        """Whether it fits, but only into the memory that is kept free."""
        return self.fits and self.memory_bytes > self.memory_limit - self.reserve_bytes

    @property
    def memory_text(self) -> str:
        """`51.9 GiB of 78.1 GiB, 26.2 GiB left; 7.8 GiB are kept free`."""
        text = f"{format_bytes(self.memory_bytes)} of {format_bytes(self.memory_limit)}"
        if not self.fits:
            return text
        left = f"{text}, {format_bytes(self.memory_limit - self.memory_bytes)} left"
        kept = f"{format_bytes(self.reserve_bytes)} {'should be' if self.in_reserve else 'are'} kept free"
        return f"{left}; {kept}" if self.reserve_bytes else left

    @property
    def host_owner(self) -> str:
        """Whom `host_bytes` are counted for."""
        return "for the servers of a host" if "sync=" in self.plan else "a rank"

    @property
    def uncorrected_seconds(self) -> float:
        """The step without corrections."""
        return self.raw_seconds or self.step_seconds

    @property
    def correction(self) -> str:
        """`corrected by 3 runs on this machine (x1.18)`; empty where nothing was corrected."""
        if not self.raw_seconds:
            return ""
        own = f", {self.own_runs} of them of this job" if self.own_runs else ", none of this job"
        runs = f"{self.runs} run{'s' if self.runs > 1 else ''}"
        return f"corrected by {runs} on this machine{own} (x{self.step_seconds / self.raw_seconds:.2f})"

    @property
    def lacks(self) -> tuple[str, float]:
        """Where memory is short, `device` or `host`, and the missing bytes; 0 if it fits."""
        device = self.memory_bytes - self.memory_limit
        host = self.host_bytes - self.host_limit
        return ("host", host) if device <= 0 < host else ("device", max(0.0, device))

    def at_speed(self, speed: float) -> Estimate:
        """The same step on a machine that runs at a share of its measured speed."""
        return dataclasses.replace(
            self,
            step_seconds=self.step_seconds / speed,
            parts={k: v / speed for k, v in self.parts.items()},
            hidden_seconds=self.hidden_seconds / speed,
            raw_seconds=self.raw_seconds / speed,
            notes=(*self.notes, f"the machine ran at {speed:.2f} of its measured speed when the run began"),
        )

    def save(self, path: str | Path) -> None:
        """Write the JSON form."""
        files.write_json(path, self)

    @classmethod
    def load(cls, path: str | Path) -> Estimate:
        """Read the JSON form back."""
        return files.from_plain(cls, files.read_json(path), str(path), CorruptFile)

    def __str__(self) -> str:
        parts = ", ".join(f"{k} {format_seconds(v)}" for k, v in self.parts.items() if v)
        where, _ = self.lacks
        limit = f"{format_bytes(self.host_limit)} of the host" if where == "host" else format_bytes(self.memory_limit)
        fits = "fits" if self.fits else f"does not fit {limit}"
        if self.host_bytes:
            fits = f"{format_bytes(self.host_bytes)} in host memory, {fits}"
        return (
            f"{self.plan}: {format_seconds(self.step_seconds)} +-{100 * self.error:.0f}% ({parts}); "
            f"{format_bytes(self.memory_bytes)}, {fits}"
        )


@dataclass(frozen=True, slots=True)
class Throughput:
    """Rates of a step, as people quote them. Recomputed work does not count."""

    devices: int
    """Devices in use."""
    samples_per_second: float
    """Over all devices."""
    tokens_per_second: float | None
    """Over all devices; None where samples are not sequences of tokens."""
    flops_per_device: float | None
    """Model FLOP/s of one device; None where the profile has no work."""
    mfu: float | None
    """Model FLOP/s over the dense peak of the precision; None where the peak is unknown."""

    @classmethod
    def of(
        cls, profile: Profile, plan: Plan, cluster: Cluster, seconds: float, *, samples: int | None = None
    ) -> Throughput | None:
        """Throughput of a step of that length; `samples` are the profile's batch by default. None without a step."""
        if seconds <= 0:
            return None
        samples = profile.batch_size if samples is None else samples
        tokens = tokens_of(profile)
        flops = profile.flops().at(samples) / seconds / plan.ranks
        peak = peak_of(cluster, plan.precision)
        return cls(
            plan.ranks,
            samples / seconds,
            samples * tokens / seconds if tokens else None,
            flops or None,
            flops / peak if flops and peak else None,
        )

    def __str__(self) -> str:
        rates = [f"{format_count(self.samples_per_second)} samples/s"]
        if self.tokens_per_second is not None:
            rates.append(f"{format_count(self.tokens_per_second)} tokens/s")
        many = "1 device" if self.devices == 1 else f"{self.devices} devices"
        each = []
        if self.tokens_per_second is not None and self.devices > 1:
            each.append(f"{format_count(self.tokens_per_second / self.devices)} tokens/s")
        if self.flops_per_device is not None:
            each.append(format_count(self.flops_per_device, "FLOP/s"))
        each.append(mfu_text(self.mfu))
        return f"{', '.join(rates)} over {many}; per device {', '.join(each)}"

    def to_json(self) -> dict[str, Any]:
        """The keys of a JSON document."""
        return {
            "devices": self.devices,
            "samples_per_second": self.samples_per_second,
            "tokens_per_second": self.tokens_per_second,
            "tflops_per_device": self.flops_per_device / 1e12 if self.flops_per_device is not None else None,
            "mfu": self.mfu,
        }


def peak_of(cluster: Cluster, precision: str) -> float | None:
    """The dense peak FLOP/s of a device in a precision; None, not a guess, if the cluster does not state it."""
    return cluster.device.peak.get(compute_type(precision))


def mfu_text(mfu: float | None) -> str:
    """`MFU 41.2%`, or `MFU N/A` where the peak is unknown."""
    return f"MFU {100 * mfu:.1f}%" if mfu is not None else "MFU N/A"
