"""Local SGD: equal to a direct simulation, no message between averages, and saves, stops and reports at averages."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import replica_functions as ranks
import torch
from netns import Unable, two_hosts
from world import World

from drumline.core.errors import JobError, PlanError
from drumline.plans import Plan, check
from drumline.runtime.dry_run import dry_run
from drumline.runtime.verification.verify import Verification

Worlds = Callable[..., World]
PLANS = [
    "sync=local:1",
    "sync=local:4",
    "sync=local:4,outer=nesterov",
    "sync=local:3,outer=nesterov:0.5:0.8,sync_first=2",
    "sync=local:4,sync_first=3,micro=2",
    "sync=local:2,precision=bf16,recompute=full",
]
ACROSS = ["sync=local:2,across=4", "sync=local:2,across=6,outer=nesterov,sync_first=1"]


def proven(results: list[Verification | None]) -> Verification:
    """Check a verification: exact to 1e-10 against the simulation."""
    result = results[0]
    assert result is not None and results[1:] == [None] * (len(results) - 1)
    assert result.passed, result
    assert result.errors["float64"] <= 1e-10, result
    assert {"losses", "gradients", "parameters", "replicas"} <= set(result.parts["float64"])
    return result


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(("size", "backend"), [(2, "shm"), (4, "gloo")])
def test_equals_the_simulation(world: Worlds, size: int, backend: str, plan: str) -> None:
    proven(world(size, backend).run(ranks.verified, "mlp", f"dp={size},{plan}"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cnn", "masked", "partial", "gpt"])
@pytest.mark.parametrize("plan", [*PLANS, "sync=local:3,micro=3"])
@pytest.mark.parametrize(("size", "backend"), [(2, "gloo"), (4, "shm"), (3, "shm")])
def test_every_job_equals_the_simulation(world: Worlds, size: int, backend: str, plan: str, name: str) -> None:
    proven(world(size, backend).run(ranks.verified, name, f"dp={size},{plan}"))


@pytest.mark.parametrize("plan", ACROSS)
@pytest.mark.parametrize(("size", "backend"), [(4, "shm"), (4, "gloo"), (2, "shm")])
def test_averages_inside_hosts_and_across(world: Worlds, size: int, backend: str, plan: str) -> None:
    hosts = ranks.TWO_HOSTS if size == 4 else ((0,), (1,))
    proven(world(size, backend).run(ranks.verified, "mlp", f"dp={size},{plan}", 10, hosts))


def test_hosts_of_different_sizes(world: Worlds) -> None:
    proven(world(4, "shm").run(ranks.verified, "cnn", "dp=4,sync=local:2,across=4", 8, ((0, 1, 3), (2,))))


@pytest.mark.slow
def test_real_hosts() -> None:
    """Two hosts of two ranks, made of network namespaces."""
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent), *filter(None, [os.environ.get("PYTHONPATH", "")])])
    plans = ["dp=4,sync=local:2,across=4", "dp=4,sync=gossip:random"]
    try:
        with two_hosts() as hosts:
            outputs = hosts.run(str(here / "replica_ranks.py"), *plans, timeout=300, PYTHONPATH=paths)
    except Unable as e:
        pytest.skip(str(e))
    results = json.loads(outputs[0].splitlines()[-1])
    assert set(results) == set(plans)
    for errors, notes in results.values():
        assert errors["float64"] <= 1e-10 and "no effect" not in notes


def test_replicas_without_samples_rest(world: Worlds) -> None:
    """Three samples for four replicas, and a loss that counts nothing of some samples: states start at other times."""
    for name in ("mlp", "masked", "cnn"):
        plan = "dp=4,sync=local:2,micro=1"
        proven(world(4, "shm").run(ranks.verified, name, plan, 8, None, {"batch_size": 3}))


def test_one_replica_is_one_device(world: Worlds) -> None:
    result = proven(world(1, "shm").run(ranks.verified, "mlp", "sync=local:4"))
    assert result.parts["float64"]["one device"] <= 1e-10
    outer = proven(world(1, "shm").run(ranks.verified, "mlp", "sync=local:4,outer=nesterov"))
    assert "one device" not in outer.parts["float64"]  # an outer optimizer changes the result of one replica, too


def test_verification_can_fail(world: Worlds) -> None:
    result = world(2, "shm").run(ranks.verified_without_averages, "dp=2,sync=local:2")[0]
    assert result is not None and not result.passed
    assert result.errors["float64"] > 1e-3 and result.phase and result.first_divergence


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_averaging_every_step_is_synchronous_sgd(world: Worlds, backend: str) -> None:
    def off(optimizer: str, plan: str) -> float:
        run = world(2, backend).run
        ours, theirs = run(ranks.trained, plan, optimizer)[0], run(ranks.trained, "dp=2", optimizer)[0]
        return max(float((ours[k] - theirs[k]).abs().max() / theirs[k].abs().max()) for k in theirs)

    assert off("sgd", "dp=2,sync=local:1") <= 1e-10
    assert off("sgd", "dp=2,sync=local:2") > 1e-6
    assert off("adam", "dp=2,sync=local:1") > 1e-6  # the second moment is not linear in the gradient


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_no_message_between_averages(world: Worlds, backend: str) -> None:
    for row in world(2, backend).run(ranks.messages, "dp=2,sync=local:4", 8):
        assert [bool(step) for step in row] == [False, False, False, True] * 2
        assert "all_reduce" in row[3]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_replica_may_be_three_steps_ahead(world: Worlds, backend: str, tmp_path: Path) -> None:
    """Rank 1 has taken 4 steps, and does not begin the fifth before rank 0 has finished another."""
    run = world(2, backend).run
    for plan, done, expected in (("sync=local:4", 7, True), ("sync=local:4", 8, False), ("sync=allreduce", 5, False)):
        folder = tmp_path / f"{plan}{done}"
        folder.mkdir()
        patience = 20.0 if expected else 1.0
        assert run(ranks.runs_ahead, f"dp=2,{plan}", str(folder), (1, 5), (0, done), patience) == [True, expected]


def test_a_training_does_not_meet_between_averages(world: Worlds, tmp_path: Path) -> None:
    """Rank 1 waits in step 5 for rank 0 to compute step 8: with saves, logs and requests to stop."""
    for plan, expected in (("dp=2,sync=local:4", True), ("dp=2", False)):
        folder = tmp_path / plan
        folder.mkdir()
        arguments = plan, str(folder), (1, 5), (0, 8), 20.0 if expected else 1.0
        assert world(2, "shm").run(ranks.training_runs_ahead, *arguments) == [True, expected]


def test_hosts_average_without_the_others(world: Worlds) -> None:
    for row in world(4, "shm").run(ranks.messages, "dp=4,sync=local:2,across=4", 8, ranks.TWO_HOSTS):
        assert [bool(step) for step in row] == [False, True] * 4


# -- checkpoints


@pytest.mark.parametrize(
    "plan", ["sync=local:4", "sync=local:2,outer=nesterov", "sync=local:4,outer=nesterov,sync_first=6"]
)
def test_a_resumed_run_is_the_same_run(world: Worlds, tmp_path: Path, plan: str) -> None:
    for name in ("mlp", "cnn"):
        folder = str(tmp_path / name)
        for result in world(2, "shm").run(ranks.resumed, f"dp=2,{plan}", name, folder, 4, 10):
            assert result == ([], True)


@pytest.mark.parametrize(("other", "size"), [("dp=2", 2), ("dp=2,zero=3", 2), ("dp=2,sync=gossip", 2)])
def test_a_checkpoint_loads_under_any_plan(world: Worlds, tmp_path: Path, other: str, size: int) -> None:
    """Saved between two averages: the replicas are averaged first."""
    plan = "dp=2,sync=local:4,outer=nesterov"
    assert world(size, "gloo").run(ranks.loaded_elsewhere, plan, other, str(tmp_path), 3) == [[], []]


def test_evaluation_is_of_the_average(world: Worlds) -> None:
    for result, expected, same, differ in world(2, "shm").run(ranks.evaluated, "dp=2,sync=local:4", 3):
        assert result == pytest.approx(expected, rel=1e-12) and same and differ


# -- guards


@pytest.mark.parametrize("rank", [0, 1])
def test_a_bad_step_of_one_replica_stops_all_at_the_average(world: Worlds, rank: int) -> None:
    for result in world(2, "shm").run(ranks.guarded, "dp=2,sync=local:4", "stop", 1, rank, 8):
        assert result["error"].startswith("StoppedByGuard: the loss is nan at step 1")
        assert f"rank {rank}: the input of sample" in result["error"]
        assert (result["position"], result["steps"], result["finite"]) == (4, 4, True)


def test_a_bad_step_of_one_replica_is_skipped(world: Worlds) -> None:
    results = world(2, "shm").run(ranks.guarded, "dp=2,sync=local:4", "skip", 1, 1, 4)
    for rank, result in enumerate(results):
        assert (result["error"], result["steps"], result["position"], result["finite"]) == ("", 4, 4, True)
        assert result["skipped"] == rank
    assert results[1]["notes"][1].startswith("skipped: the loss is nan at step 1; rank 1:")
    assert results[0]["rate"] == results[1]["rate"]


@pytest.mark.parametrize(("steps", "reported", "saved"), [(8, 7, 8), (6, 6, 6)])
def test_a_training_that_is_stopped_saves_the_average(
    world: Worlds, tmp_path: Path, steps: int, reported: int, saved: int
) -> None:
    """Step 5 is bad on rank 1: the run stops at step 8, or at its end; the step that raises is not reported."""
    results = world(2, "shm").run(ranks.training_stopped, "dp=2,sync=local:4", str(tmp_path), 5, steps)
    assert [seen for seen, _, _ in results] == [list(range(reported)), []]
    for _, error, names in results:
        assert "rank 1: the input of samples" in error or "rank 1: the input of sample" in error
        assert "its replica did not apply this step" in error and names == [f"step-{saved:08d}"]


def test_replicas_are_compared_after_averages(world: Worlds) -> None:
    run = world(2, "shm").run
    assert run(ranks.voted, "dp=2,sync=local:4", False) == ["", ""]
    for text in run(ranks.voted, "dp=2,sync=local:4", True):
        assert "the replicas differ at step 8" in text and "'frozen.weight' differs" in text


# -- training


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_steps_are_reported_at_averages(world: Worlds, backend: str) -> None:
    seen = world(2, backend).run(ranks.report_times, "dp=2,sync=local:4", 10)
    assert seen[0] == [*((i, 4) for i in range(4)), *((i, 8) for i in range(4, 8)), (8, 10), (9, 10)]
    assert seen[1] == []


def test_reported_losses_are_means_over_all_samples(world: Worlds) -> None:
    """Uneven slices: the losses of the first batch, before any update, are those of the synchronous plan."""
    run = world(2, "shm").run
    ours, theirs = (
        [e for e in run(ranks.events_of_training, plan, "mlp", 4)[0] if "step" in e]
        for plan in ("dp=2,sync=local:4", "dp=2")
    )
    assert [e["step"] for e in ours] == [e["step"] for e in theirs] == [0, 1, 2, 3]
    assert ours[0]["loss"] == pytest.approx(theirs[0]["loss"], rel=1e-6)
    assert ours[3]["loss"] != pytest.approx(theirs[3]["loss"], rel=1e-6)
    assert all(e["grad_norm"] > 0 and e["skipped"] == 0 and e["note"] == "" for e in ours)


def test_notes_for_users_are_printed_once(world: Worlds) -> None:
    run = world(2, "shm").run
    messages = [
        e["message"] for e in run(ranks.events_of_training, "dp=2,sync=local:2,across=4", "cnn", 2)[0] if "message" in e
    ]
    assert sum("BatchNorm: each replica normalises with its own slice" in text for text in messages) == 1
    assert sum("across=4 has no effect: all ranks are on one host" in text for text in messages) == 1
    quiet = run(ranks.events_of_training, "dp=2,sync=local:2", "mlp", 2)[0]
    assert [e for e in quiet if "message" in e] == []


def test_types_of_weights(world: Worlds) -> None:
    assert world(2, "gloo").run(ranks.averaged_types, "dp=2,sync=local:2") == [True, True]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_replicas_start_as_the_first_one(world: Worlds, backend: str) -> None:
    first, second = world(2, backend).run(ranks.first_weights, "dp=2,sync=local:2")
    assert first == second and first[1] == [False, True, True, True, True, True]


def test_constant_buffers_are_not_averaged(world: Worlds) -> None:
    """The mean of three equal numbers need not be that number."""
    for unchanged, averaged in world(3, "gloo").run(ranks.buffers, "dp=3,sync=local:2", 6):
        assert unchanged and averaged == ["norm.num_batches_tracked", "norm.running_mean", "norm.running_var"]


def test_a_slice_too_small_for_batchnorm_is_refused(world: Worlds) -> None:
    with pytest.raises(JobError, match=r"BatchNorm cannot normalise a slice of 1 sample(.|\n)*their own slice"):
        world(3, "gloo").run(ranks.norm_of_one_sample, "dp=3,sync=local:2")


def test_dry_run() -> None:
    result = dry_run(ranks.even_job(), "dp=4,sync=local:1", device="cpu")
    assert sum(m.bytes for m in result.ranks[0].messages) >= 4 * sum(
        p.numel() for p in torch.nn.Module.parameters(ranks.even_job().model())
    )
    alone = dry_run(ranks.even_job(), "dp=4,sync=local:100", device="cpu")
    assert alone.ranks[0].messages == ()


@pytest.mark.parametrize(
    ("plan", "rule"),
    [
        ("dp=2,sync=local:2,outer=nesterov:0:0.9", "a rate above 0"),
        ("dp=2,sync=local:2,outer=nesterov:0.7:1", "a momentum below 1"),
        ("dp=2,sync=local:4,across=6", "multiple of k"),
        ("dp=2,sync=gossip,outer=nesterov", "they configure local steps"),
        ("dp=2,zero=1,sync=local:4", "meet in every step"),
    ],
)
def test_refused(plan: str, rule: str) -> None:
    with pytest.raises(PlanError) as caught:
        check(Plan.parse(plan))
    assert rule in caught.value.rule
    check(Plan.parse(caught.value.fix.removeprefix("the nearest plan that runs: ")))
