"""Gossip: equal to a direct simulation by mixing matrices, and a rank waits for its neighbours alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import replica_functions as ranks
from test_local_sgd import proven
from world import World

from drumline.runtime.strategies.gossip import EVERY

Worlds = Callable[..., World]
PLANS = ["sync=gossip", "sync=gossip:random"]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(("size", "backend"), [(2, "shm"), (4, "gloo"), (4, "shm"), (2, "gloo"), (3, "gloo")])
def test_equals_the_simulation(world: Worlds, size: int, backend: str, plan: str) -> None:
    proven(world(size, backend).run(ranks.verified, "mlp", f"dp={size},{plan}", 12))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cnn", "masked", "partial", "gpt"])
@pytest.mark.parametrize("plan", [*PLANS, "sync=gossip,micro=3"])
@pytest.mark.parametrize(("size", "backend"), [(2, "gloo"), (4, "shm"), (3, "shm")])
def test_every_job_equals_the_simulation(world: Worlds, size: int, backend: str, plan: str, name: str) -> None:
    proven(world(size, backend).run(ranks.verified, name, f"dp={size},{plan}", 12))


@pytest.mark.parametrize("plan", PLANS)
def test_replicas_without_samples_rest(world: Worlds, plan: str) -> None:
    for name in ("mlp", "cnn"):
        proven(world(4, "shm").run(ranks.verified, name, f"dp=4,{plan}", 8, None, {"batch_size": 3}))


def test_one_replica_is_one_device(world: Worlds) -> None:
    result = proven(world(1, "shm").run(ranks.verified, "mlp", "sync=gossip"))
    assert result.parts["float64"]["one device"] <= 1e-10


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_only_neighbours_wait_for_each_other(world: Worlds, backend: str, tmp_path: Path) -> None:
    """Rank 2 does not begin step 5 before another rank has finished it: rank 0 can, as it is not its neighbour."""
    for other in (0, 1):
        folder = tmp_path / str(other)
        folder.mkdir()
        arguments = "dp=4,sync=gossip", str(folder), (2, 5), (other, 5), 20.0 if other == 0 else 1.0
        assert world(4, backend).run(ranks.runs_ahead, *arguments) == [True, True, other == 0, True]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_messages_go_to_neighbours_and_all_ranks_meet_rarely(world: Worlds, backend: str) -> None:
    for row in world(4, backend).run(ranks.messages, "dp=4,sync=gossip", EVERY + 2):
        assert all("gossip" in step for step in row)
        # in the first step, and where all ranks meet, they agree on what is exchanged
        assert [len(step) > 1 for step in row] == [i in (0, EVERY - 1) for i in range(EVERY + 2)]


@pytest.mark.parametrize("plan", PLANS)
def test_a_resumed_run_is_the_same_run(world: Worlds, tmp_path: Path, plan: str) -> None:
    """A save sets all replicas to the average; the run continues from there, as a resumed run does."""
    for name in ("mlp", "cnn"):
        for result in world(2, "shm").run(ranks.resumed, f"dp=2,{plan}", name, str(tmp_path / name), 4, 10):
            assert result == ([], True)


def test_a_checkpoint_loads_under_any_plan(world: Worlds, tmp_path: Path) -> None:
    assert world(2, "gloo").run(ranks.loaded_elsewhere, "dp=2,sync=gossip", "dp=2", str(tmp_path), 3) == [[], []]


def test_evaluation_is_of_the_average(world: Worlds) -> None:
    for result, expected, same, differ in world(4, "shm").run(ranks.evaluated, "dp=4,sync=gossip", 3):
        assert result == pytest.approx(expected, rel=1e-12) and same and differ


def test_a_bad_step_stops_all_where_they_meet(world: Worlds) -> None:
    for result in world(2, "shm").run(ranks.guarded, "dp=2,sync=gossip", "stop", 1, 1, EVERY + 2):
        assert result["error"].startswith("StoppedByGuard: the loss is nan at step 1")
        assert (result["position"], result["finite"]) == (EVERY, True)


def test_steps_are_reported_where_ranks_meet(world: Worlds) -> None:
    seen = world(2, "shm").run(ranks.report_times, "dp=2,sync=gossip", EVERY + 2)
    assert seen[0] == [*((i, EVERY) for i in range(EVERY)), (EVERY, EVERY + 2), (EVERY + 1, EVERY + 2)]


def test_replicas_are_not_compared_while_they_differ(world: Worlds) -> None:
    assert world(2, "shm").run(ranks.voted, "dp=2,sync=gossip", True) == ["", ""]
