"""A simulated step: as long as the plan says, drawn once for ranks that do the same, with its path, memory and links."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest

import drumline as dl
from drumline.clusters import Cluster, load
from drumline.clusters.corrections import CorrectionFactor, Corrections
from drumline.core.timeline import Span, Timeline
from drumline.costs import OperatorCostModel, cost_model
from drumline.costs.link_traffic import link_use
from drumline.models import Profile, zoo
from drumline.planner import price
from drumline.plans import Plan
from drumline.reports.step_parts import idle_share, parts_of
from drumline.simulator.critical_path import WAITING, PathPart, critical_path, path_in_words
from drumline.simulator.step import lay_out, simulate_step, unfolded

CASES = [
    ("gpt:1.3b", "dp=8", "dgx-a100"),
    ("gpt:7b", "dp=8,zero=3,micro=8", "dgx-h100"),
    ("gpt:7b", "tp=8", "dgx-h100"),
    ("gpt:2.7b", "dp=8,cp=2", "dgx-h100"),
    ("gpt:175b", "dp=4,tp=8,pp=12,micro=96,recompute=full", "dgx-a100"),
    ("llama:70b", "dp=16,zero=3,micro=2,recompute=full", "dgx-h100"),
    ("llama:8b", "dp=2,tp=4,zero=1", "a800"),
    ("gpt:30b", "pp=8,virtual=2,schedule=interleaved,micro=16", "dgx-a100"),
    ("gpt:30b", "pp=8,schedule=zero-bubble,micro=16", "dgx-h100"),
    ("gpt:13b", "dp=8,zero=3,offload=all,recompute=full", "dgx-h100"),
    ("gpt:13b", "dp=8,zero=1,offload=optimizer,micro=8", "dgx-h100"),
    ("gpt:1.3b", "dp=2,pp=4,schedule=pipedream-2bw,micro=4", "dgx-h100"),
    ("gpt:1.3b", "dp=2,pp=4,schedule=pipedream", "dgx-h100"),
    ("bert:large", "dp=32,zero=2,micro=4", "dgx-a100"),
    ("resnet50", "dp=16,zero=3", "dgx-v100"),
    ("unet", "tile=2x2,dp=2", "h100-pcie"),
    ("vit:huge", "dp=8,zero=1", "mi300x"),
]


def case(model: str, text: str, machines: str) -> tuple[Profile, Plan, Cluster]:
    plan = Plan.parse(f"{text},precision={'fp16' if machines == 'dgx-v100' else 'bf16'}")
    return zoo.profile(model), plan, load(machines).with_devices(plan.ranks)


@pytest.mark.parametrize(("model", "text", "machines"), CASES)
def test_simulate_and_plan_give_one_number(model: str, text: str, machines: str) -> None:
    profile, plan, cluster = case(model, text, machines)
    simulation = dl.simulate(profile, plan, cluster)
    planned = price(profile, cluster, plan)
    shared = simulation.parts.get("link contention", 0.0)
    assert shared == 0 or simulation.notes[0].startswith("Link contention: ")
    assert simulation.step_seconds == pytest.approx(planned.step_seconds + shared, rel=1e-9)
    assert simulation.planned_seconds == planned.step_seconds
    assert {k: v for k, v in simulation.parts.items() if k != "link contention"} == planned.parts
    # the layout of the parts, before it is made to end with the estimate, differs little
    step = OperatorCostModel(profile, cluster, plan.precision).step(plan)
    layout = lay_out(step, planned)
    assert layout.stretch == pytest.approx(1.0, rel=0.05)
    for part in ("overhead", "optimizer"):
        seconds = sum(x.seconds for x in layout.step.tails[step.slowest] if x.part == part)
        assert seconds == pytest.approx(planned.parts[part], rel=1e-6)
    path = simulation.critical_path
    assert sum(part.seconds for part in path) == pytest.approx(simulation.step_seconds, rel=1e-6)
    assert {part.rank for part in path} <= set(simulation.timeline.ranks)


def test_the_page_states_how_far_layouts_are_stretched() -> None:
    docs = Path(__file__).parents[2] / "docs"
    spec = importlib.util.spec_from_file_location("paste_layout", docs / "paste_layout.py")
    assert spec is not None and spec.loader is not None
    paste = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(paste)
    page = (docs / "simulate-steps.md").read_text()
    assert paste.pasted(page) == page, "run: python docs/paste_layout.py"
    off = {case: own[0] for case, own in paste.shares().items()}
    assert max(map(abs, off.values())) < 0.2
    # bubble and exposed messages, of which layout and estimate have different formulas, explain all of it
    for case, (longer, *parts) in paste.shares().items():
        assert longer == pytest.approx(sum(parts), abs=5e-4), case
    slow = "pp=4"
    note = dl.simulate("gpt:1.3b", f"{slow},precision=bf16", "dgx-h100").notes[0]
    assert off["gpt:1.3b", slow] > 0.1 and "to end with the estimate" in note and " (bubble +" in note


@pytest.mark.parametrize(("model", "text", "machines"), CASES)
def test_memory_over_time_has_the_peak_of_the_estimate(model: str, text: str, machines: str) -> None:
    profile, plan, cluster = case(model, text, machines)
    simulation = dl.simulate(profile, plan, cluster)
    assert [m.stage for m in simulation.memory] == list(range(plan.pp))
    assert simulation.estimate is not None
    assert max(m.peak for m in simulation.memory) == pytest.approx(simulation.estimate.memory_bytes, rel=1e-6)
    for m in simulation.memory:
        assert len(m.times) == len(m.bytes) and min(m.bytes) > 0
        assert list(m.times) == sorted(m.times) and m.times[-1] == pytest.approx(simulation.step_seconds)


def test_a_pipeline_fills_and_drains() -> None:
    """GPipe keeps all micro-batches, 1F1B as many as there are stages behind."""
    profile, cluster = zoo.profile("gpt:1.3b", batch_size=64), load("dgx-h100").with_devices(4)
    gpipe, other = (
        dl.simulate(profile, f"pp=4,micro=16,schedule={name},precision=bf16", cluster).memory[1]
        for name in ("gpipe", "1f1b")
    )
    saved = gpipe.bytes[1] - gpipe.bytes[0]
    assert gpipe.bytes[15] - gpipe.bytes[0] == pytest.approx(15 * saved) and saved > 0
    assert other.bytes[2] - other.bytes[0] == pytest.approx(2 * saved)  # three in flight, then each backward frees one
    assert other.peak < gpipe.peak - 10 * saved
    assert gpipe.bytes[-1] < gpipe.bytes[15]


def test_corrections_are_drawn() -> None:
    profile, plan, cluster = case("resnet50", "dp=8", "dgx-h100")
    factors = tuple(
        CorrectionFactor(part, value, "bf16")
        for part, value in (("forward", 2.0), ("backward", 0.5), ("communication", 3.0), ("optimizer", 1.5))
    )
    corrected = dataclasses.replace(cluster, corrections=Corrections(factors))
    e = cost_model(profile, corrected, "bf16").estimate(plan)
    timeline = simulate_step(profile, plan, corrected, estimate=e)
    assert timeline.seconds == pytest.approx(e.step_seconds, rel=1e-9)
    assert e.step_seconds != pytest.approx(e.uncorrected_seconds, rel=0.01)

    def forward(t: Timeline) -> float:
        return sum(s.end - s.start for s in t.spans if s.name.startswith("forward"))

    assert forward(timeline) == pytest.approx(2 * forward(simulate_step(profile, plan, cluster)), rel=0.05)


# -- ranks that do the same


def test_equal_ranks_are_drawn_once(tmp_path: Path) -> None:
    profile, plan, cluster = case("gpt:7b", "dp=256,tp=8,pp=8,micro=8", "dgx-h100")
    timeline = simulate_step(profile, plan, cluster)
    small = simulate_step(profile, dataclasses.replace(plan, dp=1), load("dgx-h100").with_devices(64))
    assert timeline.all_ranks == 16384 and timeline.ranks == tuple(2048 * stage for stage in range(8))
    assert set(timeline.rank_counts.values()) == {2048} and timeline.rank_label(2048) == "rank 2048 (x 2048 ranks)"
    assert {s.name for s in small.spans} <= {s.name for s in timeline.spans}  # there are no replicas in a small one
    timeline.save(tmp_path / "t.json")
    assert Timeline.load(tmp_path / "t.json") == timeline
    labels = [e["args"]["name"] for e in json.loads(timeline.to_chrome())["traceEvents"] if e["name"] == "process_name"]
    assert labels[0] == "rank 0 (x 2048 ranks)" and len(labels) == 8


def test_unfolded_ranks() -> None:
    profile, plan, cluster = case("gpt:1.3b", "dp=2,pp=2,micro=2", "dgx-h100")
    folded = simulate_step(profile, plan, cluster)
    each = unfolded(folded)
    assert each.ranks == (0, 1, 2, 3) and each.all_ranks == 4 and not each.rank_counts
    assert each.busy_seconds(3, "compute") == folded.busy_seconds(2, "compute") > 0


def test_timelines_of_earlier_files_are_read(tmp_path: Path) -> None:
    span = {"rank": 3, "lane": "compute", "name": "x", "start": 0.0, "end": 1.0}
    (tmp_path / "t.json").write_text(json.dumps({"origin": "predicted", "spans": [span]}))
    timeline = Timeline.load(tmp_path / "t.json")
    assert timeline.all_ranks == 1 and timeline.rank_label(3) == "rank 3"


# -- the critical path


def test_the_path_goes_through_messages_to_the_stage_that_waits() -> None:
    spans = (
        Span(0, "compute", "forward stage 0 m0", 0.0, 1.0),
        Span(0, "compute", "forward stage 0 m1", 1.0, 1.5),  # ends as the message does, and is on another rank
        Span(0, "communication", "F to stage 1", 1.0, 1.5),
        Span(4, "compute", "forward stage 1 m0", 1.5, 3.0),
        Span(4, "communication", "all-reduce bucket 1", 2.0, 3.0),
        Span(4, "compute", "optimizer", 3.5, 4.0),
    )
    path = critical_path(Timeline("predicted", spans))
    assert path == (
        PathPart("forward stage 0 m0", 0, 1.0),
        PathPart("F to stage 1", 0, 0.5),
        PathPart("forward stage 1 m0", 4, 1.5),
        PathPart(WAITING, 4, 0.5),
        PathPart("optimizer", 4, 0.5),
    )
    assert path_in_words(path) == [
        ("forward of stages 0 to 1", 2.5),
        ("activations to the next stage", 0.5),
        (WAITING, 0.5),
        ("optimizer", 0.5),
    ]
    assert critical_path(Timeline("predicted")) == ()


def test_a_path_in_words() -> None:
    parts = [
        PathPart("forward blocks.3 m1", 0, 3.0),
        PathPart("messages of loss m1", 0, 2.0),
        PathPart("reduce-scatter blocks.0", 0, 1.0),
        PathPart("weights stage 2 m0", 0, 0.5),
        PathPart("weights stage 5 m0", 0, 0.25),
        PathPart("copy all-gather blocks.1", 0, 0.125),
        PathPart("communication loss", 0, 0.0625),
    ]
    assert [words for words, _ in path_in_words(parts)] == [
        "forward",
        "messages of the layers",
        "reduce-scatter of gradients",
        "backward for weights of 2 stages",
        "copies of parameters from the host",
        "agreement on the loss",
    ]


# -- what overlaps


def test_stages_reduce_gradients_while_others_run() -> None:
    profile, plan, cluster = case("gpt:1.3b", "dp=2,pp=4,micro=8", "dgx-h100")
    step = OperatorCostModel(profile, cluster, plan.precision).step(plan)
    assert step.pipeline is not None
    timeline = simulate_step(profile, plan, cluster)
    begins = {
        rank: min(s.start for s in timeline.spans if s.rank == rank and s.name.startswith("all-reduce"))
        for rank in timeline.ranks
    }
    early = [rank for rank, start in begins.items() if start < step.pipeline.seconds]
    assert 2 * step.slowest not in early and len(early) == 3
    assert timeline.seconds == pytest.approx(sum(step.parts()[0].values()), rel=1e-9)


def test_copies_of_an_offloaded_optimizer_are_drawn() -> None:
    profile, plan, cluster = case("gpt:1.3b", "dp=8,zero=1,offload=optimizer", "dgx-h100")
    drawn = {s.name: s.end - s.start for s in simulate_step(profile, plan, cluster).spans}
    there, back = drawn["optimizer copy of gradients to host"], drawn["optimizer copy of parameters to device"]
    assert cluster.device.host is not None
    assert there == pytest.approx(back) == pytest.approx(profile.trained * 4 / 8 / cluster.device.host.copy)
    assert drawn["optimizer on host"] > 0
    e = OperatorCostModel(profile, cluster, plan.precision).estimate(plan)
    assert sum(v for k, v in drawn.items() if k.startswith("optimizer")) == pytest.approx(e.parts["optimizer"])


# -- links


def test_bytes_on_the_links() -> None:
    profile = zoo.profile("gpt:1.3b")
    size = 4.0 * profile.trained

    def use(text: str, devices: int) -> dict[str, float]:
        plan, cluster = Plan.parse(f"{text},precision=bf16"), load("dgx-h100").with_devices(devices)
        model = OperatorCostModel(profile, cluster, "bf16")
        rows = link_use(model, profile, plan, cluster, 2.0)
        assert all(x.busy == pytest.approx(x.bytes / x.bandwidth / 2.0) for x in rows)
        return {x.level: x.bytes for x in rows}

    assert use("dp=1", 1) == {}
    assert use("dp=8", 8) == pytest.approx({"node": 2 * 7 / 8 * size})
    # each node reduces inside, then four nodes exchange the sums once
    assert use("dp=32", 32) == pytest.approx({"node": 2 * 7 / 8 * size, "network": 2 * 3 / 4 * size})
    # sharded parameters are gathered twice and gradients scattered, half as wide
    sharded = use("dp=8,zero=3", 8)["node"]
    assert sharded == pytest.approx(7 / 8 * (2 * size / 2 + size), rel=0.1)


def test_rates() -> None:
    profile, plan, cluster = case("gpt:1.3b", "dp=8", "dgx-h100")
    s = dl.simulate(profile, plan, cluster)
    assert s.samples_per_second == pytest.approx(profile.batch_size / s.step_seconds)
    assert s.tokens_per_second is not None and s.tokens_per_second == pytest.approx(2048 * s.samples_per_second)
    flops = profile.flops().at(profile.batch_size)
    assert s.mfu == pytest.approx(flops / s.step_seconds / (8 * cluster.device.peak["bf16"])) and 0.2 < s.mfu < 0.7
    assert s.latency_seconds == s.step_seconds
    in_flight = dl.simulate(profile, "pp=4,schedule=pipedream,precision=bf16", cluster)
    # four stages: a batch meets each of them twice, while three others are on their way
    assert in_flight.latency_seconds is not None and 3 < in_flight.latency_seconds / in_flight.step_seconds < 9
    images = dl.simulate("resnet50", "dp=2", "dgx-h100")
    assert images.tokens_per_second is None and images.samples_per_second


def test_shares_of_a_folded_timeline_count_every_rank() -> None:
    spans = (Span(0, "compute", "forward", 0.0, 1.0), Span(1, "compute", "forward", 0.0, 0.5))
    assert idle_share(Timeline("predicted", spans)) == 0.25
    folded = Timeline("predicted", spans, rank_counts={1: 9})
    assert idle_share(folded) == pytest.approx(0.45)
    assert parts_of(folded) == pytest.approx({"forward": 0.55, "overhead": 0.45})
