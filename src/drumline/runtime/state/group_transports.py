"""Transports between the ranks of a process group, for schedules: shared memory on one host, the backend's messages
otherwise, and both where ranks are on several hosts.

Groups are created for the transports alone, so that their messages meet no others. All ranks of the world call these
functions together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ...comm import ShmTransport, TorchTransport, Transport
from ...comm.gloo_fallbacks import backend_of
from ...comm.hosts import Hosts, HostTransport, host_digest, hosts
from .process_groups import cached, process_group, rows_along

_USE = "gradients"


def hosts_along(shape: Sequence[int], dim: int) -> Hosts:
    """The ranks of this rank's group along one dim of all ranks in `shape`, by host, numbered as in the group."""
    return _hosts_of(_own_row(shape, dim))


def transport_along(shape: Sequence[int], dim: int) -> Transport:
    """A transport between the ranks that differ from this one along one dim; cached with the world."""
    return cached(("transport", tuple(shape), dim), lambda: _transport(rows_along(shape, dim), _own_row(shape, dim)))


def _own_row(shape: Sequence[int], dim: int) -> list[int]:
    return next(row for row in rows_along(shape, dim) if dist.get_rank() in row)


def _transport(rows: Sequence[Sequence[int]], mine: Sequence[int]) -> Transport:
    groups = {tuple(row): process_group(row, use=_USE) for row in rows}
    inside: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
    rails: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
    for row in rows:
        by_host = _hosts_of(row)
        if len(by_host) > 1:
            for host in by_host:
                ranks = tuple(row[i] for i in host)
                inside[ranks] = process_group(ranks, use=f"{_USE} inside a host")
            if len({len(host) for host in by_host}) == 1:
                for rail in zip(*by_host, strict=True):
                    ranks = tuple(row[i] for i in rail)
                    rails[ranks] = process_group(ranks, use=f"{_USE} across hosts")
    group, by_host = groups[tuple(mine)], _hosts_of(mine)
    if len(by_host) == 1:
        return ShmTransport.over(group) if backend_of(group) == "shm" else TorchTransport(group)
    here = next(ranks for ranks in inside if dist.get_rank() in ranks)
    rail_ranks = next((ranks for ranks in rails if dist.get_rank() in ranks), None)
    rail_transport = TorchTransport(rails[rail_ranks]) if rail_ranks else None
    return HostTransport(ShmTransport.over(inside[here]), TorchTransport(group), by_host, rail=rail_transport)


def _hosts_of(row: Sequence[int]) -> Hosts:
    """The ranks of a group by host, numbered as in the group."""
    if backend_of(None) == "shm":
        return (tuple(range(len(row))),)  # its ranks share a host, or they could not have met
    digests = cached("host digests", _digests)
    return hosts([digests[rank] for rank in row])


def _digests() -> list[bytes]:
    """The digest of every rank's host."""
    mine = torch.frombuffer(bytearray(host_digest()), dtype=torch.uint8)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine)
    return [bytes(row.tolist()) for row in rows]
