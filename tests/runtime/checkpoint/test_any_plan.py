"""Checkpoints saved under one plan load under any other, on any number of ranks, bit for bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fakes
import on_ranks
import pytest
import small_jobs
import torch
from world import World

import drumline as dl
from drumline.launchers import spawn
from drumline.plans import Plan

Worlds = Callable[[int], World]
PLANS = [
    "dp=1",
    "dp=2",
    "dp=3,zero=1",
    "dp=4,zero=2,shard=2",
    "dp=2,zero=3",
    "dp=4,zero=3",
    "dp=4,zero=3,shard=2",
    "dp=2,chunk=2",
    "dp=2,zero=3,chunk=3",
]


def run(world: Worlds, plan: str, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    return world(Plan.parse(plan).ranks).run(function, *arguments)


def equal(a: dict[str, Any], b: dict[str, Any]) -> None:
    a, b = dict(a), dict(b)
    assert a.keys() == b.keys()
    for name, value in a.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == b[name].dtype and torch.equal(value, b[name]), name
        else:
            assert value == b[name], name


@pytest.mark.parametrize("name", ["gpt", *(pytest.param(n, marks=pytest.mark.slow) for n in ("cnn", "partial"))])
@pytest.mark.parametrize("plan", ["dp=4", "dp=4,zero=2", "dp=4,zero=3", "dp=4,zero=3,shard=2"])
def test_saved_on_four_loaded_on_any(world: Worlds, tmp_path: Path, name: str, plan: str) -> None:
    [state, *_] = run(world, plan, on_ranks.save, name, plan, str(tmp_path), 2)
    for other in PLANS:
        if other != plan:
            for result in run(world, other, on_ranks.loaded, name, other, str(tmp_path)):
                equal(state, result)


@pytest.mark.parametrize("plan", ["dp=1", "dp=3,zero=1", "dp=2,zero=3,chunk=2"])
def test_saved_on_fewer_loaded_on_four(world: Worlds, tmp_path: Path, plan: str) -> None:
    [state, *_] = run(world, plan, on_ranks.save, "gpt", plan, str(tmp_path), 2)
    for other in ("dp=4", "dp=4,zero=2,shard=2", "dp=4,zero=3"):
        for result in run(world, other, on_ranks.loaded, "gpt", other, str(tmp_path)):
            equal(state, result)


@pytest.mark.parametrize(
    "plan", ["dp=1", "dp=2,micro=2", "dp=2,zero=1", "dp=2,zero=3", "dp=2,zero=3,precision=bf16", "dp=2,zero=1,chunk=2"]
)
@pytest.mark.parametrize("name", ["dropout", *(pytest.param(n, marks=pytest.mark.slow) for n in ("cnn", "gpt"))])
def test_k_steps_restart_k_steps_equal_2k_steps(world: Worlds, tmp_path: Path, name: str, plan: str) -> None:
    for k in (1, 3):
        folder = str(tmp_path / str(k))
        run(world, plan, on_ranks.save, name, plan, folder, k, k == 1)
        before = run(world, plan, on_ranks.straight, name, plan, 2 * k)
        for a, b in zip(before, run(world, plan, on_ranks.loaded, name, plan, folder, k), strict=True):
            equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp=1", "dp=2", "dp=2,zero=2", "dp=2,zero=3"])
def test_restart_after_every_k(world: Worlds, tmp_path: Path, plan: str) -> None:
    for k in range(1, 21):
        folder = str(tmp_path / str(k))
        run(world, plan, on_ranks.save, "dropout", plan, folder, k)
        before = run(world, plan, on_ranks.straight, "dropout", plan, 2 * k)
        for a, b in zip(before, run(world, plan, on_ranks.loaded, "dropout", plan, folder, k), strict=True):
            equal(a, b)


@pytest.mark.parametrize("plan", ["dp=1,precision=fp16", "dp=2,zero=3,precision=fp16"])
def test_loss_scale(world: Worlds, tmp_path: Path, plan: str) -> None:
    [state, *_] = run(world, plan, on_ranks.save, "mlp", plan, str(tmp_path), 2)
    assert state["scaler"]["good"] == 2
    for result in run(world, plan, on_ranks.loaded, "mlp", plan, str(tmp_path)):
        equal(state, result)


@pytest.mark.parametrize("plan", ["dp=4", "dp=4,zero=1", "dp=4,zero=3", "dp=4,zero=3,shard=2"])
def test_writing_is_divided_over_the_ranks(world: Worlds, tmp_path: Path, plan: str) -> None:
    """No element is written twice, and no rank writes much more than its share."""
    [sizes, *_] = run(world, plan, on_ranks.files, "gpt", plan, str(tmp_path))
    [alone] = world(1).run(on_ranks.files, "gpt", "dp=1", str(tmp_path / "one"))
    ranks = [n for name, n in sizes.items() if name.startswith("rank-")]
    # each rank's file also has a header and its random state
    own = 24_000
    assert len(ranks) == 4 and sum(ranks) < alone["rank-00000.safetensors"] + 4 * own
    assert max(ranks) < alone["rank-00000.safetensors"] / 4 + 1.2 * own


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp=8", "dp=8,zero=2,shard=4", "dp=8,zero=3"])
def test_saved_on_four_loaded_on_eight(world: Worlds, tmp_path: Path, plan: str) -> None:
    [state, *_] = world(4).run(on_ranks.save, "gpt", "dp=4,zero=3", str(tmp_path), 2)
    for result in spawn(on_ranks.loaded, "gpt", plan, str(tmp_path), ranks=8):
        equal(state, result)


def test_every_sample_once_an_epoch(world: Worlds, tmp_path: Path) -> None:
    """Through restarts within epochs, on different numbers of ranks: two epochs of three batches."""
    seen: Counter[int] = Counter()
    for plan, steps in (("dp=2", 1), ("dp=3,zero=1", 1), ("dp=1", 2), ("dp=2,zero=3", 1), ("dp=3", 1)):
        for ids in run(world, plan, on_ranks.ledger, plan, str(tmp_path), steps):
            seen.update(ids)
    assert seen == dict.fromkeys(range(small_jobs.SAMPLES), 2)


def test_every_packed_sample_once_an_epoch(world: Worlds, tmp_path: Path) -> None:
    """The same from packed data, with the losses of the data that was packed."""
    dl.pack(small_jobs.Samples("vector"), tmp_path / "pack", workers=1, shard_size="2KB")
    seen: Counter[int] = Counter()
    losses = []
    for plan, steps in (("dp=2", 1), ("dp=3,zero=1", 1), ("dp=1", 2), ("dp=2,zero=3", 1), ("dp=3", 1)):
        results = run(world, plan, on_ranks.packed_ledger, plan, str(tmp_path / "run"), str(tmp_path / "pack"), steps)
        losses += results[0][1]
        for ids, _ in results:
            seen.update(ids)
    assert seen == dict.fromkeys(range(small_jobs.SAMPLES), 2)
    [unpacked] = world(1).run(on_ranks.losses, "dp=1", 6)
    assert losses == pytest.approx(unpacked, rel=1e-5)


def test_failure_on_one_rank(world: Worlds, tmp_path: Path) -> None:
    for errors in world(2).run(on_ranks.one_rank_fails, str(tmp_path)):
        assert errors == ["step 1 was not saved: No space left on device"] * 2 + [str(tmp_path / "step-00000001")]


def test_another_model_is_refused_on_every_rank(world: Worlds, tmp_path: Path) -> None:
    world(2).run(on_ranks.save, "mlp", "dp=2", str(tmp_path), 1)
    for plan in ("dp=2", "dp=2,zero=3"):
        for error in world(2).run(on_ranks.refused, "named", plan, str(tmp_path)):
            assert error.startswith("InputError: the checkpoint of step 1 is of another model: 'words.weight'")


def test_damage_is_reported_on_every_rank(world: Worlds, tmp_path: Path) -> None:
    """Each rank verifies a share of the files; the result counts for all."""
    for steps in (1, 2):
        world(2).run(on_ranks.save, "mlp", "dp=2,zero=3", str(tmp_path), steps)
    shard = tmp_path / "step-00000002" / "rank-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    for result in world(2).run(on_ranks.loaded, "mlp", "dp=2,zero=3", str(tmp_path)):
        assert result["steps"] == (1, 1)
    for error in world(2).run(on_ranks.refused, "mlp", "dp=2,zero=3", str(shard.parent)):
        assert error.startswith("CorruptFile: rank-00001.safetensors is damaged")


def test_fake_engine_matches_the_engine(world: Worlds) -> None:
    """Every attribute of the fake engine exists in a real one."""
    [missing] = world(1).run(fakes.missing_in_engine)
    assert missing == []
