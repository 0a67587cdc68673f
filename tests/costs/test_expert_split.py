"""Expert parallelism in the price: memory, messages, and who is offered it."""

from __future__ import annotations

import pytest

from drumline.clusters import load
from drumline.core.errors import PlanError
from drumline.costs import cost_model
from drumline.costs.collectives import exchange_seconds
from drumline.costs.expert_split import IMBALANCE
from drumline.models import zoo
from drumline.planner import search
from drumline.plans import Plan

MIXTRAL = zoo.profile("mixtral:8x7b", batch_size=64)
CLUSTER = load("dgx-h100").with_devices(64)
MODEL = cost_model(MIXTRAL, CLUSTER, "bf16")


def plan(**keys: object) -> Plan:
    return Plan(dp=64, precision="bf16", **keys)  # type: ignore[arg-type]


def test_a_rank_has_its_experts_alone() -> None:
    whole = MODEL.rank_model(plan()).profile
    part = MODEL.rank_model(plan(ep=8)).profile
    routed = sum(x.experts.parameters * x.repeats for x in whole.layers if x.experts)
    assert routed == 32 * 8 * 3 * 4096 * 14336
    assert whole.parameters - part.parameters == routed - routed // 8
    assert {x.experts.count for x in part.layers if x.experts} == {1}


def test_rows_go_to_experts_and_back_in_both_phases() -> None:
    rank = MODEL.rank_model(plan(ep=8))
    own = [m for messages in rank.messages for m in messages]
    assert [(m.phase, m.collective) for m in own] == [("forward", "all_to_all")] * 2 + [("backward", "all_to_all")] * 2
    assert own[0].bytes.per_sample == pytest.approx(IMBALANCE * 2 * 4096 * 4096 * 2)  # 2 experts per token, in bf16
    assert any("ep:" in note for note in rank.notes)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_states_by_hand(zero: int) -> None:
    """An expert's state is sharded by the ranks that have it: with ep=8, eight of the 64."""
    part = MODEL.rank_model(plan(ep=8)).profile
    routed = sum(x.experts.parameters * x.repeats for x in part.layers if x.experts)
    rest = part.parameters - routed
    expected = 8 * (rest + routed) if zero == 0 else 8 * (rest / 64 + routed / 8)
    assert MODEL.memory(plan(ep=8, zero=zero)).optimizer == pytest.approx(expected)


def test_dense_models_have_no_experts() -> None:
    dense = cost_model(zoo.profile("llama:8b", batch_size=64), CLUSTER, "bf16")
    with pytest.raises(PlanError, match="which has no experts"):
        dense.estimate(plan(ep=8))


def test_an_exchange_by_hand() -> None:
    link, wire = CLUSTER.node.link, CLUSTER.network.link  # type: ignore[union-attr]
    inside = exchange_seconds(8, 8e6, CLUSTER)
    assert inside == pytest.approx(7 * link.alpha + 7e6 / link.bandwidth)
    across = exchange_seconds(16, 16e6, CLUSTER)
    assert across == pytest.approx(wire.alpha + 8 * 8e6 / wire.bandwidth)
    assert exchange_seconds(1, 1e6, CLUSTER) == 0


def test_the_planner_offers_it() -> None:
    answer, _ = search(MIXTRAL, CLUSTER, brief=True)
    plans = [c.plan for c in answer.candidates]
    assert any(p.ep > 1 and c.fits for p, c in zip(plans, answer.candidates, strict=True))
    assert not any(p.splits_model for p in plans)  # the engine refuses it
