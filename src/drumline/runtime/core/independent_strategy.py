"""Chooses the strategy of a plan whose replicas take optimizer steps by themselves, and its process groups."""

from __future__ import annotations

import torch.distributed as dist

from ...comm.hosts import Hosts
from ...core.job import Job
from ...plans import Plan
from ..state.group_transports import hosts_along
from ..state.process_groups import process_group
from ..strategies.gossip import Gossip
from ..strategies.independent import IndependentReplica
from ..strategies.local_sgd import LocalSgd


def independent_strategy(job: Job, plan: Plan, group: dist.ProcessGroup) -> IndependentReplica:
    """The strategy of `sync=local:k` or `sync=gossip`. All ranks call this together."""
    if plan.sync_mode == "gossip":
        return Gossip(group, seed=job.seed if plan.sync == "gossip:random" else None)
    return LocalSgd(group, plan, _host_group(rank_hosts(plan.dp)) if plan.across else None)


def rank_hosts(ranks: int) -> Hosts:
    """All ranks by host; a dry run has one."""
    if getattr(dist.group.WORLD, "only_records", False):
        return (tuple(range(ranks)),)
    return hosts_along((ranks,), 0)


def _host_group(hosts: Hosts) -> dist.ProcessGroup | None:
    """The group of this rank's host; None if there is one host. Groups of all hosts are created by all ranks."""
    if len(hosts) == 1:
        return None
    groups = [process_group(ranks, use="averages inside a host") for ranks in hosts]
    return next(group for group, ranks in zip(groups, hosts, strict=True) if dist.get_rank() in ranks)
