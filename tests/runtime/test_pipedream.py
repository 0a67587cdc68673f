"""Pipelines that do not drain equal a direct simulation of their delayed updates, step by step, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import parity
import pipedream_functions as on_ranks
import pytest
import small_jobs
import torch
from split_cost_functions import Words
from world import World

from drumline.clusters import load
from drumline.costs import OperatorCostModel
from drumline.plans import Plan
from drumline.runtime.dry_run import dry_run
from drumline.schedules import expected_staleness
from drumline.tracing import trace

Worlds = Callable[[int], World]
STEPS = 10
"""Three epochs and a bit: every third batch is ragged."""


def check_equal(result: dict[str, Any], reference: dict[str, Any]) -> None:
    assert result["losses"] == pytest.approx(reference["losses"], rel=1e-10)
    for name, weight in reference["weights"].items():
        difference = float((result["weights"][name] - weight).abs().max())
        assert difference <= 1e-10 * max(1.0, float(weight.abs().max())), name


CASES = [
    ("mlp", "plain", "pp=2,schedule=pipedream"),
    ("mlp", "sgd", "pp=3,schedule=pipedream"),
    ("mlp", "plain", "pp=4,schedule=pipedream"),
    ("gpt", "untied", "pp=4,schedule=pipedream"),  # with a learning rate that falls at every step
    ("mlp", "weighted", "pp=3,schedule=pipedream"),
    ("mlp", "as it is", "pp=2,micro=4,schedule=pipedream-2bw"),  # clips
    ("gpt", "as it is", "pp=3,micro=4,schedule=pipedream-2bw"),  # tied weights, clips, a falling rate
    ("gpt", "clipped sgd", "pp=4,micro=4,schedule=pipedream-2bw"),
    ("mlp", "weighted", "pp=3,micro=4,schedule=pipedream-2bw"),
]


@pytest.mark.parametrize(("job", "changes", "plan"), CASES, ids=[" ".join(case) for case in CASES])
def test_equals_the_direct_simulation(world: Worlds, job: str, changes: str, plan: str) -> None:
    p = Plan.parse(plan)
    first, *others = world(p.ranks).run(on_ranks.trained, job, changes, plan, STEPS)
    check_equal(first, on_ranks.simulated(job, changes, plan, STEPS, first["stages"]))
    assert set(first["stages"].values()) == set(range(p.pp))
    lag = p.pp - 1 if p.schedule == "pipedream" else 1
    assert first["numbers"] == list(range(STEPS))
    assert first["steps"] == (STEPS - lag, STEPS, STEPS)
    assert all(map(math.isnan, first["returned"][:lag]))
    assert first["returned"][lag:] == first["losses"][: STEPS - lag]
    assert first["staleness"] == [expected_staleness(p.schedule, p.pp, t) for t in range(STEPS)]
    versions = [r["versions"] for r in (first, *others)]
    assert versions == ([*range(p.pp, 0, -1)] if p.schedule == "pipedream" else [*[2] * (p.pp - 1), 1])
    for other in others:  # every rank has the same numbers
        assert other["losses"] == first["losses"] and other["staleness"] == first["staleness"]
        assert other["norms"] == first["norms"] and other["rate"] == first["rate"]


def test_differs_from_one_device() -> None:
    """Or the comparison would show nothing."""
    stale = on_ranks.simulated("mlp", "plain", "pp=2,schedule=pipedream", STEPS, dict.fromkeys(names_of_mlp(), 0))
    exact = parity.serial("mlp", steps=STEPS, changes={"clip": None})
    assert max(abs(a - b) for a, b in zip(stale["losses"], exact["losses"], strict=True)) > 1e-3


def names_of_mlp() -> list[str]:
    return [name for name, _ in small_jobs.MLP().named_parameters()]


@pytest.mark.parametrize("plan", ["pp=1,schedule=pipedream", "pp=1,schedule=pipedream-2bw,micro=3"])
def test_one_stage_equals_serial_sgd(world: Worlds, plan: str) -> None:
    (result,) = world(1).run(on_ranks.trained, "mlp", "sgd", plan, STEPS)
    changes = on_ranks.CHANGES["sgd"]
    check_equal(result, parity.serial("mlp", micro=Plan.parse(plan).micro, steps=STEPS, changes=changes))
    simulated = on_ranks.simulated("mlp", "sgd", plan, STEPS, dict.fromkeys(names_of_mlp(), 0))
    check_equal(simulated, parity.serial("mlp", micro=Plan.parse(plan).micro, steps=STEPS, changes=changes))
    assert Plan.parse(plan).exact


@pytest.mark.parametrize(
    ("job", "plan"), [("mlp", "pp=3,schedule=pipedream"), ("gpt", "pp=2,micro=3,schedule=pipedream-2bw")]
)
def test_staleness_restarts_after_a_drain(world: Worlds, job: str, plan: str) -> None:
    drains, p = (4, 5), Plan.parse(plan)
    changes = "plain"
    result = world(p.ranks).run(on_ranks.trained, job, changes, plan, STEPS, drains)[0]
    check_equal(result, on_ranks.simulated(job, changes, plan, STEPS, result["stages"], drains))
    since = [t - max([0, *(d for d in drains if d <= t)]) for t in range(STEPS)]
    assert result["staleness"] == [expected_staleness(p.schedule, p.pp, n) for n in since]


@pytest.mark.parametrize(
    ("job", "changes", "plan"),
    [
        ("mlp", "weighted", "dp=2,pp=2,schedule=pipedream"),
        ("masked", "as it is", "dp=2,pp=2,micro=2,schedule=pipedream-2bw"),
        ("resnet", "plain", "pp=3,schedule=pipedream"),  # running statistics
        ("mlp", "plain", "pp=3,schedule=pipedream,recompute=full"),  # layers run again, on the weights of their forward
        ("partial", "as it is", "pp=3,schedule=pipedream"),  # frozen and unused parameters
        ("dropout", "as it is", "pp=2,micro=2,schedule=pipedream-2bw,split=blocks.1"),
    ],
)
def test_other_jobs_and_keys(world: Worlds, job: str, changes: str, plan: str) -> None:
    result, *_ = results = world(Plan.parse(plan).ranks).run(on_ranks.trained, job, changes, plan, STEPS)
    if job == "dropout":  # ranks draw other masks than one device
        assert all(map(math.isfinite, result["losses"]))
        return
    reference = on_ranks.simulated(job, changes, plan, STEPS, result["stages"])
    check_equal(result, reference)
    buffers = {k: b for r in results for k, b in r["buffers"].items()}
    assert all(torch.allclose(b.double(), reference["buffers"][k].double()) for k, b in buffers.items())


def test_the_norm_is_that_of_all_stages(world: Worlds) -> None:
    for plan in ("pp=3,schedule=pipedream", "dp=2,pp=2,micro=2,schedule=pipedream-2bw"):
        result = world(Plan.parse(plan).ranks).run(on_ranks.trained, "mlp", "sgd", plan, 4)[0]
        assert result["norms"] == pytest.approx(on_ranks.simulated("mlp", "sgd", plan, 4, result["stages"])["norms"])


# -- checkpoints


@pytest.mark.parametrize(
    ("job", "changes", "plan"),
    [("mlp", "plain", "pp=3,schedule=pipedream"), ("gpt", "as it is", "pp=2,micro=2,schedule=pipedream-2bw")],
)
def test_resume_equals_a_run_that_saved_there(world: Worlds, tmp_path: Path, job: str, changes: str, plan: str) -> None:
    ranks = Plan.parse(plan).ranks
    whole, other = world(ranks).run(on_ranks.resumed, str(tmp_path), job, changes, plan, 6, STEPS)[0]
    assert all(torch.equal(whole[name], other[name]) for name in whole)
    stages = world(ranks).run(on_ranks.trained, job, changes, plan, 1)[0]["stages"]
    check_equal(
        {"losses": [], "weights": whole},
        {**on_ranks.simulated(job, changes, plan, STEPS, stages, (6,)), "losses": []},
    )


def test_evaluation_and_other_loaders(world: Worlds) -> None:
    first, second = world(2).run(on_ranks.in_between, "pp=2,schedule=pipedream")
    assert (first["flying"], first["drained"], first["kept"]) == (1, (0, 3), 5)
    assert first["numbers"] == [0, 1, 2, 3, 4, 5]
    assert first["metrics"] == second["metrics"] and math.isfinite(first["metrics"]["loss"])


def test_a_stop_file_ends_the_run_with_a_checkpoint(world: Worlds, tmp_path: Path) -> None:
    results = world(3).run(on_ranks.asked_to_stop, "pp=3,schedule=pipedream", str(tmp_path))
    steps, saved, preempted = results[0]
    assert results == [results[0]] * 3
    assert preempted and steps == saved == 3  # asked before the first: it goes with the first batch's numbers


# -- faults and refusals


@pytest.mark.parametrize(
    "plan", ["pp=2,schedule=pipedream", "pp=3,schedule=pipedream", "pp=2,micro=2,schedule=pipedream-2bw"]
)
def test_numbers_that_are_not_finite_end_the_run(world: Worlds, tmp_path: Path, plan: str) -> None:
    """The step is named, nothing is saved after it, no rank hangs, and the ranks are usable."""
    bad = on_ranks.first_bad_step(5, 1)
    assert bad > 2
    results = world(Plan.parse(plan).ranks).run(on_ranks.stopped, plan, str(tmp_path))
    for text, _, saved, usable in results:
        assert text.startswith(f"GaveUp: the loss is nan at step {bad}")
        assert "stage 0: the gradient of 'blocks.0.down.bias'; stage 1: the gradient of '" in text
        assert "nothing is saved" in text and "schedule=1f1b" in text
        assert saved <= bad and usable
    assert results[0][1] == list(range(bad))


@pytest.mark.parametrize(
    ("plan", "job", "guards", "words"),
    [
        ("pp=2,schedule=pipedream", "mlp", {}, ("clip=0.5 with schedule=pipedream", "pipedream-2bw with micro >= pp")),
        (
            "pp=2,schedule=pipedream",
            "dropout",
            {},
            ("token.weight is used in stages 0, 1", "a tied parameter has one value"),
        ),
        ("pp=2,schedule=pipedream", "named", {"nonfinite": "skip"}, ("nonfinite=skip with schedule=pipedream",)),
        ("pp=2,schedule=pipedream", "named", {"vote": 2}, ("vote=2 with schedule=pipedream", "schedule=1f1b")),
    ],
)
def test_unsupported_keys_are_refused(
    world: Worlds, plan: str, job: str, guards: dict[str, Any], words: tuple[str, ...]
) -> None:
    text = world(2).run(on_ranks.refused, job, "as it is", plan, guards)[0]
    assert all(word in text for word in words), text


def test_sends_are_released_on_the_way(world: Worlds) -> None:
    """A long run without a drain does not keep what it has sent."""
    for plan, most in (("pp=3,schedule=pipedream", 4), ("pp=2,micro=4,schedule=pipedream-2bw", 6)):
        results = world(Plan.parse(plan).ranks).run(on_ranks.many_steps, plan, 30)
        assert all(kept <= most for kept, _ in results), results
        assert [peak for _, peak in results] == list(range(Plan.parse(plan).pp, 0, -1))


# -- verification


@pytest.mark.parametrize(
    ("job", "changes", "plan"),
    [("named", "as it is", "pp=2,schedule=pipedream"), ("gpt", "as it is", "pp=2,micro=2,schedule=pipedream-2bw")],
)
def test_verify(world: Worlds, job: str, changes: str, plan: str) -> None:
    result = world(2).run(on_ranks.verified, job, changes, plan)[0]
    parity.check(result)
    delays = "1, 0" if Plan.parse(plan).micro == 1 else "1, 1"
    assert f"older by {delays} updates in stages 0 to 1" in result.reference


@pytest.mark.parametrize(("job", "broken"), [("mlp", "in place"), ("resnet", "newest")])
def test_verify_can_fail(world: Worlds, job: str, broken: str) -> None:
    """Without the stored weights, the gradients of the first stage are wrong from the second step on."""
    result = world(2).run(on_ranks.verified, job, "plain", "pp=2,schedule=pipedream", broken)[0]
    assert not result.passed
    assert result.errors["float64"] > 1e-6


# -- memory


class Deep(on_ranks.UntiedGPT):
    """Large enough for its memory to show."""

    def __init__(self) -> None:
        small_jobs.GPT.__init__(self, 64, 128, 64)
        self.blocks = torch.nn.ModuleList(small_jobs.Attention(64) for _ in range(4))
        self.head = torch.nn.Linear(64, 128, bias=False)


@pytest.mark.parametrize("plan", ["pp=4,schedule=pipedream", "pp=4,micro=4,schedule=pipedream-2bw"])
def test_predicted_memory_is_that_of_the_engine(plan: str) -> None:
    """The engine's own steps on tensors without values; stored weights, gradients and activations of every stage."""
    job = small_jobs.make("gpt", model=Deep, data=lambda: Words(128, 64), clip=None, schedule=None, batch_size=8)
    model = OperatorCostModel(trace(job), load("dgx-h100"), "fp32")
    ran = dry_run(job, plan, device="cpu")
    for rank, predicted in zip(ran.ranks, model.memory_by_stage(Plan.parse(plan)), strict=True):
        assert predicted.total == pytest.approx(rank.peak, rel=0.1)
        assert predicted.gradients == pytest.approx(rank.gradients, rel=0.01)
