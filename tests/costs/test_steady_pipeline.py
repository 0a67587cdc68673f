"""The pace of pipelines that do not drain: closed forms against many batches that are timed action by action."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.clusters import load
from drumline.costs import OperatorCostModel, estimate
from drumline.costs.pipeline_clock import time_pipeline
from drumline.costs.steady_pipeline import StageSeconds, sample_batches, steady_seconds, steady_times
from drumline.models import zoo
from drumline.plans import Plan
from drumline.schedules import batches_in_flight
from drumline.simulator.step import simulate_step

calm = settings(deadline=None, max_examples=40)  # other work on the machine is no failure
SECONDS = st.floats(0.1, 4)


def played(name: str, micros: int, batches: int, count: int, seconds: StageSeconds) -> float:
    """Seconds per batch of the last `count` batches before the pipeline drains."""
    order = batches_in_flight(name, len(seconds.forward), [micros] * batches)
    times = time_pipeline(
        order,
        forward=seconds.forward,
        backward=seconds.backward,
        transfer=seconds.transfer,
        update=seconds.update,
    )
    starts = [t.start for t in times.actions if t.action.stage == 0 and t.action.kind == "F"][::micros]
    return (starts[-1] - starts[-1 - count]) / count


@calm
@given(p=st.integers(1, 5), data=st.data())
def test_the_slowest_loop_is_the_pace_of_pipedream(p: int, data: st.DataObject) -> None:
    """With unequal stages and slow messages; over as many batches as all loops repeat in."""
    f, b, u = (data.draw(st.lists(SECONDS, min_size=p, max_size=p)) for _ in range(3))
    x = data.draw(st.lists(st.floats(0, 6), min_size=p - 1, max_size=p - 1))
    seconds = StageSeconds(f, b, x, u)
    count = 4 * math.lcm(*range(1, p + 1))
    pace = steady_seconds(sample_batches("pipedream", p, 1), 1, seconds)
    assert played("pipedream", 1, 120 + 2 * count, count, seconds) == pytest.approx(pace, rel=0.02)


@calm
@given(p=st.integers(1, 6), f=SECONDS, b=SECONDS, u=SECONDS)
def test_equal_stages_with_free_messages_never_wait(p: int, f: float, b: float, u: float) -> None:
    equal = StageSeconds([f] * p, [b] * p, [0.0] * (p - 1), [u] * p)
    assert steady_seconds(sample_batches("pipedream", p, 1), 1, equal) == pytest.approx(f + b + u)
    m = p + 2
    if p > 1:
        order = sample_batches("pipedream-2bw", p, m)
        assert steady_seconds(order, m, equal) == pytest.approx(m * (f + b) + u)
        assert played("pipedream-2bw", m, 12, 4, equal) == pytest.approx(m * (f + b) + u)


def test_messages_and_the_slowest_stage_set_the_pace() -> None:
    assert steady_seconds(
        sample_batches("pipedream", 3, 1), 1, StageSeconds([1, 2, 1], [2, 4, 2], [0, 0], [0.5, 0.5, 0.5])
    ) == pytest.approx(6.5)
    # two stages: a batch is back after f + b of both and two messages, and another one enters meanwhile
    slow = StageSeconds([1, 1], [2, 2], [0.5], [0, 0])
    assert steady_seconds(sample_batches("pipedream", 2, 1), 1, slow) == pytest.approx((6 + 1) / 2)
    assert steady_seconds(sample_batches("pipedream", 2, 1), 1, StageSeconds([1, 1], [1, 1], [9], [0, 0])) == 11


@pytest.mark.parametrize(("name", "micros"), [("pipedream", 1), ("pipedream-2bw", 4)])
def test_one_period_shows_every_action_once(name: str, micros: int) -> None:
    p = 3
    seconds = StageSeconds([1.0] * p, [2.0] * p, [0.25] * (p - 1), [0.5] * p)
    order = sample_batches(name, p, micros)
    pace, times = steady_seconds(order, micros, seconds), steady_times(order, micros, seconds)
    assert times.seconds == pytest.approx(pace)
    assert all(times.busy(rank) == pytest.approx(micros * 3 + 0.5) for rank in range(p))
    assert all(0 <= t.start <= t.end <= pace + 1e-9 for t in times.actions)
    for rank in range(p):
        own = sorted((t.start, t.end) for t in times.actions if t.rank == rank)
        assert all(b[0] >= a[1] - 1e-9 for a, b in itertools.pairwise(own)), "actions of a rank overlap"


# -- the price of a plan


@pytest.mark.parametrize("plan", ["pp=4,schedule=pipedream", "pp=4,micro=8,schedule=pipedream-2bw"])
def test_the_price_is_the_replay(plan: str) -> None:
    profile, cluster = zoo.profile("gpt:1.3b", batch_size=64), load("dgx-a100")
    chosen = Plan.parse(f"{plan},precision=fp32")
    predicted = estimate(profile, chosen, cluster)
    step = OperatorCostModel(profile, cluster, "fp32").step(chosen)
    assert step.pipeline is not None
    assert predicted.step_seconds == pytest.approx(step.pipeline.seconds)
    assert simulate_step(profile, chosen, cluster).seconds == pytest.approx(predicted.step_seconds, rel=1e-6)


def test_it_is_faster_than_1f1b_and_needs_more_memory() -> None:
    profile, cluster = zoo.profile("gpt:1.3b", batch_size=64), load("dgx-a100")
    sync, pipedream, two = (
        estimate(profile, Plan.parse(f"pp=4,micro={m},schedule={name}"), cluster)
        for m, name in ((8, "1f1b"), (1, "pipedream"), (8, "pipedream-2bw"))
    )
    assert two.step_seconds < sync.step_seconds
    assert two.parts["bubble"] < 0.5 * sync.parts["bubble"]
    assert two.memory_bytes > sync.memory_bytes
    by_stage = OperatorCostModel(profile, cluster, "fp32")
    plain = by_stage.memory_by_stage(Plan.parse("pp=4,micro=8"))
    stored = by_stage.memory_by_stage(Plan.parse("pp=4,schedule=pipedream"))
    extra = [a.parameters / b.parameters for a, b in zip(stored, plain, strict=True)]
    assert extra == pytest.approx([4, 3, 2, 1], rel=1e-3)  # stage s stores p - s versions
    twice = by_stage.memory_by_stage(Plan.parse("pp=4,micro=8,schedule=pipedream-2bw"))
    assert [a.parameters / b.parameters for a, b in zip(twice, plain, strict=True)] == pytest.approx([2, 2, 2, 1])
    assert [a.gradients / b.gradients for a, b in zip(twice, plain, strict=True)] == pytest.approx([2] * 4)
    assert pipedream.parts["bubble"] < 0.1 * pipedream.step_seconds
