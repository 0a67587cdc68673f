"""Two hosts made of network namespaces: ranks find those on the same host, and sums over both are correct."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from netns import Unable, two_hosts

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
