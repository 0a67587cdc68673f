"""How a plan divides what must be held and sent, in words with numbers: the trade that it makes."""

from __future__ import annotations

from ..clusters import Cluster
from ..core.units import format_bytes
from ..costs import Estimate
from ..costs.divide import divide
from ..costs.local import Talks
from ..models.profile import Layer, Profile
from ..plans import Plan


def how_it_shares(profile: Profile, plan: Plan, e: Estimate, cluster: Cluster) -> list[str]:
    """A sentence for each trade: what is sharded and when it travels, over whom, what is offloaded, what is cut."""
    return [
        *_divides(profile, plan, cluster),
        *_pipeline(plan, e, cluster),
        *_shards(profile, plan),
        *_hybrid(plan, cluster),
        *_host(plan, e),
        *_chunks(profile, plan),
    ]


def _divides(profile: Profile, plan: Plan, cluster: Cluster) -> list[str]:
    """What of a layer, or of a sample, a rank has."""
    found = []
    if plan.tp > 1:
        says = sum(len(t) * x.repeats for x, t in zip(*_talks(profile, plan), strict=True))
        found.append(
            f"{plan.tp} ranks, {_where(plan.tp, cluster)}, share the features of every layer: 1/{plan.tp} of its "
            f"products each, and {says} messages a micro-batch that nothing hides."
        )
    if plan.cp > 1:
        found.append(f"{plan.cp} ranks share the tokens of every sample; keys and values go round behind attention.")
    tiles = plan.tile[0] * plan.tile[1]
    if tiles > 1:
        found.append(f"{tiles} ranks share every image, and send each other its edges at every convolution.")
    return found


def _talks(profile: Profile, plan: Plan) -> tuple[tuple[Layer, ...], tuple[Talks, ...]]:
    local = divide(profile, plan)
    return local.profile.layers, local.talks


def _pipeline(plan: Plan, e: Estimate, cluster: Cluster) -> list[str]:
    """Who waits for whom, and what that costs."""
    if plan.pp == 1:
        return []
    apart = plan.ranks // plan.pp
    way = "inside a node" if plan.ranks <= cluster.node.devices else "over the network"
    return [
        f"{plan.pp} ranks, {apart} apart, have a stage each{f' of {plan.virtual} parts' if plan.virtual > 1 else ''} "
        f"and hand activations on {way}; with {plan.micro} micro-batches they idle "
        f"{100 * e.parts['bubble'] / e.step_seconds:.0f}% of the step."
    ]


def _where(ranks: int, cluster: Cluster) -> str:
    return "of one node" if ranks <= cluster.node.devices else f"of {-(-ranks // cluster.node.devices)} nodes"


def _shards(profile: Profile, plan: Plan) -> list[str]:
    """What is sharded, and how often it travels for that."""
    gradients = profile.trained * profile.parameter_bytes
    if plan.shards == 1:
        return []
    if plan.splits_model:
        what = "Optimizer state" if plan.zero == 1 else "Optimizer state and gradients"
        return [f"{what} of a rank's part of the model lies over {plan.shards} ranks."]
    lies = f"over {plan.shards} ranks"
    if plan.zero == 1:
        return [f"Optimizer state lies {lies}; gradients are held whole ({format_bytes(gradients)}) and reduced once."]
    saved = format_bytes(gradients - gradients / plan.shards)
    if plan.zero == 2:
        often = f"in each of {plan.micro} micro-batches instead of once" if plan.micro > 1 else "as they come"
        return [f"Optimizer state and gradients lie {lies}: {saved} less, and they are reduced {often}."]
    often = f", in each of {plan.micro} micro-batches" if plan.micro > 1 else ""
    return [f"All states lie {lies}; every layer is gathered for its forward and its backward{often}."]


def _hybrid(plan: Plan, cluster: Cluster) -> list[str]:
    """Over whom, when there are several sharded copies."""
    if plan.shards in (1, plan.dp):
        return []
    d = cluster.node.devices
    where = "inside a node" if plan.shards <= d else f"over {-(-plan.shards // d)} nodes"
    return [f"Each copy lies {where}; its {plan.dp // plan.shards} replicas then sum their shares of the gradients."]


def _host(plan: Plan, e: Estimate) -> list[str]:
    """What lies in host memory."""
    if not e.host_bytes:
        return []
    what = "all states" if plan.offload == "all" else "optimizer state"
    return [f"The host holds {what}: {format_bytes(e.host_bytes)} of its {format_bytes(e.host_limit)} a rank."]


def _chunks(profile: Profile, plan: Plan) -> list[str]:
    """What is gathered in parts."""
    if plan.chunk == 1:
        return []
    largest = max(x.largest for x in profile.layers) * profile.parameter_bytes
    return [f"The largest parameters, up to {format_bytes(largest)} each, are gathered in {plan.chunk} parts."]
