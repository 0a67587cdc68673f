"""Bottlenecks of a step: where its time goes, and which property of the machine bounds it."""

from __future__ import annotations

from dataclasses import dataclass

from ..clusters import Cluster
from ..costs import Estimate
from ..costs.estimate import Throughput
from ..costs.kernel_time import Pricer
from ..costs.layer_time import largest_micro_batch
from ..costs.model_split import split_model
from ..costs.operator_model import launched_by
from ..costs.typical_rates import with_typical_rates
from ..models.profile import COMPUTE_KINDS, Profile
from ..plans import Plan

DEPENDS_ON = {
    "products": "the matmul rate (device.peak)",
    "memory": "the memory bandwidth of the device (device.bandwidth)",
    "launches": "the launch time of small kernels (device.launch, device.host_overhead)",
    "communication": "exposed communication (node.link, network.link)",
    "bubble": "pipeline stages waiting for each other (pp, micro)",
    "optimizer": "the optimizer update, at memory bandwidth",
    "overhead": "work between two steps: reading the loss and agreeing on it",
    "waiting": "waiting for slower ranks, or for busy servers (step_times, sync)",
}
"""The numbers of a cluster that each bottleneck depends on."""


@dataclass(frozen=True, slots=True)
class Bottlenecks:
    """Fractions of a step by what bounds them; they add up to 1."""

    shares: dict[str, float]
    utilisation: float
    """Model FLOP/s over the peak of the devices in use; 0 where the peak is unknown."""

    @property
    def first(self) -> str:
        """The largest bottleneck."""
        return max(self.shares, key=lambda k: self.shares[k])


def bottlenecks(profile: Profile, plan: Plan, e: Estimate, cluster: Cluster) -> Bottlenecks:
    """Attribute the time of a step."""
    compute = sum(e.parts.get(k, 0.0) for k in ("forward", "backward", "recompute"))
    seconds = {k: compute * share for k, share in _kernel_limits(profile, plan, cluster).items()}
    seconds |= {k: e.parts.get(k, 0.0) for k in ("communication", "bubble", "optimizer", "overhead", "waiting")}
    total = sum(seconds.values()) or 1.0
    shares = {k: v / total for k, v in sorted(seconds.items(), key=lambda kv: -kv[1]) if v > 0}
    rates = Throughput.of(profile, plan, cluster, e.step_seconds)
    return Bottlenecks(shares, rates.mfu if rates and rates.mfu else 0.0)


def _kernel_limits(profile: Profile, plan: Plan, cluster: Cluster) -> dict[str, float]:
    """Fractions of the compute time that each limit of the device, or of its host, is responsible for."""
    local = split_model(profile, plan).profile if plan.splits_model else profile
    device = launched_by(with_typical_rates(cluster).device, plan)
    pricer = Pricer(local, device, plan.precision)
    n = largest_micro_batch(profile.batch_size, plan)
    seconds = dict.fromkeys(("products", "memory", "launches"), 0.0)
    for x in local.layers:
        for op in x.ops:
            duration = pricer.op_seconds(op, n)
            if duration <= device.launch:
                limit = "launches"
            elif op.kind in COMPUTE_KINDS:
                limit = "products"
            else:
                limit = "memory"
            seconds[limit] += duration * op.count * x.repeats
        times = [pricer.layer_time(x, phase, n) for phase in ("forward", "backward")]
        seconds["launches"] += x.repeats * max(0.0, sum(t.launch - t.kernel for t in times))
    total = sum(seconds.values()) or 1.0
    return {k: v / total for k, v in seconds.items()}
