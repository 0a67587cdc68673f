"""Which ranks share a host, and the two-level transport: the contract over two gloo groups, as if on two hosts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import comm_contract as contract
import pytest
import torch
import torch.distributed as dist

from drumline.comm import Communicator, ThreadTransport, TorchTransport, Transport, run_threads
from drumline.comm.hosts import Hosts, HostTransport, find_hosts, host_digest, host_id, hosts, per_node
from drumline.core.errors import InputError
from drumline.plans.engine_constants import HOST_SEGMENT_BYTES
from drumline.runtime.state.process_groups import process_group


@pytest.mark.parametrize(
    ("ids", "groups", "nodes"),
    [
        ("a", ((0,),), 1),
        ("aaaa", ((0, 1, 2, 3),), 4),
        ("aabb", ((0, 1), (2, 3)), 2),
        ("abab", ((0, 2), (1, 3)), None),
        ("aab", ((0, 1), (2,)), None),
        ("abb", ((0,), (1, 2)), None),
        ("abc", ((0,), (1,), (2,)), 1),
        ("abba", ((0, 3), (1, 2)), None),
    ],
)
def test_ranks_by_host(ids: str, groups: Hosts, nodes: int | None) -> None:
    assert hosts(ids) == groups
    assert per_node(groups) == nodes


def test_the_same_process_is_the_same_host() -> None:
    assert host_id() == host_id()
    assert len(host_digest()) == 16
    assert host_id().count("|") == 3


class Counted(Transport):
    """A transport that counts its sends."""

    def __init__(self, inner: Transport) -> None:
        self.inner, self.sent = inner, 0

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def size(self) -> int:
        return self.inner.size

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> Any:
        self.sent += 1
        return self.inner.send(tensor, dst, tag)

    def receive(self, tensor: torch.Tensor, src: int, tag: int) -> Any:
        return self.inner.receive(tensor, src, tag)


def over_two_transports(ids: str) -> None:
    """On a rank: the contract, and each message on the right transport."""
    across = Counted(TorchTransport())
    assert find_hosts(across) == (tuple(range(across.size)),)
    groups = hosts(ids)
    made = [process_group(group) for group in groups]
    mine = next(i for i, group in enumerate(groups) if dist.get_rank() in group)
    inside = Counted(TorchTransport(made[mine]))
    transport = HostTransport(inside, across, groups)
    assert (transport.name, transport.per_node) == ("+", per_node(groups))  # the counting transport has no name
    transport.per_node = None  # the contract counts the traffic of one host
    comm = Communicator(transport)
    for check in contract.CHECKS:
        check(comm)
    before = inside.sent, across.sent
    for peer in range(comm.size):
        if peer != comm.rank:
            pending = transport.receive(torch.zeros(1), peer, 0), transport.send(torch.ones(1), peer, 0)
            for one in pending:
                one.wait()
    assert inside.sent - before[0] == len(groups[mine]) - 1
    assert across.sent - before[1] == comm.size - len(groups[mine])
    with pytest.raises(InputError, match="inside are the ranks of its host, in order"):
        HostTransport(across, across, groups)
    with pytest.raises(InputError, match="each of . ranks is on one host"):
        HostTransport(inside, across, groups[:mine] + groups[mine + 1 :])


@pytest.mark.parametrize("ids", ["aab", "abab"])
def test_contract_over_two_transports(world: Callable[[int], Any], ids: str) -> None:
    world(len(ids)).run(over_two_transports, ids)


def with_rails(ids: str) -> None:
    """On a rank: the native all-reduce, at sizes that divide and that do not, and unsupported operators."""
    groups = hosts(ids)
    inner = [process_group(group) for group in groups]
    rails = [process_group(ranks) for ranks in zip(*groups, strict=True)]
    mine = next(group for group in groups if dist.get_rank() in group)
    inside = TorchTransport(inner[groups.index(mine)])
    rail = TorchTransport(rails[mine.index(dist.get_rank())])
    comm = Communicator(HostTransport(inside, TorchTransport(), groups, rail=rail))
    for n in (0, 1, 2, 3, 1000, HOST_SEGMENT_BYTES // 4 + 3, HOST_SEGMENT_BYTES):
        values = [(torch.arange(n) % 7 + r).float() for r in range(comm.size)]
        for op, expected in (("sum", sum(values)), ("max", values[-1]), ("avg", sum(values) / comm.size)):
            result = comm.all_reduce(values[comm.rank].clone(), op=op, algorithm="native")
            assert torch.equal(result, expected), (n, op)
    before = torch.tensor([True, comm.rank == 0, False])
    with pytest.raises(InputError, match="native all_reduce"):
        comm.all_reduce(before, op="lxor", algorithm="native")
    assert before.tolist() == [True, comm.rank == 0, False]
    with pytest.raises(InputError, match="on it are the ranks of number . in their hosts"):
        HostTransport(inside, TorchTransport(), groups, rail=TorchTransport())


def test_native_all_reduce(world: Callable[[int], Any]) -> None:
    world(4).run(with_rails, "aabb")
    world(4).run(with_rails, "abab")


def test_find_hosts() -> None:
    assert run_threads(_ask, 3) == [((0, 1, 2),)] * 3


def _ask(transport: ThreadTransport) -> Hosts:
    return find_hosts(transport)
