"""How a plan divides what must be held and sent, in words with numbers: the trade that it makes."""

from __future__ import annotations

from ..cluster import Cluster
from ..cost import Estimate
from ..model.profile import Profile
from ..plan import Plan
from ..units import format_bytes


def how_it_shares(profile: Profile, plan: Plan, e: Estimate, cluster: Cluster) -> list[str]:
    """A sentence for each trade: what is sharded and when it travels, over whom, what is offloaded, what is cut."""
    return [*_shards(profile, plan), *_hybrid(plan, cluster), *_host(plan, e), *_chunks(profile, plan)]


def _shards(profile: Profile, plan: Plan) -> list[str]:
    """What is sharded, and how often it travels for that."""
    gradients = profile.trained * profile.parameter_bytes
    if plan.shards == 1:
        return []
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
