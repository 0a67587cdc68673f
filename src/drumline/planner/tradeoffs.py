"""The trade-offs of a plan in sentences: what it shards and splits, over which ranks, and what that costs."""

from __future__ import annotations

from ..clusters import Cluster
from ..core.units import format_bytes
from ..costs import Estimate
from ..costs.model_split import split_model
from ..models.profile import Profile
from ..plans import Plan


def describe_tradeoffs(profile: Profile, plan: Plan, e: Estimate, cluster: Cluster) -> list[str]:
    """One sentence per trade-off."""
    return [
        *_split_layers(profile, plan, cluster),
        *_pipeline(plan, e, cluster),
        *_sharding(profile, plan),
        *_hybrid_sharding(plan, cluster),
        *_offload(plan, e),
        *_chunks(profile, plan),
    ]


def _split_layers(profile: Profile, plan: Plan, cluster: Cluster) -> list[str]:
    """Layers and samples that ranks share."""
    lines = []
    if plan.tp > 1:
        local = split_model(profile, plan)
        count = sum(len(m) * x.repeats for x, m in zip(local.profile.layers, local.messages, strict=True))
        lines.append(
            f"Tensor parallelism splits every layer over {plan.tp} ranks {_where(plan.tp, cluster)}: each computes "
            f"1/{plan.tp} of its matmuls, at the price of {count} exposed messages per micro-batch."
        )
    if plan.cp > 1:
        lines.append(
            f"Context parallelism splits every sequence over {plan.cp} ranks; keys and values are passed around behind "
            "attention."
        )
    tiles = plan.tile[0] * plan.tile[1]
    if tiles > 1:
        lines.append(f"Every image is split over {tiles} ranks, which exchange edges at every convolution.")
    return lines


def _pipeline(plan: Plan, e: Estimate, cluster: Cluster) -> list[str]:
    """Pipeline stages, and their bubble."""
    if plan.pp == 1:
        return []
    virtual = f", {plan.virtual} stages per rank," if plan.virtual > 1 else ""
    link = "inside a node" if plan.ranks <= cluster.node.devices else "over the network"
    return [
        f"A pipeline of {plan.pp} ranks{virtual} sends activations {link}; with {plan.micro} micro-batches the bubble "
        f"is {100 * e.parts['bubble'] / e.step_seconds:.0f}% of the step."
    ]


def _where(ranks: int, cluster: Cluster) -> str:
    return "of one node" if ranks <= cluster.node.devices else f"of {-(-ranks // cluster.node.devices)} nodes"


def _sharding(profile: Profile, plan: Plan) -> list[str]:
    """Sharded states, and how often they are communicated."""
    if plan.shards == 1:
        return []
    if plan.splits_model:
        what = "Optimizer state" if plan.zero == 1 else "Optimizer state and gradients"
        verb = "is" if plan.zero == 1 else "are"
        return [f"{what} of a rank's part of the model {verb} sharded over {plan.shards} ranks."]
    gradients = profile.trained * profile.parameter_bytes
    over = f"sharded over {plan.shards} ranks"
    if plan.zero == 1:
        return [
            f"Optimizer state is {over}; every rank keeps all gradients ({format_bytes(gradients)}), which are reduced "
            "once per step."
        ]
    saved = format_bytes(gradients - gradients / plan.shards)
    if plan.zero == 2:
        when = f"in each of {plan.micro} micro-batches instead of once" if plan.micro > 1 else "as they are computed"
        return [f"Optimizer state and gradients are {over}: this saves {saved}, and gradients are reduced {when}."]
    when = f", in each of {plan.micro} micro-batches" if plan.micro > 1 else ""
    return [f"All model states are {over}; every layer is gathered for its forward and its backward{when}."]


def _hybrid_sharding(plan: Plan, cluster: Cluster) -> list[str]:
    """Several sharded copies."""
    if plan.shards in (1, plan.dp):
        return []
    d = cluster.node.devices
    where = "inside a node" if plan.shards <= d else f"over {-(-plan.shards // d)} nodes"
    return [
        f"Each copy is sharded {where}; the {plan.dp // plan.shards} copies then reduce their shards of the gradients."
    ]


def _offload(plan: Plan, e: Estimate) -> list[str]:
    """States in host memory."""
    if not e.host_bytes:
        return []
    if plan.has_coordinator:
        return [f"Its servers need {format_bytes(e.host_bytes)} of {format_bytes(e.host_limit)} on a host."]
    what = "all model states" if plan.offload == "all" else "optimizer state"
    return [f"Host memory holds {what}: {format_bytes(e.host_bytes)} of {format_bytes(e.host_limit)} per rank."]


def _chunks(profile: Profile, plan: Plan) -> list[str]:
    """Layers that are gathered in chunks."""
    if plan.chunk == 1:
        return []
    largest = max(x.largest for x in profile.layers) * profile.parameter_bytes
    return [f"The largest parameters, up to {format_bytes(largest)} each, are gathered in {plan.chunk} chunks."]
