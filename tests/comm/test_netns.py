"""Two hosts made of network namespaces: ranks find those on the same host, and sums over both are correct."""

from __future__ import annotations

import json
import multiprocessing
import socket
import subprocess
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from netns import SwitchedHosts, Unable, switched_hosts, two_hosts

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize("inside", ["gloo", "shm"])
def test_all_reduce_over_two_hosts(inside: str) -> None:
    try:
        with two_hosts() as hosts:
            outputs = hosts.run(str(HERE / "netns_rank.py"), inside)
    except Unable as e:
        pytest.skip(str(e))
    for text in outputs:
        assert json.loads(text.splitlines()[-1]) == {"hosts": [[0, 1], [2, 3]], "per_node": 2, "wrong": []}


def test_hosts_are_removed_after_a_failure() -> None:
    try:
        with two_hosts() as hosts, pytest.raises(RuntimeError, match=r"(?s)ranks ended with \[3, 3, 3, 3\].*no drum"):
            hosts.run("-c", "import sys; print('no drum', file=sys.stderr); sys.exit(3)")
    except Unable as e:
        pytest.skip(str(e))
    there = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not any(name in there for name in hosts.names)
    links = subprocess.run(["ip", "link"], capture_output=True, text=True, check=True).stdout
    assert not any(name in links for name in hosts.interfaces)


def _receive(switch: SwitchedHosts, pipe: Connection, size: int) -> None:
    switch.enter(1)
    with socket.create_server((switch.address(1), 29561)) as listening:
        pipe.send("listening")
        connection, _ = listening.accept()
        with connection:
            left = size
            while left:
                left -= len(connection.recv(left))
            connection.sendall(b"!")


def _send(switch: SwitchedHosts, pipe: Connection, size: int) -> None:
    switch.enter(0)
    with socket.create_connection((switch.address(1), 29561)) as connection:
        start = time.monotonic()
        connection.sendall(bytes(size))
        connection.recv(1)
        pipe.send(time.monotonic() - start)


def test_hosts_on_a_switch_send_at_the_rate_of_their_ports() -> None:
    size, context = 400_000, multiprocessing.get_context("fork")
    try:
        with switched_hosts(2, "40mbit") as switch:
            (pipe, theirs), processes = context.Pipe(), []
            for role in (_receive, _send):
                processes.append(context.Process(target=role, args=(switch, theirs, size), daemon=True))
                processes[-1].start()
                assert pipe.poll(30), role
                said = pipe.recv()
            for process in processes:
                process.join(10)
            assert all(process.exitcode == 0 for process in processes)
    except Unable as e:
        pytest.skip(str(e))
    assert 0.8 * size / 5e6 < said < 30, "40 Mbit/s are 5 MB/s"
    there = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not any(name in there for name in switch.names)
