"""What bounds a step: where the seconds of a rank go, and which number of the machine they depend on."""

from __future__ import annotations

from dataclasses import dataclass

from ..clusters import Cluster
from ..costs import Estimate
from ..costs.divide import divide
from ..costs.layers import largest_share
from ..costs.work import Pricer
from ..models.profile import COMPUTE_KINDS, Profile
from ..plans import Plan

MEANS = {
    "products": "the rate of products (device.peak)",
    "memory": "the bandwidth of device memory (device.bandwidth)",
    "launches": "the start of small operators (device.launch)",
    "communication": "messages that nothing hides (node.link, network.link)",
    "bubble": "stages that wait for each other (pp, micro)",
    "optimizer": "the update, at the bandwidth of memory",
    "overhead": "what a step takes besides: the loss that is read and agreed on",
}
"""What each bound depends on."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Shares of a step by what bounds them; they add up to 1."""

    shares: dict[str, float]
    utilisation: float
    """Operations of the model over what the devices in use could do in that time, at the peak of their data sheet."""

    @property
    def first(self) -> str:
        """The largest of them."""
        return max(self.shares, key=lambda k: self.shares[k])


def bounds(profile: Profile, plan: Plan, e: Estimate, cluster: Cluster) -> Bounds:
    """Where the seconds of a step go."""
    computing = sum(e.parts.get(k, 0.0) for k in ("forward", "backward", "recompute"))
    found = {k: computing * share for k, share in _kernels(profile, plan, cluster).items()}
    found |= {k: e.parts.get(k, 0.0) for k in ("communication", "bubble", "optimizer", "overhead")}
    total = sum(found.values()) or 1.0
    shares = {k: v / total for k, v in sorted(found.items(), key=lambda kv: -kv[1]) if v > 0}
    could = e.step_seconds * plan.ranks * cluster.device.peak[plan.precision]
    return Bounds(shares, profile.flops().at(profile.batch_size) / could)


def _kernels(profile: Profile, plan: Plan, cluster: Cluster) -> dict[str, float]:
    """Of the seconds of kernels, the share that each limit of the device is answerable for."""
    local = divide(profile, plan).profile if plan.splits_model else profile
    pricer = Pricer(local, cluster.device, plan.precision)
    n = largest_share(profile.batch_size, plan)
    found = dict.fromkeys(("products", "memory", "launches"), 0.0)
    for x in local.layers:
        for op in x.ops:
            seconds = pricer.op_seconds(op, n)
            if seconds <= cluster.device.launch:
                limit = "launches"
            elif op.kind in COMPUTE_KINDS:
                limit = "products"
            else:
                limit = "memory"
            found[limit] += seconds * op.count * x.repeats
    total = sum(found.values()) or 1.0
    return {k: v / total for k, v in found.items()}
