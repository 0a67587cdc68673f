"""Guards: a bad number on one rank is caught on all ranks before the update, and located; diverging replicas are detected."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import guard_functions as on_ranks
import pytest
import torch
from world import World

from drumline.core.errors import InputError, PlanError
from drumline.plans import Plan
from drumline.runtime.guards.guard import Guards, SpikeDetector, StepGuard
from drumline.runtime.guards.nonfinite import RankObservation, explain, originating_ranks
from drumline.runtime.guards.replicas import CHUNK, digest
from drumline.runtime.state.buffer_snapshot import BufferSnapshot

Worlds = Callable[..., World]
PLANS = [
    "dp=2",
    "dp=2,micro=2",
    "dp=3,zero=1",
    "dp=2,zero=2,micro=2",
    "dp=2,zero=3",
    "dp=4,shard=2,zero=3",
    "dp=4,shard=2,zero=2",
]


def ranks(plan: str) -> int:
    return Plan.parse(plan).ranks


# -- non-finite numbers


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(("what", "value"), [("loss", "nan"), ("gradient", "inf"), ("input", "nan"), ("weight", "inf")])
def test_caught_before_the_update(world: Worlds, plan: str, what: str, value: str) -> None:
    n = ranks(plan)
    bad = n - 1
    for result in world(n).run(on_ranks.caught, plan, what, value, bad):
        assert result["what"].endswith("at step 2") or "at step 2 (norm" in result["what"], result
        assert result["same"] and result["clean"] and result["steps"] == 2
        where = result["where"]
        if what == "weight":
            assert f"rank {bad}: 'second.up.weight' was non-finite before the step" in where
        elif what == "input":
            assert re.match(
                rf"rank {bad}: the input of sample \d+ is non-finite, the first non-finite output is that of 'first.up'",
                where,
            )
            assert int(re.findall(r"sample (\d+)", where)[0]) in result["samples"]
        elif what == "loss":
            assert where.startswith(f"rank {bad}: the loss is non-finite, all outputs are finite; samples")
            assert result["what"] == "the loss is nan at step 2"
        else:
            assert (
                where.startswith(f"rank {bad}: the gradient of 'first.down.")
                and "outputs and loss are finite; samples" in where
            )
            assert "more is non-finite" in where
        if what != "weight" or "zero=3" not in plan:
            assert not re.search(rf"rank [^{bad}]\b", where), where
        named = {int(s) for s in re.findall(r"\d+", where.rpartition("samples ")[2])}
        assert named and named <= set(result["samples"])
        assert "--on-nonfinite skip" in result["fix"]


def test_batchnorm_spreads_a_bad_number_but_its_origin_is_found(world: Worlds) -> None:
    """After a BatchNorm all ranks' outputs are bad; the first bad output is on the rank with the bad sample."""
    for plan in ("dp=3", "dp=3,zero=3", "dp=2,zero=2"):
        n = ranks(plan)
        for result in world(n).run(on_ranks.caught, plan, "gradient", "nan", n - 1, True):
            assert result["same"] and "'first.down." in result["where"]
        for result in world(n).run(on_ranks.caught, plan, "input", "nan", 1, True):
            assert result["same"], "running statistics too"
            assert result["where"].startswith("rank 1: the input of sample") and "rank 0" not in result["where"]


def test_transient_fault(world: Worlds) -> None:
    """A gradient that is bad once cannot be attributed to a rank; a loss that was bad once can."""
    for plan in ("dp=2", "dp=2,zero=2", "dp=2,zero=3"):
        for result in world(2).run(on_ranks.caught, plan, "gradient once", "nan", 1):
            assert result["same"]
            assert re.match(
                r"rank unknown: the gradient of 'first\.\w+\.\w+'.* was non-finite, but finite on every rank when the step was repeated",
                result["where"],
            )
        for result in world(2).run(on_ranks.caught, plan, "loss once", "nan", 1):
            assert result["same"]
            assert result["where"].startswith("rank 1: its loss was non-finite, but finite when the step was repeated")


def test_single_rank(world: Worlds) -> None:
    [result] = world(1).run(on_ranks.caught, "dp=1", "gradient", "nan", 0)
    assert result["same"] and result["where"].startswith("rank 0: the gradient of 'first.down.")


def test_masks_are_not_reported(world: Worlds) -> None:
    assert all(
        w.startswith("rank 1: the loss is non-finite, all outputs are finite")
        for w in world(2).run(on_ranks.mask_in_the_model, "dp=2")
    )


@pytest.mark.parametrize("plan", ["dp=1", "dp=2", "dp=3,micro=2", "dp=2,zero=1", "dp=2,zero=3"])
def test_skipped_steps_have_no_effect(world: Worlds, plan: str) -> None:
    """Weights, statistics and schedule equal those of a run without these batches."""
    bad = (1, 4, 5)
    if plan == "dp=3,micro=2":
        [reference] = world(1).run(on_ranks.skipping, "dp=1,micro=2", bad, 8)
        expected = reference["whole"]
    else:
        [expected] = world(1).run(on_ranks.without, bad, 8)
    for result in world(ranks(plan)).run(on_ranks.skipping, plan, bad, 8):
        assert (result["steps"], result["skipped"], result["position"]) == (5, 3, 8)
        assert result["seen"] == list(range(8))
        assert result["rate"] == 0.1 / 2**5
        assert [bool(n) for n in result["notes"]] == [i in bad for i in range(8)]
        assert all("skipped: non-finite gradients at step" in result["notes"][i] for i in bad)
        assert result["ranks"] == [(ranks(plan) - 1,)] * 3 and all("first.down.weight" in n for n in result["names"])
        assert all(math.isfinite(x) for x in result["losses"])
        for k, tensor in expected.items():
            torch.testing.assert_close(result["whole"][k], tensor, rtol=1e-9, atol=1e-11, msg=k)


def test_patience(world: Worlds) -> None:
    for result in world(2).run(on_ranks.skipping, "dp=2", (1, 2, 3, 4), 8, 3):
        assert "at most patience=3 steps in a row are skipped" in result["error"]
        assert (result["steps"], result["skipped"]) == (1, 3)
    for result in world(2).run(on_ranks.skipping, "dp=2", (1, 2, 4, 5), 8, 2):
        assert result["skipped"] == 4


@pytest.mark.parametrize("plan", ["dp=2,recompute=full", "dp=2,zero=3,chunk=2", "dp=2,zero=1,micro=2,recompute=full"])
def test_located_under_other_plan_keys(world: Worlds, plan: str) -> None:
    for result in world(2).run(on_ranks.caught, plan, "gradient", "nan", 1):
        assert result["same"] and result["where"].startswith("rank 1: the gradient of 'first.down.")
        assert "parts" not in result["where"]
    for result in world(2).run(on_ranks.caught, plan, "input", "nan", 1):
        assert result["same"] and "the first non-finite output is that of 'first.up" in result["where"]


def test_fp16_overflows_are_not_faults(world: Worlds) -> None:
    for plan in ("dp=2,precision=fp16", "dp=2,zero=2,precision=fp16"):
        for result in world(2).run(on_ranks.half, plan, "gradient"):
            assert result == {"steps": 3, "skipped": 0, "overflows": 1, "finite": True}
        for result in world(2).run(on_ranks.half, plan, "loss"):
            assert result["steps"] == 1 and result["where"].startswith(
                "rank 1: the loss is non-finite, all outputs are finite"
            )


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"nonfinite": "skp"}, "nonfinite=skp\n  rule:  nonfinite is stop or skip\n  try:   Did you mean 'skip'"),
        ({"patience": 0}, "patience=0\n  rule:  patience is a whole number of at least 1"),
        ({"vote": -1}, "vote=-1"),
        ({"vote": True}, "vote=True"),
        ({"spike": math.nan}, "spike=nan"),
        ({"vote": 1.5}, "vote=1.5"),
    ],
)
def test_invalid_guards(values: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Guards(**values)  # type: ignore[arg-type]


def test_skip_is_refused_with_powersgd() -> None:
    plan = Plan.parse("dp=2,compress=powersgd")
    with pytest.raises(
        PlanError,
        match="nonfinite=skip with compress=powersgd\n  where: plan dp=2,compress=powersgd\n  rule:  PowerSGD",
    ):
        StepGuard(Guards(nonfinite="skip"), plan)
    StepGuard(Guards(), plan)


# -- the origin of a bad number


def test_originating_ranks() -> None:
    good, bad = RankObservation(0), RankObservation(1, loss=True, output="a", order=3)
    later = RankObservation(2, loss=True, output="b", order=5)
    assert originating_ranks([good, bad, later], communicates=False) == [bad, later]
    assert originating_ranks([good, bad, later], communicates=True) == [bad]
    assert originating_ranks(
        [RankObservation(0, gradients=("w",)), RankObservation(1, loss=True)], communicates=True
    ) == [RankObservation(1, loss=True)]
    assert (
        originating_ranks([good, RankObservation(1, inputs=(0,))], communicates=False) == []
    )  # the model handles such an input
    assert (
        originating_ranks(
            [RankObservation(0, loss=True), RankObservation(1, weights=("w",), loss=True)], communicates=False
        )[0].rank
        == 1
    )
    report = explain(
        [RankObservation(0, reduced=("w",)), RankObservation(1, reduced=("v", "w"))],
        3,
        1.0,
        math.inf,
        communicates=False,
    )
    assert report.ranks == () and report.names == ("w", "v") and "rank unknown" in report.where
    report = explain([RankObservation(0)], 3, 1.0, math.inf, communicates=False)
    assert report.where == "every gradient is finite, but their norm overflows its dtype"


# -- spikes


def test_spikes() -> None:
    spikes = SpikeDetector(8.0)
    generator = torch.Generator().manual_seed(0)
    losses = [4 * math.exp(-i / 300) + 0.1 * float(torch.randn((), generator=generator)) for i in range(1000)]
    assert [i for i, x in enumerate(losses) if spikes.add(x)] == []
    assert spikes.add(10 * losses[-1]).startswith("loss spike: ")
    assert SpikeDetector(8.0).add(1e9) == ""  # no losses to compare with yet
    quiet = SpikeDetector(0.0)
    assert not any(quiet.add(x) for x in [1.0] * 30 + [1e6])


# -- comparison of replicas


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_digests_are_the_same_on_gpu_and_cpu() -> None:
    tensor = torch.randn(2 * CHUNK + 5)
    assert int(digest(tensor.cuda())) == int(digest(tensor))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
)
def test_every_flipped_bit_changes_the_digest(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    tensor = (torch.randn(13, 7, generator=generator) * 100).to(dtype)
    plain = int(digest(tensor))
    assert plain == int(digest(tensor.clone())) == int(digest(tensor.t().contiguous().t()))
    memory = tensor.view(torch.uint8)
    for index in range(memory.numel()):
        for bit in range(8 if dtype != torch.bool else 1):
            memory.view(-1)[index] ^= 1 << bit
            assert int(digest(tensor)) != plain
            memory.view(-1)[index] ^= 1 << bit
    assert int(digest(tensor)) == plain


def test_digests_depend_on_positions_and_sizes() -> None:
    tensor = torch.randn(2 * CHUNK + 5)
    swapped = tensor.clone()
    swapped[[3, CHUNK + 3]] = tensor[[CHUNK + 3, 3]]  # the same index in two chunks
    assert int(digest(swapped)) != int(digest(tensor))
    assert int(digest(torch.zeros(3))) != int(digest(torch.zeros(4)))
    assert int(digest(torch.tensor(1.0))) == int(digest(torch.tensor([1.0])))
    assert isinstance(int(digest(torch.zeros(0))), int)


@pytest.mark.parametrize(
    ("backend", "plan"),
    [
        ("gloo", "dp=3"),
        ("gloo", "dp=3,zero=1"),
        ("gloo", "dp=3,zero=2,micro=2"),
        ("shm", "dp=3"),
    ],
)
@pytest.mark.parametrize("name", ["blocks.1.conv2.weight", "norm.running_mean"])
def test_flipped_bit_is_detected_and_its_rank_named(world: Worlds, backend: str, plan: str, name: str) -> None:
    for vote in (1, 3) if "zero" not in plan else (1,):  # an update under zero=1 and 2 makes the copies equal again
        for at in (2, 3):
            for result in world(3, backend).run(on_ranks.flipped, plan, 1, name, at, vote):
                assert at <= result["steps"] < at + vote
                assert result["where"] == f"rank 1: '{name}' differs from the majority" or vote > 1, result
                assert f"rank 1: '{name}'" in result["where"] and "rank 0" not in result["where"]
                assert "the replicas differ at step" in result["text"]


def test_two_ranks_have_no_majority(world: Worlds) -> None:
    for result in world(2).run(on_ranks.flipped, "dp=2", 1, "head.weight", 2, 1):
        assert result["where"] == "ranks 0, 1: 'head.weight' differs, and no majority shows which is right"


def test_replicas_of_shards(world: Worlds) -> None:
    for result in world(4).run(on_ranks.flipped, "dp=4,shard=2,zero=3", 3, "head.weight", 2, 1):
        assert "ranks 1, 3: 'head.weight' differs" in result["where"]


def test_without_comparison_nothing_is_detected(world: Worlds) -> None:
    """The tests above can fail: without a comparison the mismatch is not seen."""
    assert [f["text"] for f in world(2).run(on_ranks.flipped, "dp=2", 1, "head.weight", 2, 0)] == ["", ""]


@pytest.mark.parametrize(
    "plan", ["dp=1", "dp=3", "dp=2,zero=1", "dp=2,zero=2", "dp=4,shard=2,zero=3", "dp=2,zero=3", "dp=2,precision=bf16"]
)
def test_no_false_alarm(world: Worlds, plan: str) -> None:
    for name in ("cnn", "dropout", "partial"):
        for steps, why in world(ranks(plan)).run(on_ranks.clean, plan, name):
            assert steps == 4
            if plan == "dp=1":
                assert why == "one rank has no replica to compare with"
            elif plan == "dp=2,zero=3":
                assert why.startswith("under dp=2,zero=3 every parameter element is on one rank only")
                assert why.endswith("only buffers are compared") == (name == "cnn")
            else:
                assert why == ""


# -- buffers


def test_buffer_snapshot() -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3))
    model.register_buffer("table", torch.arange(4.0))
    snapshot = BufferSnapshot(model)
    for i in range(4):
        snapshot.save()
        before = {k: b.clone() for k, b in model.named_buffers()}
        model(torch.randn(5, 3))
        if i == 2:
            model.table = torch.zeros(4)  # replaced by another tensor
        assert not torch.equal(model[0].running_mean, before["0.running_mean"])
        if i:
            snapshot.restore()
            snapshot.restore()
        assert not i or all(torch.equal(b, before[k]) for k, b in model.named_buffers())
        model(torch.randn(5, 3))
    copies = {b.name: b.copy for b in snapshot._buffers}
    assert copies["table"] is None and copies["running_mean"] is not None
