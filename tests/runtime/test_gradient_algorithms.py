"""Parity of `allreduce=`: gradients summed by every algorithm, over DDP's buckets and flat shards, equal one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import parity
import pytest
from world import World

from drumline.core.errors import GaveUp, PlanError
from drumline.plans import Plan
from drumline.plans.combinations import TESTED_VALUES, check
from drumline.runtime.engine import initialize
from drumline.runtime.strategies.gradient_collectives import ScheduledCollectives
from drumline.schedules import ALGORITHMS

Worlds = Callable[..., World]
WORDS = [str(word) for word in TESTED_VALUES["allreduce"]]
STEPS = 3


def test_every_algorithm_is_in_the_table() -> None:
    assert set(WORDS) == {"auto", "native", *ALGORITHMS["all_reduce"]}


@pytest.mark.parametrize("algorithm", [word for word in WORDS if word != "auto"])
def test_sums_equal_one_device(world: Worlds, algorithm: str) -> None:
    """646,000 numbers of 8 bytes: several buckets, which overlap with the backward."""
    for plan in (f"dp=3,bucket=1MiB,allreduce={algorithm}", f"dp=3,zero=1,bucket=1MiB,allreduce={algorithm}"):
        parity.check(world(3).run(parity.run_verify, "mlp", plan, 2, {"model": parity.Wide})[0])


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("algorithm", [word for word in WORDS if word != "auto"])
def test_every_algorithm_with_every_sharding(world: Worlds, algorithm: str, ranks: int, backend: str) -> None:
    for zero in (0, 1, 2):
        plan = f"dp={ranks},zero={zero},bucket=1MiB,allreduce={algorithm}".replace(",zero=0", "")
        parity.check(world(ranks, backend).run(parity.run_verify, "mlp", plan, STEPS, {"model": parity.Wide})[0])
    if ranks == 4:
        for zero in (1, 2):
            plan = f"dp=4,shard=2,zero={zero},allreduce={algorithm},micro=2"
            parity.check(world(4, backend).run(parity.run_verify, "gpt", plan, STEPS)[0])


def run_messages(plan: str) -> tuple[int, int, list[str]]:
    """On every rank: messages and rounds that the communicator sent in one step, and what the recorder saw."""
    with parity.shard_small_layers(plan):
        engine = initialize(parity.small_jobs.make("mlp", model=parity.Wide), plan)
    schedules: Any = engine.strategy._schedules  # type: ignore[attr-defined]
    for batch in engine.data(2):
        before = schedules.traffic
        engine.step(batch)
    sent = schedules.traffic
    names = [span.name for span in engine.record.spans() if span.lane == "communication"]
    return sent.messages - before.messages, sent.rounds - before.rounds, names


@pytest.mark.parametrize(
    ("plan", "messages", "rounds"),
    [
        ("dp=3,bucket=100MB,allreduce=ring", 4, 4),
        ("dp=3,bucket=100MB,allreduce=direct", 4, 2),
    ],
)
def test_the_named_schedule_carries_the_buckets(world: Worlds, plan: str, messages: int, rounds: int) -> None:
    """A ring of three has 4 rounds of one message per bucket, `direct` 2 of two; DDP makes two or three buckets."""
    for sent, done, names in world(3).run(run_messages, plan):
        buckets = sum(name == "all_reduce" for name in names) - 1  # the loss is one too
        assert buckets >= 1
        assert (sent, done) == (messages * buckets, rounds * buckets)


def run_failing(plan: str) -> str:
    """On every rank: what a step raises if the schedule fails in its thread."""
    with parity.shard_small_layers(plan):
        engine = initialize(parity.small_jobs.make("mlp"), plan)

    def fail(*_: object) -> None:
        raise GaveUp("rank 1 went away")

    with mock.patch.object(ScheduledCollectives, "_run", fail):
        try:
            engine.step(next(iter(engine.data(1))))
        except Exception as e:
            return str(e)
    return ""


@pytest.mark.parametrize("plan", ["dp=2,allreduce=ring", "dp=2,zero=1,allreduce=ring"])
def test_an_error_in_the_thread_ends_the_step(world: Worlds, plan: str) -> None:
    for error in world(2).run(run_failing, plan):
        assert "rank 1 went away" in error


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ("dp=2,zero=3,allreduce=ring", "torch's FSDP2 sends its own collectives"),
        ("dp=2,compress=fp16,allreduce=ring", "torch's compression hooks send by the backend's own all-reduce"),
        ("dp=2,backend=nccl,allreduce=ring", "NCCL chooses its algorithm itself"),
        ("dp=2,backend=threads,allreduce=ring", "threads send no messages"),
        ("dp=2,tp=2,allreduce=ring", "only the gradients of replicas and flat shards travel by schedules"),
    ],
)
def test_strategies_with_own_collectives_are_refused(plan: str, reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        check(Plan.parse(plan))
    check(Plan.parse(plan.replace("allreduce=ring", "allreduce=auto")))


def test_old_spelling() -> None:
    assert Plan.parse("dp=2,allreduce=tree") == Plan.parse("dp=2,allreduce=double_tree")
    assert str(Plan.parse("dp=2,allreduce=tree")) == "dp=2,allreduce=double_tree"
