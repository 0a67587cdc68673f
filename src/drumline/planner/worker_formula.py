"""The formula of a step whose replicas do not meet (`sync`), with its values: what is waited for, sent and updated."""

from __future__ import annotations

from ..clusters import Cluster
from ..core.units import format_bytes, format_seconds
from ..costs import Estimate, cost_model
from ..costs.worker_times import WorkerTimes
from ..models.profile import Profile
from ..plans import Plan

FormulaText = tuple[str, str, float]
"""Name, formula with numbers, seconds."""


def worker_terms(profile: Profile, plan: Plan, e: Estimate, cluster: Cluster) -> list[FormulaText]:
    """The parts of the step but its passes, then one worker's messages and the servers' work."""
    t = cost_model(profile, cluster, plan.precision).worker_times(plan)
    terms = [(k, _part(k, plan, t, cluster), v) for k, v in e.parts.items() if v and k not in ("forward", "backward")]
    if plan.has_coordinator:
        terms += _servers(plan, t)
    if t.averaging.inside:
        size = format_bytes(t.averaging.bytes)
        where = "inside a host" if plan.across else "with the neighbours" if plan.sync_mode == "gossip" else "over all"
        terms.append(("average", f"{size} {where}", t.averaging.inside))
    if t.averaging.across:
        terms.append(("average over all hosts", f"{format_bytes(t.averaging.bytes)}", t.averaging.across))
    return terms


def _part(part: str, plan: Plan, t: WorkerTimes, cluster: Cluster) -> str:
    batches, k = plan.slices == 1 and plan.has_coordinator, plan.sync_steps
    if part == "communication" and plan.sync_mode == "local":
        return f"one average in {k} steps" + (f", over all hosts in {plan.across}" if plan.across else "")
    over = f" / {plan.dp} workers" if batches else ""
    text = {
        "communication": f"(ask + pull + push){over}, ports shared by workers that talk at the same time"
        if plan.has_coordinator
        else "exchange with the neighbours after every step",
        "waiting": f"for slower ranks ({cluster.step_times})" if not batches else "for busy servers",
        "optimizer": "gradients added and updated on the servers" if t.update else "on every replica",
        "overhead": "between two tasks",
        "recompute": f"the forward of what was not kept (recompute={plan.recompute})",
    }
    return text.get(part, "") + (over if part != "communication" else "")


def _servers(plan: Plan, t: WorkerTimes) -> list[FormulaText]:
    terms = [("ask", "a request for a task, there and back", t.ask)]
    if not t.update:
        return terms
    size, n = format_bytes(t.message_bytes), plan.servers
    shared = f"{size} to {n} server{'s' if n > 1 else ''}, alone; {format_seconds(t.push.service)} of a server's port"
    return [
        *terms,
        ("pull", shared.replace(" to ", " from "), t.pull.alone),
        ("push", shared, t.push.alone),
        ("update", f"the optimizer on 1/{n} of the parameters", t.update),
    ]
