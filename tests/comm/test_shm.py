"""Shared memory: the contracts of torch groups, endpoints and communicators, and failures."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
import warnings

import comm_contract
import endpoint_contract
import group_contract
import psutil
import pytest
import torch
import torch.distributed as dist
from world import World

from drumline.comm import Communicator, ShmTransport
from drumline.comm.shm import ShmBackend, ShmEndpoint
from drumline.core.errors import GaveUp, InputError

_made: dict[str, object] = {}


def group_of(native: str = "1") -> dist.ProcessGroup:
    """The shm group of this rank, made once."""
    name = f"group {native}"
    if name not in _made:
        os.environ["DRUMLINE_NATIVE"] = native
        from drumline.comm.shm import native as module

        module.load.cache_clear()
        _made[name] = dist.new_group(backend="shm", timeout=group_contract.TIMEOUT)
        del os.environ["DRUMLINE_NATIVE"]
        module.load.cache_clear()
    return _made[name]


def group_checks(native: str, *names: str) -> None:
    group = group_of(native)
    kind = type(group._backend.core).__name__
    assert kind == ("NativeCore" if native == "1" else "PythonCore")
    for check in group_contract.CHECKS:
        if not names or check.__name__ in names:
            check(group)


@pytest.mark.alone  # one check of the contract measures time
@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_a_torch_group_keeps_the_contract(world, p: int) -> None:
    world(p).run(group_checks, "1")


@pytest.mark.alone
@pytest.mark.parametrize("p", [2, 3])
def test_without_a_compiler_python_keeps_it_too(world, p: int) -> None:
    names = [c.__name__ for c in group_contract.CHECKS if c is not group_contract.operators]
    world(p).run(group_checks, "0", *names)


def transport_of(name: str) -> ShmTransport:
    if name not in _made:
        _made[name] = ShmTransport.over()
    return _made[name]


def endpoint_checks() -> None:
    engine: ShmBackend = transport_of("posts")._backend
    for check in endpoint_contract.CHECKS:
        check(ShmEndpoint(engine.core))
        dist.barrier()  # a fast rank's next frames are for the next check


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_an_endpoint_keeps_the_contract(world, p: int) -> None:
    world(p).run(endpoint_checks)


def communicator_checks(*names: str) -> None:
    comm = Communicator(transport_of("communicator"))
    for check in comm_contract.CHECKS:
        if not names or check.__name__ in names:
            check(comm)


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_a_communicator_keeps_the_contract(world, p: int) -> None:
    world(p).run(communicator_checks)


# -- failures ---------------------------------------------------------------------------------------------------------


def wrong_call(kind: str) -> str:
    """One rank makes another call; every rank must report it at once, and the group must stay usable."""
    group, odd = group_of(), dist.get_rank() == 1
    calls = {
        "shape": lambda: dist.all_reduce(torch.ones(4 if odd else 3), group=group),
        "large shape": lambda: dist.all_reduce(torch.ones(400_000 if odd else 300_000), group=group),
        "type": lambda: dist.all_reduce(torch.ones(3, dtype=torch.int32 if odd else torch.float32), group=group),
        "operator": lambda: dist.all_reduce(torch.ones(3), dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM, group),
        "root": lambda: dist.broadcast(torch.ones(3), group_src=int(odd), group=group),
        "short broadcast": lambda: dist.broadcast(torch.ones(3 + odd), group_src=0, group=group),
        "operation": lambda: dist.barrier(group) if odd else dist.all_reduce(torch.ones(3), group=group),
        "all_to_all": lambda: dist.all_to_all_single(
            torch.ones(7 if odd else 4), torch.ones(4), [5, 2] if odd else [2, 2], [2, 2], group=group
        ),
    }
    begin = time.monotonic()
    with pytest.raises(InputError) as caught:
        calls[kind]()
    assert time.monotonic() - begin < 1.0
    check = torch.ones(2)
    dist.all_reduce(check, group=group)
    assert check.tolist() == [2, 2]
    return str(caught.value)


@pytest.mark.alone  # errors must appear within a second
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("shape", "make them equal: (3) against (4)"),
        ("large shape", "(300000) against (400000)"),
        ("type", "make them equal: float32 against int32"),
        ("operator", "make them equal: op=max against op=sum"),
        ("root", "root=0 against root=1"),
        ("short broadcast", "(3) against (4)"),
        ("operation", "barrier"),
        ("all_to_all", "all_to_all"),
    ],
)
def test_a_wrong_call_is_refused_on_every_rank_with_both_lines(world, kind: str, words: str) -> None:
    first, second = world(2).run(wrong_call, kind)
    assert first == second
    assert "ranks made different calls" in first and words in first
    assert first.count("test_shm.py:") >= 1


def refused_here() -> str:
    group, odd = group_of(), dist.get_rank() == 1
    with pytest.raises(InputError) as caught:
        dist.all_to_all_single(torch.ones(4), torch.ones(4), [1, 3] if odd else [2, 2], [2, 2], group=group)
    return str(caught.value)


def test_a_call_refused_on_one_rank_fails_on_all(world) -> None:
    first, second = world(2).run(refused_here)
    assert "rank 1: refused: all_to_all between" in first
    assert second.startswith("all_to_all between (3,) of torch.float32 and (2,) of torch.float32")


def crossing() -> str:
    """The same two lines, in reverse order on rank 1."""
    group = group_of()

    def first() -> None:
        dist.all_reduce(torch.tensor([1.0]), group=group)

    def second() -> None:
        dist.all_reduce(torch.tensor([100.0]), group=group)

    with pytest.raises(InputError) as caught:
        for call in (first, second) if dist.get_rank() == 0 else (second, first):
            call()
    return str(caught.value)


def test_crossed_calls_are_reported(world) -> None:
    first, second = world(2).run(crossing)
    assert first == second and "in a different order" in first and first.count("test_shm.py:") >= 2


def mixed_deadlock() -> str:
    group = group_of()
    begin = time.monotonic()
    with pytest.raises(GaveUp) as caught:
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(3), group=group)
        else:
            dist.recv(torch.ones(3), group=group, group_src=0)
    assert time.monotonic() - begin < 5
    return str(caught.value)


@pytest.mark.alone
def test_a_collective_against_a_receive_is_reported_as_deadlock() -> None:
    own = World(2)
    try:
        for text in own.run(mixed_deadlock):
            assert "deadlock: ranks 0, 1 wait" in text
            assert (
                "rank 0: all_reduce float32 (3) op=sum without rank 1, at " in text and "rank 1: receive from" in text
            )
    finally:
        own.stop()


def lose_a_peer(what: str, note: str) -> None:
    group = group_of()
    dist.barrier(group=group)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(GaveUp, match="rank 1") as caught:
        if what == "collective":
            dist.all_reduce(torch.ones(100_000), group=group)
        else:
            dist.recv(torch.ones(3), group=group, group_src=1)
    with open(note, "w") as file:
        file.write(f"{time.monotonic() - begin:.2f} {caught.value.what}")


@pytest.mark.alone
@pytest.mark.parametrize("what", ["collective", "message"])
def test_a_killed_rank_is_reported_within_a_second(tmp_path, what: str) -> None:
    own, note = World(2), tmp_path / "note"
    try:
        with pytest.raises(Exception, match="rank 1 died"):
            own.run(lose_a_peer, what, str(note), timeout=20)
        seconds, _, words = note.read_text().partition(" ")
        assert float(seconds) < 1.0 and "rank 1" in words and "has died" in words
    finally:
        own.stop()


def wait_long(seconds: float) -> float:
    group = group_of()
    dist.barrier(group=group)
    if dist.get_rank() == 0:
        time.sleep(seconds)
        dist.all_reduce(torch.ones(3), group=group)
        return 0.0
    before = psutil.Process().cpu_times()
    dist.all_reduce(torch.ones(3), group=group)
    after = psutil.Process().cpu_times()
    return after.user + after.system - before.user - before.system


@pytest.mark.alone
def test_a_long_wait_uses_no_cpu_time(world) -> None:
    assert world(2).run(wait_long, 2.0)[1] < 0.2


def no_memory() -> tuple[str, float]:
    """A file size limit applies to anonymous files too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, hard))
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            group = dist.new_group(backend="shm")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    return str(caught[0].message), total.item()


def test_too_little_memory_falls_back_with_a_warning(world) -> None:
    for words, total in world(2).run(no_memory):
        assert words.startswith("the shm backend falls back to gloo:") and "of shared memory for 2 ranks" in words
        assert total == 2


def shared_files() -> set[str]:
    """Names in /dev/shm, without those of Open MPI and MPICH, which other tests run at the same time."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("sm_segment", "mpich_shm"))}


def test_killed_ranks_leave_nothing_in_dev_shm(tmp_path) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        textwrap.dedent("""
        import os, signal, sys, torch, torch.distributed as dist
        import drumline.comm
        dist.init_process_group("shm", store=dist.FileStore(os.environ["DRUMLINE_STORE"], 2), rank=int(os.environ["RANK"]), world_size=2)
        dist.all_reduce(torch.ones(100_000))
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    )
    before = shared_files()
    run = [sys.executable, "-m", "drumline.cli", "run", "-n", "2", str(script)]
    code = "import sys; from drumline.cli import main; sys.argv = ['drumline', *sys.argv[1:]]; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *run[3:]], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 5, done.stderr
    assert shared_files() == before


def random_calls(seed: int, calls: int) -> None:
    """Random collectives with sizes near the limits of mailboxes and slots, some of them asynchronous."""
    import random

    from drumline.comm.shm.segment import SLOT, SMALL

    group, choose = group_of(), random.Random(seed)
    p, r = group.size(), group.rank()
    edges = [0, 1, SMALL // 4, SLOT // 4, SLOT // 4 * p, SLOT * 4 // 4 * p]
    pending = []
    for _ in range(calls):
        n = max(0, choose.choice(edges) + choose.randint(-2, 2))
        kind, root, later = (
            choose.choice(("sum", "broadcast", "gather", "scatter", "to_all", "reduce")),
            choose.randrange(p),
            choose.random() < 0.3,
        )
        mine = group_contract.given(r, n)
        all_given = group_contract.inputs_of_all(group, n)
        if kind == "sum":
            work, out, expected = (
                dist.all_reduce(mine, group=group, async_op=later),
                mine,
                sum(all_given[1:], all_given[0]),
            )
        elif kind == "broadcast":
            work, out, expected = (
                dist.broadcast(mine, group_src=root, group=group, async_op=later),
                mine,
                all_given[root],
            )
        elif kind == "gather":
            out = torch.empty(p * n)
            work, expected = group.all_gather_single(out, mine), torch.cat(all_given)
        elif kind == "scatter":
            out = torch.empty(n)
            work, expected = group.reduce_scatter_single(out, mine.repeat(p)), sum(all_given[1:], all_given[0])
        elif kind == "to_all":
            out = torch.empty(p * n)
            work, expected = (
                dist.all_to_all_single(out, mine.repeat(p), group=group, async_op=later),
                torch.cat(all_given),
            )
        else:
            work, out, expected = dist.reduce(mine, group_dst=root, group=group, async_op=later), mine, None
            if r == root:
                expected = sum(all_given[1:], all_given[0])
        if expected is not None:
            pending.append((kind, n, work, out, expected))
        if len(pending) > 4 or not later:
            for kind, n, work, out, expected in pending:
                if work is not None:
                    work.wait()
                assert torch.equal(out, expected), (kind, n, seed)
            pending.clear()
    dist.barrier(group=group)


@pytest.mark.parametrize("p", [2, 3, 4])
def test_any_sequence_of_calls(world, p: int) -> None:
    world(p).run(random_calls, 7 + p, 150)
