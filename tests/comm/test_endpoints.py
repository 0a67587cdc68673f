"""The contract of endpoints, between threads and over gloo; and their behaviour when a rank dies."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from endpoint_contract import CHECKS, Check, FrameReceiver, until
from world import World

from drumline.comm.messaging.endpoint import Endpoint
from drumline.comm.messaging.gloo_endpoint import GlooEndpoint
from drumline.comm.messaging.thread_endpoint import run_endpoints
from drumline.core.errors import GaveUp


@pytest.mark.parametrize("p", [1, 2, 3, 5])
@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_threads(check: Check, p: int) -> None:
    run_endpoints(check, p)


def on_gloo(check: Check) -> None:
    endpoint = GlooEndpoint()
    check(endpoint)
    endpoint.close()


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_gloo(check: Check, p: int, world: Callable[[int], World]) -> None:
    world(p).run(on_gloo, check)


def test_a_thread_that_fails_ends_the_others() -> None:
    def fn(endpoint: Endpoint) -> None:
        endpoint.receiver = FrameReceiver()
        if endpoint.rank == 1:
            raise ValueError("rank 1 has its reasons")
        with pytest.raises(GaveUp, match="rank 0 waits, but rank 1 failed"):
            until(endpoint, lambda: False)

    with pytest.raises(ValueError, match="its reasons"):
        run_endpoints(fn, 2)


def die_early(note: str) -> None:
    endpoint = GlooEndpoint()
    endpoint.receiver = FrameReceiver()
    if endpoint.rank == 1:
        time.sleep(0.2)
        os._exit(0)
    with pytest.raises(GaveUp, match="rank 0 lost rank 1"):
        until(endpoint, lambda: False)
    Path(note).write_text("noticed")


def test_a_process_that_dies_is_noticed(tmp_path: Path) -> None:
    own = World(2)
    try:
        with pytest.raises(Exception, match="rank 1 died"):
            own.run(die_early, str(tmp_path / "note"))
        assert (tmp_path / "note").read_text() == "noticed"
    finally:
        own.stop()
