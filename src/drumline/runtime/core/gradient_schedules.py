"""Chooses what carries the gradients of a plan between its ranks: the backend's collectives, or schedules."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ...comm.gloo_fallbacks import backend_of
from ...comm.hosts import Hosts, per_node
from ...core.errors import PlanError
from ...plans import Plan
from ...schedules import NATIVE
from ..state.group_transports import hosts_along, transport_along
from ..strategies.gradient_collectives import GradientCollectives, ScheduledCollectives


def gradient_schedules(plan: Plan, shape: Sequence[int], dim: int, device: torch.device) -> GradientCollectives | None:
    """The schedules of `allreduce` over the ranks along one dim of all ranks in `shape`; None: the backend's own.

    A dry run records one message for each collective, whatever carries it. All ranks call this together.
    """
    if plan.allreduce == NATIVE or shape[dim] == 1 or plan.compress != "none":
        return None
    if getattr(dist.group.WORLD, "only_records", False):  # a dry run
        return None
    if device.type == "cuda":
        if plan.allreduce != "auto":
            raise PlanError(
                f"allreduce={plan.allreduce} on GPUs",
                where=f"plan {plan}",
                rule="gradients of GPUs travel by NCCL, which chooses its algorithm itself",
                fix="allreduce=auto; the variable NCCL_ALGO selects an algorithm of NCCL",
            )
        return None
    by_host = hosts_along(shape, dim)
    algorithm = _automatic(plan, by_host) if plan.allreduce == "auto" else plan.allreduce
    if algorithm == NATIVE:
        return None
    _check_hosts(plan, algorithm, by_host)
    return ScheduledCollectives(transport_along(shape, dim), algorithm)


def _automatic(plan: Plan, by_host: Hosts) -> str:
    """Between hosts of several ranks fewer bytes cross the network if each host sums first."""
    equal = per_node(by_host) is not None and len(by_host[0]) > 1
    return "hierarchical" if len(by_host) > 1 and equal and backend_of(None) == "gloo" else NATIVE


def _check_hosts(plan: Plan, algorithm: str, by_host: Hosts) -> None:
    """Refuse a hierarchy of hosts that the schedule does not know, instead of a ring in its place."""
    if algorithm != "hierarchical" or len(by_host) == 1:
        return
    if per_node(by_host) is None:
        raise PlanError(
            f"allreduce=hierarchical over hosts of {', '.join(str(len(host)) for host in by_host)} ranks",
            where=f"plan {plan}",
            rule="all hosts have equally many ranks, numbered host by host",
            fix="start as many ranks on each host, or allreduce=ring",
        )
    if backend_of(None) != "gloo":
        raise PlanError(
            f"allreduce=hierarchical between hosts over {backend_of(None)}",
            where=f"plan {plan}",
            rule="shared memory inside a host and gloo between hosts carry it",
            fix="backend=gloo, or allreduce=native",
        )
