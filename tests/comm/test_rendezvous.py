"""Where ranks meet: a store that may be old, ranks that do not agree, and addresses from Slurm's variables."""

from __future__ import annotations

import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from drumline.comm import rendezvous, store_handshake
from drumline.comm.rendezvous import _parse_tcp, master_address
from drumline.comm.store_handshake import agree
from drumline.core.errors import GaveUp, InputError
from drumline.core.node_list import MOST_HOSTS, check_host, parse_node_list
from drumline.core.rank_info import RankInfo


def outcomes(stores: list[dist.Store], ranks: list[tuple[int, int]], timeout: float = 20.0) -> list[Any]:
    """What `agree` gives each (rank, size): the prefix, or the error."""
    results: dict[int, Any] = {}

    def one(i: int) -> None:
        rank, size = ranks[i]
        try:
            results[i] = agree(stores[i], rank, size, timeout)
        except (InputError, GaveUp) as e:
            results[i] = e

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(ranks))]
    for t in reversed(threads):  # rank 0 comes last, so that the others see what is old
        t.start()
        time.sleep(0.05)
    for t in threads:
        t.join()
    return [results[i] for i in range(len(ranks))]


def meet(stores: list[dist.Store]) -> None:
    """Check that the ranks have one prefix of their own."""
    stores[0].set("key", "of rank 0")
    assert all(s.get("key") == b"of rank 0" for s in stores)


def test_a_store_that_was_used_before() -> None:
    store = dist.HashStore()
    seen = []
    for _ in range(3):
        stores = outcomes([store] * 3, [(r, 3) for r in range(3)])
        assert not stores[0].check(["key"])
        meet(stores)
        seen.append(stores[0])


def test_a_file_that_a_killed_run_left(tmp_path: Path) -> None:
    for _ in range(2):
        path = str(tmp_path / "store")
        left = dist.FileStore(path, -1)  # keeps the file when the others are gone
        left.set("offer", "old")
        left.set("old/taken", "7")
        stores = [dist.FileStore(path, -1) for _ in range(2)]
        meet(outcomes(stores, [(0, 2), (1, 2)]))


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2)])
def test_sizes_that_differ_are_refused_at_once(sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_handshake, "_LINGER", 0.5)
    begun = time.monotonic()
    results = outcomes([dist.HashStore()] * 2, [(0, sizes[0]), (1, sizes[1])], timeout=60)
    assert time.monotonic() - begun < 10
    for error in results:
        assert isinstance(error, InputError)
        assert error.what == f"WORLD_SIZE is {sizes[0]} on rank 0 and {sizes[1]} on rank 1"


def test_two_ranks_with_one_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_handshake, "_LINGER", 0.5)
    results = outcomes([dist.HashStore()] * 3, [(0, 3), (1, 3), (1, 3)], timeout=60)
    assert {str(e).splitlines()[0] for e in results} == {"two ranks have RANK=1"}


def test_ranks_that_do_not_come() -> None:
    [first] = outcomes([dist.HashStore()], [(0, 3)], timeout=0.2)
    assert isinstance(first, GaveUp)
    assert first.what == "ranks [1, 2] of 3 have not joined within 0.2 s"
    [other] = outcomes([dist.HashStore()], [(2, 3)], timeout=0.2)
    assert other.what == "rank 2 waited 0.2 s for rank 0"


STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
WHERE = RankInfo(0, 4, 0, "Slurm")


@pytest.mark.parametrize(
    ("more", "host"),
    [
        ({"SLURM_NODELIST": "gpu[03-05,9],login"}, "gpu03"),
        ({"SLURM_NODELIST": "a", "SLURM_STEP_NODELIST": "b-[2]"}, "b-2"),
        ({"SLURM_NODELIST": "gpu[1-2]", "SLURM_STEP_NUM_NODES": "1"}, "127.0.0.1"),
        ({"SLURM_NODELIST": "gpu[1-2]", "MASTER_ADDR": "10.0.0.1"}, "10.0.0.1"),
    ],
)
def test_srun_alone_gives_an_address(more: dict[str, str], host: str) -> None:
    address, port = master_address(WHERE, STEP | more)
    assert address == host
    assert 1024 < port < 32768
    assert (address, port) == master_address(WHERE, STEP | more)  # the same on all ranks
    assert port != master_address(WHERE, STEP | more | {"SLURM_STEP_ID": "1"})[1]
    assert master_address(WHERE, STEP | more | {"SLURM_STEP_RESV_PORTS": "12007-12008"})[1] == 12007


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", ["a"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[09-11,3]", ["n09", "n10", "n11", "n3"]),
        ("r[1-2]n[1-2],x.y", ["r1n1", "r1n2", "r2n1", "r2n2", "x.y"]),
        ("n[5-4],a", ["a"]),
    ],
)
def test_node_lists(text: str, hosts: list[str]) -> None:
    assert list(parse_node_list(text)) == hosts


@pytest.mark.parametrize(
    "text", ["", ",", "a,,b", "n[1-2", "n]", "n[]", "n[a-b]", "n[1-]", "n[1-2-3]", "n[[1]]", "a b", "a\nb", "n[-1]"]
)
def test_bad_node_lists(text: str) -> None:
    with pytest.raises(InputError, match="is not a (list of hosts|host name)"):
        parse_node_list(text)


@pytest.mark.parametrize("text", ["n[0-999999999]", "n[1-60000]m[1-60000]", "a[0-9]" + "[0-9]" * 12])
def test_endless_node_lists(text: str) -> None:
    begun = time.monotonic()
    with pytest.raises(InputError, match=f"a list of [0-9]+ hosts(?s:.)*at most {MOST_HOSTS}"):
        parse_node_list(text)
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize(
    "name", [";rm -rf x", "$(id)", "`id`", "a b", "-oProxyCommand=x", "a\n", "a;b", "", "é", "a" * 300]
)
def test_bad_host_names(name: str) -> None:
    with pytest.raises(InputError, match="is not a host name"):
        check_host(name)
    with pytest.raises(InputError, match="is not a host name"):
        master_address(RankInfo(0, 2, 0, "torchrun"), {"MASTER_ADDR": name, "MASTER_PORT": "29500"})


@pytest.mark.parametrize("url", ["tcp://", "tcp://h", "tcp://h:0", "tcp://h:70000", "http://h:1", "tcp://a;b:1", "x"])
def test_bad_addresses(url: str) -> None:
    with pytest.raises(InputError):
        _parse_tcp(url)


def test_tcp_addresses() -> None:
    assert _parse_tcp("tcp://10.0.0.1:29500") == ("10.0.0.1", 29500)
    assert _parse_tcp("tcp://[fe80::1]:1") == ("fe80::1", 1)


def test_a_taken_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(InputError, match=f"rank 0 cannot listen at 127.0.0.1:{port}"):
            rendezvous._tcp_store("127.0.0.1", port, RankInfo(0, 2, 0, "torchrun"), timedelta(seconds=5))
