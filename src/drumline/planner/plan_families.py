"""Families of plans: the best of each, and by how much it loses."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import ConfigDict

from ..clusters import Cluster
from ..costs import Estimate
from ..costs.rank_model import tokens_of
from ..models.op_shapes import ConvolutionShape, shape_of
from ..models.profile import Profile
from ..plans import Plan
from ..plans.precision_conflicts import combines
from .objectives import Scored
from .space import MIN_TILE, MIN_TOKENS

FAMILIES = {
    "one device": "a single rank",
    "data": "whole replicas (zero=0)",
    "sharded": "replicas that shard their states (zero=1, 2, 3)",
    "offload": "states in host memory",
    "chunk": "the largest layers in chunks",
    "tensor": "features of a layer over ranks (tp)",
    "pipeline": "layers over ranks (pp)",
    "context": "tokens over ranks (cp)",
    "tiles": "tiles of an image over ranks (tile)",
    "asynchronous": "replicas that do not wait for each other (sync)",
}
"""Every family, and how its plans use ranks."""


@dataclass(frozen=True, slots=True)
class PlanFamily:
    """The best plan of a family, compared with the winner."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    name: str
    plan: str
    """Empty where there is no such plan: `reason` says why."""
    step_seconds: float
    memory_bytes: float
    fits: bool
    slower: float
    """Step time over the winner's, less 1; 0 for the winner."""
    lacks_bytes: float
    """Bytes beyond the memory of the device or its host; 0 where it fits."""
    reason: str
    wins_if: tuple[str, ...] = ()
    """Changes that would make it the fastest, such as `if the link between nodes is slower than 30 GB/s`."""

    @property
    def won(self) -> bool:
        """Whether the best plan belongs to this family."""
        return self.fits and self.slower == 0.0


def families_of(plan: Plan) -> tuple[str, ...]:
    """Families that a plan belongs to: one, or several where it combines them."""
    if plan.sync != "allreduce":
        return ("asynchronous",)
    belongs = {
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
    return tuple(name for name, yes in belongs.items() if yes)


def best_of_each(ranked: list[Scored]) -> dict[str, Scored]:
    """The first plan of each family in a list that is sorted, best first."""
    best: dict[str, Scored] = {}
    for plan, e in ranked:
        for name in families_of(plan):
            best.setdefault(name, (plan, e))
    return best


def compare(name: str, plan: Plan, e: Estimate, best: Estimate, reason: str, wins_if: tuple[str, ...]) -> PlanFamily:
    """The best of a family against the winner."""
    slower = 0.0 if e is best else e.step_seconds / best.step_seconds - 1
    return PlanFamily(name, str(plan), e.step_seconds, e.memory_bytes, e.fits, slower, e.lacks[1], reason, wins_if)


_KEY_OF = {"offload": "offload", "chunk": "chunk", "tensor": "tp", "pipeline": "pp", "context": "cp", "tiles": "tile"}
"""The key that makes a plan one of a family."""


def absent(
    name: str, profile: Profile, cluster: Cluster, *, allow_stale: bool = False, precision: str = "fp32"
) -> PlanFamily:
    """A family without candidates, and why."""
    if not combines(_KEY_OF.get(name, "dp"), precision):
        why = f"not tested with precision={precision}"
        return PlanFamily(name, "", 0.0, 0.0, False, 0.0, 0.0, why)
    return PlanFamily(name, "", 0.0, 0.0, False, 0.0, 0.0, why_absent(name, profile, cluster, allow_stale=allow_stale))


def why_absent(name: str, profile: Profile, cluster: Cluster, *, allow_stale: bool = False) -> str:
    """Why a family has no candidates."""
    device = cluster.device
    if name == "asynchronous" and not allow_stale:
        return "approximate: only with --allow-stale"
    if name == "offload":
        if device.kind != "cuda":
            return "a CPU already keeps everything in host memory"
        return (
            "the host is not described (device.host)" if device.host is None else "plans that fit without it are faster"
        )
    if name == "chunk":
        return "no plan needs it, or it does not help"
    if name == "one device":
        return "not tried: more devices share its work"
    if cluster.devices == 1:
        return "there is only one device"
    if name in ("tensor", "pipeline", "context") and any(x.experts for x in profile.layers):
        return "a split model runs as a captured graph, which cannot route tokens to experts"
    if name in ("data", "sharded"):
        return f"batch size {profile.batch_size}: no sample for a second replica"
    if name == "asynchronous":
        return "no such plan fits"
    if name == "context":
        tokens = tokens_of(profile)
        short = f"{tokens} tokens per sample < 2 x {MIN_TOKENS}"
        return short if tokens else "samples are not sequences of tokens"
    if name == "tiles":
        images = any(isinstance(shape_of(op), ConvolutionShape) for x in profile.layers for op in x.ops)
        return f"images have fewer than 2 x {MIN_TILE} rows" if images else "the model has no convolutions"
    return "the model has nothing that tp can divide" if name == "tensor" else "too few layers or samples"
