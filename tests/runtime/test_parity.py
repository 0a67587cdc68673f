"""Parity: a run under a plan equals one device. Rows come from the table of supported combinations."""

from __future__ import annotations

from collections.abc import Callable

import parity
import pytest
import small_jobs
import torch
from world import World

from drumline.plans.combinations import TESTED_VALUES, UNRESTRICTED_KEYS, refusal
from drumline.runtime.verification.verify import Verification

Worlds = Callable[[int], World]
STEPS = 3
"""Two full batches and a ragged one; the next epoch is in the other tests."""


def title(row: parity.Row) -> str:
    return f"{row[0]}:{parity.plan_of(row)}"


def check_row(world: Worlds, row: parity.Row) -> None:
    if why := small_jobs.missing(str(row[0])):
        pytest.skip(why)
    plan = parity.plan_of(row)
    results = world(plan.ranks).run(parity.run_verify, row[0], str(plan), STEPS)
    assert isinstance(results[0], Verification)
    assert results[1:] == [None] * (plan.ranks - 1)
    parity.check(results[0])


@pytest.mark.parametrize("row", parity.cover(), ids=title)
def test_pairwise(world: Worlds, row: parity.Row) -> None:
    check_row(world, row)


def test_the_table_covers_all_that_the_engine_runs() -> None:
    assert set(parity.TABLE) - {"job"} | set(parity.SAME) == (set(TESTED_VALUES) | UNRESTRICTED_KEYS) - parity.ELSEWHERE
    for key in set(TESTED_VALUES) & set(parity.TABLE):
        assert set(parity.TABLE[key]) | set(parity.SAME.get(key, ())) == set(TESTED_VALUES[key])


def test_the_cover_has_every_pair() -> None:
    chosen = parity.cover()
    met = {pair for row in chosen for pair in parity.pairs(row)}
    assert met == {pair for row in parity.rows() for pair in parity.pairs(row)}
    assert all(refusal(parity.plan_of(row)) == "" for row in chosen)
    assert len(chosen) < 90


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,backend=gloo", "dp=2,bucket=1MiB", "dp=2,bucket=100MB,zero=3,shard=2"])
def test_buckets_and_backend(world: Worlds, plan: str) -> None:
    """646,000 numbers of 8 bytes: several messages of gradients."""
    parity.check(world(2).run(parity.run_verify, "mlp", plan, 2, {"model": parity.Wide})[0])


@pytest.mark.parametrize(
    ("job", "plan"),
    [
        ("mlp", "dp=2,backend=shm"),
        ("gpt", "dp=3,zero=3,micro=2,backend=shm"),
        ("cnn", "dp=4,micro=3,backend=shm"),
        ("gpt", "dp=2,precision=bf16,backend=shm"),
        ("cnn", "dp=2,zero=3,recompute=full,backend=shm"),
    ],
)
def test_on_shared_memory(world: Worlds, job: str, plan: str) -> None:
    """The ranks' group is an shm group, which the plan must name or leave open."""
    ranks = parity.Plan.parse(plan).ranks
    parity.check(world(ranks, "shm").run(parity.run_verify, job, plan, 2)[0])


@pytest.mark.parametrize(
    ("job", "plan"),
    [
        ("gpt", "dp=2"),
        ("gpt", "dp=3,zero=3,micro=2,recompute=full"),
        ("masked", "dp=4,micro=3"),
        ("cnn", "dp=3,recompute=full,micro=2"),
        ("cnn", "dp=4,zero=3,micro=3"),
        ("cnn", "dp=1,recompute=full"),
        ("cnn", "dp=2,zero=3,recompute=full"),
    ],
)
def test_losses_and_buffers_step_by_step(world: Worlds, job: str, plan: str) -> None:
    """Beyond what `verify` compares: every rank has the same loss, and BatchNorm's running statistics are correct."""
    ranks, micro = parity.Plan.parse(plan).ranks, parity.Plan.parse(plan).micro
    expected = parity.serial(job, micro=micro)
    for result in world(ranks).run(parity.run_losses, job, plan):
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-10)
        for kind in ("weights", "buffers"):
            assert set(result[kind]) == set(expected[kind])
            for name, value in expected[kind].items():
                torch.testing.assert_close(result[kind][name], value, rtol=1e-9, atol=1e-12, msg=name)


def test_the_loss_falls(world: Worlds) -> None:
    """Equality with a reference that does not learn would prove nothing."""
    losses = world(2).run(parity.run_losses, "mlp", "dp=2", 30)[0]["losses"]
    assert losses[-1] < 0.5 * losses[0]
