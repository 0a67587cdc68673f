"""The program of a rank under mpiexec: runs checks by name and writes `ok` or a traceback to a file of the rank."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

import comm_contract as contract
import endpoint_contract
import mpi_group_checks
import psutil
import torch
import torch.distributed as dist

from drumline.comm import Communicator
from drumline.comm.environment import connect, disconnect, rank_info
from drumline.comm.mpi.collectives import SMALL, MpiCollectives, can_reduce
from drumline.comm.mpi.endpoint import EAGER, MpiEndpoint
from drumline.comm.mpi.transport import MpiTransport
from drumline.comm.mpi.world import world
from drumline.core.errors import GaveUp, InputError


def the_contract() -> None:
    comm = Communicator(MpiTransport(timeout=60))
    for check in contract.CHECKS:
        check(comm)


def tags_of_31_bits() -> None:
    """The highest tag is distinct from tag 0 and its neighbours; one more is refused."""
    transport = MpiTransport(timeout=20)
    tags = (0, 1, 2**29 - 1, 2**29, 2**30, 2**31 - 1)
    after, before = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    received = {tag: torch.zeros(1, dtype=torch.int64) for tag in tags}
    pending = [transport.receive(received[tag], before, tag) for tag in reversed(tags)]
    pending += [transport.send(torch.tensor([tag]), after, tag) for tag in tags]
    for one in pending:
        one.wait()
    assert {tag: int(t) for tag, t in received.items()} == {tag: tag for tag in tags}
    for tag in (-1, 2**31):
        try:
            transport.send(torch.zeros(1), after, tag)
        except InputError as e:
            assert str(e) == f"tag {tag}\n  rule:  0 <= tag < 2^31"
        else:
            raise AssertionError(f"tag {tag} was taken")


def every_type() -> None:
    transport = MpiTransport(timeout=20)
    peer = transport.rank ^ 1
    if peer >= transport.size:
        return
    types = (torch.bfloat16, torch.float16, torch.bool, torch.int8, torch.complex128, torch.float8_e5m2)
    for tag, dtype in enumerate(types):
        sent = torch.arange(24).remainder(2 if dtype == torch.bool else 24).to(dtype)
        got = torch.zeros(24, dtype=dtype)
        pending = transport.receive(got, peer, tag), transport.send(sent, peer, tag)
        for one in pending:
            one.wait()
        assert bytes(got.view(torch.uint8).tolist()) == bytes(sent.view(torch.uint8).tolist()), dtype


def a_size_that_is_wrong() -> None:
    transport = MpiTransport(timeout=20)
    after, before = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    cases = [(3, "8 bytes were received, 12 expected")]
    if transport.size > 1:
        cases.append((1, "runcate"))  # Open MPI reports no error for messages to the own rank
    for n, words in cases:
        pending = transport.receive(torch.zeros(n), before, 7)
        sent = transport.send(torch.zeros(2), after, 7)
        try:
            pending.wait()
        except GaveUp as e:
            assert e.what == f"rank {transport.rank} could not receive from rank {before}"
            assert words in e.rule.replace("TRUNCATE", "truncate"), e.rule
        else:
            raise AssertionError(f"{n} elements took 2")
        sent.wait()


def a_missing_message_times_out() -> None:
    transport = MpiTransport(timeout=0.3)
    try:
        transport.receive(torch.zeros(2), (transport.rank + 1) % transport.size, 5).wait()
    except GaveUp as e:
        assert e.rule == "nothing happened for 0.3 s"
    else:
        raise AssertionError("something came")
    world().Barrier()


def own_collectives() -> None:
    """MPI's collectives against plain computation, below and above the size where the method changes."""
    own = MpiCollectives(timeout=60)
    p, r = own.size, own.rank
    for n in (3, SMALL):  # elements: the second is large in every type
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.uint16):
            inputs = [(torch.arange(p * n) % 5 + rank).to(dtype) for rank in range(p)]
            mine = inputs[r].clone()
            own.all_reduce(mine, "sum")
            expected = torch.stack([x.to(torch.complex128) for x in inputs]).sum(0)
            assert torch.equal(mine.to(torch.complex128), expected), (dtype, n)
            share = torch.empty(n, dtype=dtype)
            own.reduce_scatter(inputs[r], share, "sum")
            assert torch.equal(share, mine[r * n : (r + 1) * n])
            for root in {0, p - 1}:
                result = torch.empty_like(mine) if r == root else None
                own.reduce(inputs[r], result, "sum", root)
                assert result is None or torch.equal(result, mine)
                copy = inputs[r].clone()
                own.broadcast(copy, root)
                assert torch.equal(copy, inputs[root])
                table = torch.empty(p * p * n, dtype=dtype) if r == root else None
                own.gather(inputs[r], table, root)
                assert table is None or torch.equal(table, torch.cat(inputs))
                own.scatter(inputs[r] if r == root else None, share, root)
                assert torch.equal(share, inputs[root][r * n : (r + 1) * n])
            table = torch.empty(p * p * n, dtype=dtype)
            own.all_gather(inputs[r], table)
            assert torch.equal(table, torch.cat(inputs))
            blocks = torch.empty_like(mine)
            own.all_to_all(inputs[r], blocks)
            assert torch.equal(blocks, torch.cat([x[r * n : (r + 1) * n] for x in inputs]))
            own.scan(inputs[r], blocks, "sum")
            assert torch.equal(
                blocks.to(torch.complex128), torch.stack([x.to(torch.complex128) for x in inputs[: r + 1]]).sum(0)
            )
    sent, received = [r + 1] * p, list(range(1, p + 1))
    got = torch.empty(sum(received), dtype=torch.int16)
    own.all_to_allv(torch.full((sum(sent),), r, dtype=torch.int16), sent, got, received)
    assert got.tolist() == [src for src in range(p) for _ in range(src + 1)]
    assert own.all_gather_bytes(b"%016d" % r) == [b"%016d" % i for i in range(p)]
    truth = torch.tensor([r == 0, True, False])
    own.all_reduce(truth, "sum")
    assert truth.tolist() == [True, True, False]
    mean = torch.tensor([float(r)])
    own.all_reduce(mean, "avg")
    assert mean.item() == (p - 1) / 2
    assert not can_reduce("max", torch.complex64)
    assert not can_reduce("sum", torch.float8_e5m2)
    assert not can_reduce("avg", torch.int64)
    own.barrier()


class FrameReceiver:
    """Records incoming frames."""

    def __init__(self) -> None:
        self.frames: list[tuple[int, bytes, bytes]] = []

    def begin(self, src: int, head: bytes, size: int) -> memoryview:
        return memoryview(bytearray(size))

    def end(self, src: int, head: bytes, body: memoryview) -> None:
        self.frames.append((src, head, bytes(body)))


def frames_in_order() -> None:
    """Short and long frames, from every rank to every rank: in order from each sender."""
    endpoint = MpiEndpoint()
    desk = endpoint.receiver = FrameReceiver()
    sizes = (0, 1, EAGER, EAGER + 1, 5, 300_000, 3, 200_000, 1_000_000, 0, EAGER)
    sent = []
    for i, size in enumerate(sizes):
        for dst in range(endpoint.size):
            body = memoryview(bytearray([endpoint.rank + i]) * size)
            sent.append(endpoint.put(dst, b"head %d %d" % (endpoint.rank, i), body))
    while len(desk.frames) < len(sizes) * endpoint.size or not all(s.done for s in sent):
        assert endpoint.progress(20.0), "nothing moves"
    for src in range(endpoint.size):
        mine = [(head, body) for s, head, body in desk.frames if s == src]
        assert mine == [(b"head %d %d" % (src, i), bytes([src + i]) * size) for i, size in enumerate(sizes)]
    world().Barrier()
    assert not endpoint.progress(0.05)
    endpoint.close()


def the_contract_of_endpoints() -> None:
    for check in endpoint_contract.CHECKS:
        endpoint = MpiEndpoint()
        check(endpoint)
        endpoint.close()


def listening() -> set[tuple[str, int]]:
    """(address, port) of every listening socket of this process."""
    world()
    return {tuple(c.laddr) for c in psutil.Process().net_connections("inet") if c.status == "LISTEN"}


def peers_are_found() -> None:
    """connect() without any variables; the store listens on this host only."""
    assert "MASTER_ADDR" not in os.environ
    before = listening()  # Open MPI has its own sockets
    where = connect(timeout=60)
    total = torch.tensor([float(where.rank)])
    dist.all_reduce(total)
    assert total.item() == sum(range(where.size))
    if where.size > 1:
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
        assert {address for address, _ in listening() - before} <= {"127.0.0.1"}
        assert where.rank > 0 or listening() > before
    disconnect()


def peers_of_other_hosts_are_found() -> None:
    """As above, but every rank pretends to be on its own host: the store is reached by this machine's address."""
    from drumline.comm.mpi import rendezvous

    rendezvous.host_digest = lambda: bytes([rank_info().rank]) * 16
    where = connect(timeout=60)
    assert os.environ["GLOO_SOCKET_IFNAME"] != "lo" or where.size == 1
    total = torch.tensor([1])
    dist.all_reduce(total)
    assert total.item() == where.size
    disconnect()


CHECKS = {
    check.__name__: check
    for check in (
        the_contract,
        tags_of_31_bits,
        every_type,
        a_size_that_is_wrong,
        a_missing_message_times_out,
        frames_in_order,
        own_collectives,
        the_contract_of_endpoints,
        peers_are_found,
        peers_of_other_hosts_are_found,
        *mpi_group_checks.CHECKS,
    )
}


def main() -> None:
    folder, *names = sys.argv[1:]
    torch.set_num_threads(1)
    results = {}
    for name in names:
        try:
            CHECKS[name]()
            results[name] = "ok"
        except BaseException:
            results[name] = traceback.format_exc()
            break  # the ranks may be out of step
    Path(folder, f"{rank_info().rank}.json").write_text(json.dumps(results))
    if any(text != "ok" for text in results.values()):
        world().Abort(1)


if __name__ == "__main__":
    main()
