"""Messages of a step that share links: cases computed by hand, idle links, and the part that `simulate` names."""

from __future__ import annotations

import pytest

import drumline as dl
from drumline.clusters import load
from drumline.costs import OperatorCostModel, cost_model
from drumline.costs.data_parallel_comm import CollectiveMessage
from drumline.costs.pipeline_clock import time_pipeline
from drumline.models import zoo
from drumline.plans import Plan
from drumline.schedules import ASYNCHRONOUS, ORDERS, pipeline_order
from drumline.simulator.lanes import Lanes
from drumline.simulator.link_contention import with_link_contention
from drumline.simulator.message_flows import Flow, Leg, flow_of
from drumline.simulator.shared_pipeline import PipelineFlows, replay_shared
from drumline.simulator.step import lay_out

OUT = ("node out", 0, 0)
CROWDED = "dp=2,pp=4,micro=8,precision=bf16"
"""A stage's gradients for the stage before and its sums over replicas leave by the same port of a device."""


def on(port: tuple[str, int, int], seconds: float, startup: float = 0.0) -> Flow:
    return Flow(startup, (Leg((port,), seconds),))


def two_stages(ports: tuple[tuple[str, int, int], ...]) -> PipelineFlows:
    """One micro-batch: passes of 1 s, a message of 2 s each way, and sums of gradients of 4 s on each rank."""
    forward, backward, sums = ports
    return PipelineFlows(
        pipeline_order("gpipe", 2, 1, 1),
        {"F": [[1.0], [1.0]], "B": [[1.0], [1.0]], "W": [[0.0], [0.0]]},
        {(0, 1): on(forward, 2.0), (1, 0): on(backward, 2.0)},
        [[("sum 0", on(sums, 4.0), 0.0)], [("sum 1", on(sums, 4.0), 0.0)]],
        last=0,
    )


def test_gradients_and_activations_on_one_link_by_hand() -> None:
    """The last stage ends its backward at 5. Its message (2 s) and its sum (4 s) share the link until the message has
    arrived at 9. Stage 0 computes until 10, and sums: 1 s of the other sum is left, which takes until 12 at half the
    rate. Stage 0 has sent 1 of 4 s by then, and ends at 15. Alone, its sum would end at 5 + 2 + 1 + 4 = 12.
    """
    shared = replay_shared(two_stages((OUT, OUT, OUT)))
    assert [(t.start, t.end) for t in shared.times.transfers] == [(1.0, 3.0), (5.0, 9.0)]
    assert shared.times.seconds == pytest.approx(10.0)
    assert shared.reductions == ((("sum 0", 10.0, 15.0, 0.0),), (("sum 1", 5.0, 12.0, 0.0),))


def test_messages_on_different_links_do_not_disturb_each_other() -> None:
    alone = replay_shared(two_stages((("a", 0, 0), ("b", 0, 0), ("c", 0, 0))))
    assert alone.times.seconds == pytest.approx(8.0)
    # the sums share their link from 8 to 10: stage 0's ends at 13 instead of 12
    assert alone.reductions == ((("sum 0", 8.0, 13.0, 0.0),), (("sum 1", 5.0, 10.0, 0.0),))


@pytest.mark.parametrize("order", [name for name in ORDERS if name not in ASYNCHRONOUS])
def test_on_idle_links_every_order_has_the_times_of_its_schedule(order: str) -> None:
    v = 2 if order == "interleaved" else 1
    pipeline = pipeline_order(order, 4, 8, v)
    seconds = {kind: [1 + 0.1 * k + 0.01 * i for i in range(pipeline.stages)] for k, kind in enumerate("FBW")}
    transfer = [0.3 + 0.05 * i for i in range(pipeline.stages - 1)]
    homes = pipeline.homes()
    sends = {
        (a, b): Flow(0.1, (Leg((("rank link", homes[a], homes[b]),), transfer[min(a, b)] - 0.1),))
        for a in homes
        for b in (a - 1, a + 1)
        if b in homes and homes[a] != homes[b]
    }
    parts = {kind: [[own] for own in given] for kind, given in seconds.items()}
    expected = time_pipeline(
        pipeline, forward=seconds["F"], backward=seconds["B"], weight=seconds["W"], transfer=transfer
    )
    shared = replay_shared(PipelineFlows(pipeline, parts, sends, [[]] * 4, last=0))
    assert len(shared.times.actions) == len(expected.actions)
    ends = {(t.rank, t.action): t.end for t in expected.actions}
    for timed in shared.times.actions:
        assert timed.end == pytest.approx(ends[timed.rank, timed.action], rel=1e-9)
    assert shared.times.seconds == pytest.approx(expected.seconds, rel=1e-9)


class FlowsOnPorts:
    """Flows of a rank: what is in flight on one port, messages of layers on another or the same."""

    def __init__(self, layer: tuple[str, int, int]) -> None:
        self.layer = layer

    def waited(self, phase: tuple[int, int], seconds: float) -> Flow:
        return on(self.layer, seconds)

    def in_flight(self, message: CollectiveMessage) -> Flow:
        return on(OUT, message.seconds)


@pytest.mark.parametrize(
    ("port", "waits", "gathered"),
    [(OUT, (2.0, 4.0), 8.0), (("device out", 0, 0), (2.0, 3.0), 9.0)],
    ids=["one link", "two links"],
)
def test_a_gather_and_a_message_of_a_layer_by_hand(
    port: tuple[str, int, int], waits: tuple[float, float], gathered: float
) -> None:
    """A gather of 4 s in flight at half speed behind 2 s of compute; then a layer waits for its message of 1 s.

    On one link both take half: the layer waits until 4, when 3 - 1 = 2 s of the gather are left, which end at 8 behind
    compute. On another link the gather stands still, as the estimate counts it: 3 s are left at 3, and end at 9.
    """
    lanes = Lanes(0.5, flows=FlowsOnPorts(port))
    lanes.send(CollectiveMessage("all-gather x", "all_gather", 1.0, 4.0))
    lanes.compute("forward a", 2.0)
    lanes.block("messages of a", 1.0, (0, 0))
    lanes.compute("forward b", 8.0)
    rows = {name: (start, end) for _, name, start, end, _ in lanes.rows}
    assert rows["messages of a"] == waits
    assert rows["all-gather x"] == (0.0, gathered)


def test_a_message_occupies_its_links_for_no_longer_than_it_takes() -> None:
    assert flow_of(3.0, [((OUT,), 1.0), ((("node in", 0, 0),), 1.0)]).startup == 1.0
    short = flow_of(1.0, [((OUT,), 3.0), ((("node in", 0, 0),), 1.0)])
    assert short.startup == 0.0 and [leg.seconds for leg in short.legs] == [0.75, 0.25]
    assert short.seconds == 1.0


def test_simulate_names_the_difference_to_plan() -> None:
    simulation = dl.simulate("gpt:1.3b", CROWDED, "dgx-h100", corrections=False)
    assert simulation.estimate is not None and simulation.planned_seconds == simulation.estimate.step_seconds
    more = simulation.parts["link contention"]
    assert 0 < more < 0.01 * simulation.planned_seconds
    assert simulation.step_seconds == pytest.approx(simulation.planned_seconds + more, rel=1e-9)
    assert sum(simulation.parts.values()) == pytest.approx(simulation.step_seconds, rel=1e-9)
    assert simulation.notes[0].startswith("Link contention: ") and "`plan` expects" in simulation.notes[0]
    for memory in simulation.memory:
        assert memory.times[-1] == pytest.approx(simulation.step_seconds, rel=1e-9)


def test_slower_links_are_contended_for_longer() -> None:
    def contention(share: str) -> float:
        options = {"changes": [f"node.link.bandwidth={share}"], "corrections": False}
        return dl.simulate("gpt:1.3b", CROWDED, "dgx-h100", **options).parts["link contention"]  # type: ignore[arg-type]  # two kinds of values

    assert contention("50GB/s") > 1.5 * contention("100GB/s") > 0


def test_without_common_links_there_is_no_contention() -> None:
    profile, plan = zoo.profile("gpt:1.3b"), Plan.parse("pp=2,micro=8,precision=bf16")
    cluster = load("dgx-h100").with_devices(2)
    model = OperatorCostModel(profile, cluster, "bf16")
    layout = lay_out(model.step(plan), cost_model(profile, cluster, "bf16").estimate(plan))
    assert with_link_contention(layout, model, profile) is layout
