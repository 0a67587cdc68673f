"""Gradients between two hosts (network namespaces): every algorithm equals one device, and `auto` is hierarchical."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from netns import Unable, two_hosts

from drumline.schedules import ALGORITHMS

HERE = Path(__file__).parent
PATHS = os.pathsep.join([str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH", "")])])


def algorithms_of_ranks(*plans: str, **how: object) -> list[dict[str, str]]:
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
    for algorithms in algorithms_of_ranks(*expected):
        assert algorithms == expected


@pytest.mark.slow
def test_interleaved_ranks_use_no_hierarchy() -> None:
    """Hosts with ranks 0, 2 and 1, 3: `auto` uses the backend, and an explicit hierarchy is refused."""
    plans = ("dp=4", "dp=4,allreduce=hierarchical", "dp=4,allreduce=ring")
    for algorithms in algorithms_of_ranks(*plans, interleaved=True):
        assert algorithms["dp=4"] == "backend"
        assert algorithms["dp=4,allreduce=hierarchical"] == "allreduce=hierarchical over hosts of 2, 2 ranks"
        assert algorithms["dp=4,allreduce=ring"] == "ring over shm+gloo"
