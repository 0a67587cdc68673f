"""Gradients between two hosts, made of network namespaces: every algorithm equals one device, `auto` is hierarchical."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from netns import Unable, two_hosts

from drumline.schedules import ALGORITHMS

HERE = Path(__file__).parent
PATHS = os.pathsep.join([str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH", "")])])


def said_by_ranks(*plans: str, **how: object) -> list[dict[str, str]]:
    try:
        with two_hosts() as hosts:
            outputs = hosts.run(str(HERE / "gradient_ranks.py"), "gloo", *plans, timeout=300, PYTHONPATH=PATHS, **how)  # type: ignore[arg-type]
    except Unable as e:
        pytest.skip(str(e))
    return [json.loads(text.splitlines()[-1]) for text in outputs]


@pytest.mark.slow
def test_every_algorithm_between_hosts() -> None:
    hierarchical = "hierarchical over shm+gloo, hosts of 2 ranks"
    expected = {
        "dp=4": hierarchical,
        "dp=4,zero=1": hierarchical,
        "dp=4,zero=2,bucket=1MiB": hierarchical,
        "dp=4,zero=1,shard=2": "backend",  # shards are inside a host, replicas have one rank on each
        "dp=4,allreduce=native": "backend",
        **{
            f"dp=4,{zero}bucket=1MiB,allreduce={name}": f"{name} over shm+gloo, hosts of 2 ranks"
            for name in ALGORITHMS["all_reduce"]
            for zero in ("", "zero=1,")
        },
    }
    for said in said_by_ranks(*expected):
        assert said == expected


@pytest.mark.slow
def test_ranks_in_turns_are_no_hierarchy() -> None:
    """Hosts with ranks 0, 2 and 1, 3: `auto` stays with the backend, and a hierarchy is refused, not replaced."""
    plans = ("dp=4", "dp=4,allreduce=hierarchical", "dp=4,allreduce=ring")
    for said in said_by_ranks(*plans, interleaved=True):
        assert said["dp=4"] == "backend"
        assert said["dp=4,allreduce=hierarchical"] == "allreduce=hierarchical over hosts of 2, 2 ranks"
        assert said["dp=4,allreduce=ring"] == "ring over shm+gloo"
