"""Throughput of a step over all its devices, and how much of their peak it uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..clusters import Cluster
from ..core.units import format_count
from ..models.profile import Profile
from ..plans import Plan
from ..theory.roofline import compute_type
from .rank_model import tokens_of


@dataclass(frozen=True, slots=True)
class Throughput:
    """What a step achieves, as people quote it. Recomputed work does not count."""

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
        """Of a step of that many seconds, with the profile's batch unless `samples` are given; None without a step."""
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
