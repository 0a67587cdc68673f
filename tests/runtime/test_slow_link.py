"""A slow link between two network namespaces: its sender is reported; links of equal speed are not."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from netns import Unable, two_hosts

HERE = Path(__file__).parent
PATHS = os.pathsep.join([str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH", "")])])


def compare_ranks(slow_host: int | None) -> dict[str, Any]:
    """Compare two ranks over a link of 200 Mbit/s, of which `slow_host` may use only half; returns their verdict."""
    try:
        with two_hosts("200mbit") as hosts:
            if slow_host is not None:
                name, interface = hosts.names[slow_host], hosts.interfaces[slow_host]
                shape = ("tbf", "rate", "100mbit", "burst", "256kb", "latency", "50ms")
                argv = ["ip", "netns", "exec", name, "tc", "qdisc", "change", "dev", interface, "root", *shape]
                subprocess.run(argv, check=True)
            outputs = hosts.run(str(HERE / "slow_link_rank.py"), per_host=1, PYTHONPATH=PATHS)
    except Unable as e:
        pytest.skip(str(e))
    answers = [json.loads(text.splitlines()[-1]) for text in outputs]
    assert answers[0] == answers[1], "all ranks reach the same verdict"
    return dict(answers[0])


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("slow_host", [0, 1])
def test_sender_of_a_slow_link_is_reported(slow_host: int) -> None:
    verdict = compare_ranks(slow_host)
    rank, phase, factor = verdict["slowest"]
    assert (rank, phase) == (slow_host, "network") and 1.4 < factor < 3 and verdict["network_share"] > 0.2


@pytest.mark.slow
@pytest.mark.alone
def test_links_of_equal_speed_are_not_reported() -> None:
    verdict = compare_ranks(None)
    assert verdict["slowest"][1] != "network" and verdict["slowest"][2] < 4 / 3 and verdict["network_share"] > 0.2
