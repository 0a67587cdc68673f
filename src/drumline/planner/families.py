"""The families of plans, the best of each, and by how much it lost: a table of alternatives with numbers."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import ConfigDict

from ..clusters import Cluster
from ..costs import Estimate
from ..costs.tensor import tokens_of
from ..models.profile import Profile
from ..models.shapes import Convolution, shape_of
from ..plans import Plan
from .objectives import Scored
from .splitting import LONG, SMALLEST_TILE

FAMILIES = {
    "one device": "no rank but one",
    "data": "whole replicas (zero=0)",
    "sharded": "replicas that share their states (zero=1, 2, 3)",
    "offload": "states in host memory",
    "chunk": "the largest layers in parts",
    "tensor": "features of a layer over ranks (tp)",
    "pipeline": "layers over ranks (pp)",
    "context": "tokens over ranks (cp)",
    "tiles": "parts of an image over ranks (tile)",
}
"""Every family, and what its plans do."""


@dataclass(frozen=True, slots=True)
class Family:
    """The best plan of a family, against the winner."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    name: str
    plan: str
    """Empty where there is no such plan: `reason` says why."""
    step_seconds: float
    memory_bytes: float
    fits: bool
    slower: float
    """The step's time over the winner's, less 1; 0 for the winner."""
    lacks_bytes: float
    """Bytes that it needs beyond what there is, on the device or its host; 0 where it fits."""
    reason: str
    wins_if: tuple[str, ...] = ()
    """What would have to change for it to win; empty where nothing that was tried does it."""

    @property
    def won(self) -> bool:
        """Whether the chosen plan is of this family."""
        return self.fits and self.slower == 0.0


def families_of(plan: Plan) -> tuple[str, ...]:
    """The families that a plan belongs to: one, or several where it combines them."""
    found = {
        "one device": plan.ranks == 1 and plan.offload == "none" and plan.chunk == 1,
        "data": plan.dp > 1 and plan.zero == 0 and not plan.splits_model and plan.offload == "none",
        "sharded": plan.dp > 1 and plan.zero > 0 and not plan.splits_model and plan.offload == "none",
        "offload": plan.offload != "none",
        "chunk": plan.chunk > 1,
        "tensor": plan.tp > 1,
        "pipeline": plan.pp > 1,
        "context": plan.cp > 1,
        "tiles": plan.tile != (1, 1),
    }
    return tuple(name for name, is_one in found.items() if is_one)


def best_of_each(ranked: list[Scored]) -> dict[str, Scored]:
    """The first of each family in a list that is sorted, the best first."""
    found: dict[str, Scored] = {}
    for plan, e in ranked:
        for name in families_of(plan):
            found.setdefault(name, (plan, e))
    return found


def row(name: str, plan: Plan, e: Estimate, best: Estimate, reason: str, wins_if: tuple[str, ...]) -> Family:
    """One family's best."""
    slower = 0.0 if e is best else e.step_seconds / best.step_seconds - 1
    return Family(name, str(plan), e.step_seconds, e.memory_bytes, e.fits, slower, e.lacks[1], reason, wins_if)


def absent(name: str, profile: Profile, cluster: Cluster) -> Family:
    """A family without a plan, and why there is none."""
    return Family(name, "", 0.0, 0.0, False, 0.0, 0.0, why_absent(name, profile, cluster))


def why_absent(name: str, profile: Profile, cluster: Cluster) -> str:
    """Why nothing of a family was looked at."""
    device = cluster.device
    if name == "offload":
        if device.kind != "cuda":
            return "a CPU has everything in host memory already"
        return "the host is not known (device.host)" if device.host is None else "what fits without it is faster"
    if name == "chunk":
        return "no plan needs it, or it helps none"
    if name == "one device":
        return "not looked at: more devices divide its work"
    if cluster.devices == 1:
        return "there is one device"
    if name in ("data", "sharded"):
        return f"batches of {profile.batch_size}: no second replica has a sample"
    if name == "context":
        tokens = tokens_of(profile)
        short = f"{tokens} tokens a sample < 2 x {LONG}"
        return short if tokens else "samples are no sequences of tokens"
    if name == "tiles":
        images = any(isinstance(shape_of(op), Convolution) for x in profile.layers for op in x.ops)
        return f"images have less than 2 x {SMALLEST_TILE} rows" if images else "there are no convolutions"
    return "the model has nothing that the devices divide" if name == "tensor" else "too few layers or samples"
