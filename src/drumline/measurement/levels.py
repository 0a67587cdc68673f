"""The two levels of links between ranks: inside a host, and between hosts. Each is measured on a group of its own. And
how many threads there are for a core, where control groups give out shares of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..comm.hosts import find_hosts, host_id, per_node
from ..comm.torchdist import TorchTransport
from ..core.errors import InputError
from .quota import quota


@dataclass(frozen=True, slots=True, eq=False)
class Levels:
    """Where this rank is."""

    hosts: int
    per_host: int
    inside: dist.ProcessGroup
    """The ranks of this host; all ranks where every host has one."""
    crowd: float = 1.0
    """Threads of ranks for each core that this rank's control group allows; 1 where there is one for each, or more."""

    def first(self, count: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """(the first ranks of this host, those of all hosts): groups that all ranks make, also those not in them."""
        firsts = [[host * self.per_host + i for i in range(count)] for host in range(self.hosts)]
        groups = [dist.new_group(ranks) for ranks in firsts]
        among = dist.new_group([rank for ranks in firsts for rank in ranks]) if self.hosts > 1 else groups[0]
        inside = groups[dist.get_rank() // self.per_host]
        assert inside is not None and among is not None
        return inside, among

    @property
    def near(self) -> tuple[int, int] | None:
        """Two ranks of one host, if there are."""
        return (0, 1) if self.per_host > 1 else None

    @property
    def far(self) -> tuple[int, int] | None:
        """Two ranks of different hosts, if there are."""
        return (0, self.per_host) if self.hosts > 1 else None


def find_levels() -> Levels:
    """Ask every rank for its host, and make the groups. All ranks call it."""
    world = dist.group.WORLD
    assert world is not None
    if dist.get_world_size() == 1:
        return Levels(1, 1, world, _crowd())
    hosts = find_hosts(TorchTransport())
    count = per_node(hosts)
    if count is None:
        sizes = ", ".join(str(len(ranks)) for ranks in hosts)
        raise InputError(
            f"hosts with {sizes} ranks, or ranks that are not numbered host by host",
            rule="a cluster has equally many devices in each node, numbered one after the other",
            fix="start the same number of ranks on every host, as torchrun does",
        )
    if len(hosts) == 1 or count == 1:
        return Levels(len(hosts), count, world, _crowd())
    groups = [dist.new_group(list(ranks)) for ranks in hosts]
    inside = groups[dist.get_rank() // count]
    assert inside is not None
    return Levels(len(hosts), count, inside, _crowd())


def _crowd() -> float:
    """All ranks call it: those of one control group have its share together. A GPU computes whatever its host may."""
    if torch.cuda.is_available():
        return 1.0
    share = quota()
    mine = (host_id(), share.group if share else "")
    every: list[tuple[str, str]] = [mine] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return max(1.0, every.count(mine) * torch.get_num_threads() / share.cores) if share else 1.0
