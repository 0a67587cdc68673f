"""Plans that split the model: one rank's part, its messages, pipeline stages, network levels, refusals."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from drumline.clusters import Cluster, DeviceSpec, Link, Network, Node, load
from drumline.core.errors import PlanError
from drumline.costs import OperatorCostModel, estimate
from drumline.costs.collectives import axis_group, between_stages, flops_per_byte, replicas, slowest_hop
from drumline.costs.data_parallel_comm import gradient_collectives
from drumline.costs.model_split import split_model
from drumline.costs.pipeline_clock import end_seconds, pipeline_seconds, time_pipeline
from drumline.costs.stages import StageLayer, cut_stages, layer_names
from drumline.models import Profile, zoo
from drumline.models.op_shapes import ConvolutionShape, dims, shape_of
from drumline.models.profile import Affine, Layer, ProfiledOp
from drumline.plans import Plan, check
from drumline.schedules import pipeline_order
from drumline.simulator.step import simulate_step

SIXTEEN = load("dgx-h100").with_devices(16)
GPT = zoo.profile("gpt:1.3b", batch_size=64)
UNET = zoo.profile("unet", batch_size=16)
PLANS = [
    "tp=2",
    "tp=8,micro=4",
    "dp=2,tp=4",
    "dp=2,tp=4,zero=1,micro=2",
    "dp=2,tp=4,zero=2,micro=2",
    "cp=2",
    "cp=2,tp=4",
    "dp=2,cp=2",
    "pp=2,micro=4",
    "pp=4,micro=8,schedule=gpipe",
    "pp=4,micro=8,schedule=zero-bubble",
    "pp=2,virtual=2,micro=4,schedule=interleaved",
    "dp=2,pp=2,tp=4,zero=1,micro=4",
    "pp=16,micro=16",
]


def parsed(text: str) -> Plan:
    plan = Plan.parse(text + ",precision=bf16")
    check(plan)
    return plan


@pytest.mark.parametrize("overlap", [0.0, 1.0])
@pytest.mark.parametrize("text", PLANS)
def test_the_timeline_agrees_with_the_estimate(text: str, overlap: float) -> None:
    plan, machines = parsed(text), replace(SIXTEEN, overlap=overlap)
    e = estimate(GPT, plan, machines)
    assert sum(e.parts.values()) == pytest.approx(e.step_seconds)
    assert sum(e.memory_parts.values()) == pytest.approx(e.memory_bytes)
    assert all(v >= 0 for v in [*e.parts.values(), *e.memory_parts.values(), e.hidden_seconds])
    timeline = simulate_step(GPT, plan, machines)
    assert timeline.all_ranks == plan.ranks
    assert timeline.seconds == pytest.approx(e.step_seconds, rel=1e-9 if plan.pp > 1 or plan.zero < 1 else 0.05)


@pytest.mark.parametrize("text", ["tile=1x2", "tile=2x2,dp=2", "tile=2x1,dp=2,zero=1"])
def test_the_timeline_of_tiles_agrees_too(text: str) -> None:
    e = estimate(UNET, parsed(text), SIXTEEN)
    timeline = simulate_step(UNET, parsed(text), SIXTEEN)
    assert timeline.seconds == pytest.approx(e.step_seconds, rel=0.05)


# -- features


def matmul_flops(profile: Profile) -> float:
    return sum(
        op.flops.per_sample * op.count * x.repeats
        for x in profile.layers
        for op in x.ops
        if op.kind in ("matmul", "attention", "attention_backward")
    )


@pytest.mark.parametrize("n", [2, 4, 8])
def test_tp_divides_matmuls_and_parameters(n: int) -> None:
    """Llama's vocabulary divides, so everything except the norms is split."""
    whole = zoo.profile("llama:8b")
    rank = split_model(whole, Plan(tp=n)).profile
    assert matmul_flops(rank) == pytest.approx(matmul_flops(whole) / n)
    norms = (2 * 32 + 1) * 4096
    assert rank.parameters == (whole.parameters - norms) // n + norms
    assert sum(x.repeats for x in rank.layers) == sum(x.repeats for x in whole.layers)


def test_gpts_vocabulary_does_not_divide() -> None:
    """50257 is odd: the table stays whole, and its gradient is summed where tokens are divided, once a step."""
    rank = split_model(GPT, Plan(tp=2))
    assert rank.profile.layers[0].parameters == GPT.layers[0].parameters
    table = 50257 * 2048
    head = rank.profile.layers[-1]
    assert table < head.tp_replicated < table + 3 * 2048  # with its norm
    sent = gradient_collectives(rank.profile, Plan(tp=2), SIXTEEN)
    assert {m.collective for m in sent} == {"all_reduce"}
    common = sum(x.tp_replicated * x.repeats for x in rank.profile.layers)
    assert sum(m.bytes for m in sent) == pytest.approx(common * GPT.parameter_bytes)


def test_replicated_computation_is_not_summed() -> None:
    """Where tokens do not divide, norms are whole on every rank, and so are their gradients."""
    odd = zoo.profile("gpt:1.3b", sequence=2047)
    assert not any(x.tp_replicated for x in split_model(odd, Plan(tp=2)).profile.layers)


def test_a_block_has_two_pairs_of_messages() -> None:
    """Attention and MLP: a gather to the columns and a scatter from the row, reversed in the backward."""
    rank = split_model(zoo.profile("llama:8b"), Plan(tp=2))
    block = max(zip(rank.profile.layers, rank.messages, strict=True), key=lambda pair: pair[0].repeats)[1]
    rows = [(t.phase, t.collective) for t in block if t.bytes.per_sample]
    assert sorted(rows) == sorted(
        [
            ("forward", "all_gather"),
            ("forward", "reduce_scatter"),
            ("backward", "all_gather"),
            ("backward", "reduce_scatter"),
        ]
        * 2
    )
    assert {t.bytes.per_sample for t in block if t.bytes.per_sample} == {2.0 * 8192 * 4096}


def test_tokens_that_do_not_divide() -> None:
    odd = zoo.profile("gpt:1.3b", sequence=2047)
    messages = [t for layer in split_model(odd, Plan(tp=2)).messages for t in layer]
    assert {t.collective for t in messages} == {"all_reduce"}
    assert split_model(odd, Plan(tp=2)).profile.layers[1].output == odd.layers[1].output


@pytest.mark.parametrize(
    ("name", "tp", "fix"), [("gpt:1.3b", 3, "tp=2"), ("llama:8b", 24, "tp=16"), ("bert:base", 8, "tp=6")]
)
def test_heads_are_respected(name: str, tp: int, fix: str) -> None:
    with pytest.raises(PlanError) as caught:
        estimate(zoo.profile(name), Plan(tp=tp, precision="bf16"), load("dgx-h100").with_devices(tp))
    assert "tp divides the heads" in caught.value.rule and f"% {tp} != 0" in caught.value.rule
    assert caught.value.fix == fix
    split_model(zoo.profile(name), Plan.parse(fix))


def test_a_model_that_cannot_be_split() -> None:
    with pytest.raises(PlanError, match="no layer of mlp:2x9 can be split over 2 ranks"):
        split_model(zoo.profile("mlp:2x9"), Plan(tp=2))


# -- tokens and tiles


def test_cp_divides_activations_and_no_parameters() -> None:
    rank = split_model(GPT, Plan(cp=4))
    assert rank.profile.parameters == GPT.parameters
    assert rank.profile.flops().per_sample == pytest.approx(GPT.flops().per_sample / 4)
    assert rank.profile.layers[1].saved.per_sample == pytest.approx(GPT.layers[1].saved.per_sample / 4)
    pair = 2 * (2048 // 4) * 2048 * GPT.activation_bytes
    block = rank.messages[1]
    assert [(t.phase, t.wide) for t in block] == [("forward", False)] * 3 + [("backward", False)] * 3 + [
        ("backward", True)
    ] * 3
    assert all(t.collective == "ring" and t.bytes == Affine(0.0, float(pair)) for t in block)


def test_the_last_rank_sees_all_tokens_of_a_causal_sequence() -> None:
    causal = replace(
        GPT,
        layers=tuple(
            replace(
                x, ops=tuple(replace(op, dims=(*op.dims[:-1], 1)) if op.kind == "attention" else op for op in x.ops)
            )
            for x in GPT.layers
        ),
    )
    even, last = (
        [
            op.flops.per_sample
            for x in split_model(p, Plan(cp=4)).profile.layers
            for op in x.ops
            if op.kind == "attention"
        ]
        for p in (GPT, causal)
    )
    assert last == pytest.approx([7 / 4 * flops for flops in even])


def test_halos_of_tiles() -> None:
    """3 x 3 at stride 1 reads two lines more: with two tiles one is a neighbour's, in between both are."""
    shape = ConvolutionShape(8, 4, 64, 32, 3, 3, 1, 1, 1, 0)
    op = ProfiledOp("convolution", "conv", "forward", Affine(0.0, 1e6), Affine(64.0, 1e3), dims=dims(shape))
    down = replace(op, dims=dims(replace(shape, kernel_rows=2, kernel_columns=2, stride_rows=2, stride_columns=2)))
    layer = Layer("a", "Conv", 288, tensors=1, ops=(op, down))
    profile = Profile("images", 8, (layer, replace(layer, name="b")))
    first, second = (
        [(t.phase, t.bytes.per_sample) for t in layer] for layer in split_model(profile, Plan(tile=(2, 1))).messages
    )
    assert second == [("forward", 32 * 8 * 4.0), ("backward", 32 * 8 * 4.0)]
    assert first == second[:1], "images need no gradient"
    both = [
        (t.axis, t.bytes.per_sample)
        for t in split_model(profile, Plan(tile=(4, 2))).messages[0]
        if t.phase == "forward"
    ]
    assert both == [("rows", 2 * 16 * 8 * 4.0), ("columns", 16 * 8 * 4.0)]
    rank = split_model(profile, Plan(tile=(4, 2))).profile.layers[0]
    assert rank.ops[0].flops.per_sample == 1e6 / 8 and rank.parameters == 288
    assert shape_of(rank.ops[0]) == replace(shape, rows=16, columns=16)


@pytest.mark.parametrize(
    ("name", "plan", "words"),
    [
        ("resnet50", "cp=2", "has no tokens"),
        ("gpt:125m", "tile=2x2", "has no convolutions"),
        ("gpt:125m", "cp=4096", "every rank has a token"),
        ("resnet50", "tile=256x1", "every tile has a row"),
    ],
)
def test_axes_that_a_model_lacks_are_refused(name: str, plan: str, words: str) -> None:
    with pytest.raises(PlanError) as caught:
        split_model(zoo.profile(name), Plan.parse(plan))
    assert words in f"{caught.value} {caught.value.rule}"


def test_a_trace_without_the_axis_is_noted() -> None:
    """The engine inspects the batch itself; the price is that of undivided work, with a note."""
    profile, machines = even_profile(2)
    traced = replace(profile, origin="traced")
    for plan in ("cp=2", "tile=1x2"):
        e = estimate(traced, Plan.parse(plan), machines)
        assert e.parts["forward"] == estimate(traced, Plan(), machines).parts["forward"]
        assert any(note.startswith(f"{plan} is priced as if it divided nothing") for note in e.notes)


# -- stages


@pytest.mark.parametrize(
    ("order", "v"),
    [("naive", 1), ("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1), ("zero-bubble", 2)],
)
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 4), (4, 4), (3, 7)])
def test_the_fast_clock_equals_the_recorded_one(order: str, v: int, p: int, m: int) -> None:
    """With uneven stages and slow links."""
    draw = random.Random(p * 100 + m)
    pipeline = pipeline_order(order, p, m, v)
    f, b, w = ([draw.uniform(0.5, 2) for _ in range(p * v)] for _ in range(3))
    t = [draw.uniform(0, 1.5) for _ in range(p * v - 1)]
    played = time_pipeline(pipeline, forward=f, backward=b, weight=w, transfer=t)
    assert end_seconds(pipeline, pipeline.homes(), f, b, w, t) == pytest.approx(played.seconds, rel=1e-12)


def even_profile(layers: int) -> tuple[Profile, Cluster]:
    """Equal layers on devices whose messages take no time."""
    ops = tuple(
        ProfiledOp("mm", "matmul", phase, Affine(0.0, k * 1e9), Affine())
        for phase, k in (("forward", 1.0), ("backward", 2.0))
    )
    layer = Layer("x.0", "Linear", 1000, tensors=1, largest=1000, ops=ops, saved=Affine(0.0, 100.0), repeats=layers)
    device = DeviceSpec("toy", "cuda", 1e9, 1e12, {"fp32": 1e12}, 0.0)
    return Profile("even", 64, (layer,)), Cluster("toy", device, Node(64, Link(0.0, 1e30)))


@pytest.mark.parametrize(
    ("order", "v"), [("naive", 1), ("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1)]
)
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 8)])
def test_equal_stages_take_the_closed_form(order: str, v: int, p: int, m: int) -> None:
    profile, machines = even_profile(16)
    plan = Plan(pp=p, virtual=v, micro=m, schedule=order)
    parts = estimate(profile, plan, machines).parts
    f, b = parts["forward"] / m, parts["backward"] / m
    separate = order == "zero-bubble"
    whole = pipeline_seconds(order, p, m, v, f, b / 2 if separate else b, b / 2 if separate else 0.0)
    assert parts["forward"] + parts["backward"] + parts["bubble"] == pytest.approx(whole)
    one = estimate(profile, Plan(micro=m), machines).parts
    assert parts["forward"] == pytest.approx(one["forward"] / p)


def stage_layers(costs: list[float], has_parameters: list[bool]) -> list[StageLayer]:
    return [
        StageLayer(0, f"x.{i}", 1.0, c, 0, 0, 0, 0, 0, own, 0, 0, 0, 0)
        for i, (c, own) in enumerate(zip(costs, has_parameters, strict=True))
    ]


@pytest.mark.parametrize("seed", range(20))
def test_the_slowest_stage_is_as_fast_as_possible(seed: int) -> None:
    """Against all possible cuts; every stage begins at a layer with parameters."""
    draw = random.Random(seed)
    costs = [draw.choice([1.0, 1.0, 2.0, 5.0, 0.1]) for _ in range(9)]
    has_parameters = [draw.random() < 0.8 for _ in costs]
    starts = [i for i, own in enumerate(has_parameters) if own][1:]
    stages = min(4, len(starts) + 1)
    best = min(
        max(sum(costs[a:b]) for a, b in itertools.pairwise([0, *at, len(costs)]))
        for at in itertools.combinations(starts, stages - 1)
    )
    cut = cut_stages(stage_layers(costs, has_parameters), stages)
    assert len(cut) == stages and all(any(x.has_parameters for x in s) for s in cut)
    assert [x.name for s in cut for x in s] == [f"x.{i}" for i in range(9)]
    assert max(sum(x.forward for x in s) for s in cut) == pytest.approx(best)


def test_boundaries_by_name() -> None:
    model = OperatorCostModel(GPT, SIXTEEN, "bf16")
    stages = model.pipeline(parsed("pp=2,micro=2,split=blocks.3")).stages
    assert [len(s) for s in stages] == [4, 22] and stages[1][0].name == "blocks.3"
    assert layer_names(GPT.layers)[-2:] == ["blocks.23", "head"]
    with pytest.raises(PlanError, match="no layer of this name"):
        model.pipeline(parsed("pp=2,micro=2,split=blocks.99"))
    with pytest.raises(PlanError, match="split"):
        model.pipeline(parsed("pp=4,micro=2,split=blocks.3"))
    with pytest.raises(PlanError, match="split"):
        model.pipeline(parsed("pp=3,micro=2,split=blocks.5+blocks.3"))


def test_more_stages_than_layers_begin_inside_layers() -> None:
    """A layer contains modules with parameters: it is cut into equal shares."""
    profile, machines = even_profile(2)
    assert estimate(profile, Plan(pp=4, micro=4), machines).parts["forward"] == pytest.approx(
        estimate(profile, Plan(micro=4), machines).parts["forward"] / 4
    )


def test_memory_of_stages() -> None:
    """1f1b keeps as many micro-batches as ranks follow, gpipe all; both ends keep the tied table."""
    model = OperatorCostModel(GPT, SIXTEEN, "bf16")
    one, all_ = (model.memory_by_stage(parsed(f"pp=4,micro=16,schedule={s}")) for s in ("1f1b", "gpipe"))
    assert one[0].activations > one[1].activations > one[2].activations
    assert all(a.activations > 2 * b.activations for a, b in zip(all_, one, strict=True))
    table = 50257 * 2048 * 4
    assert sum(m.parameters for m in one) == pytest.approx(GPT.parameters * 4 + table, rel=1e-6)


# -- axes on the network


NODES = Cluster(
    "two",
    DeviceSpec("toy", "cuda", 1e9, 1e12, {"fp32": 1e12}, 0.0),
    Node(4, Link(1e-6, 1e9)),
    network=Network(4, Link(1e-5, 1e8)),
)


@pytest.mark.parametrize(
    ("plan", "where"),
    [("pp=2,tp=2", "node"), ("pp=4", "node"), ("pp=2,tp=4", "net"), ("pp=4,tp=4", "net"), ("pp=2,dp=4", "net")],
)
def test_the_stride_of_stages_follows_the_mesh(plan: str, where: str) -> None:
    chosen = Plan.parse(plan)
    stride = chosen.ranks // chosen.pp
    inside, outside = 1e-6 + 1e6 / 1e9, 1e-5 + 1e6 / (1e8 / min(stride, 4))
    assert between_stages(1e6, chosen, NODES) == pytest.approx(inside if where == "node" else outside)


def test_axes_of_a_plan() -> None:
    plan = Plan.parse("dp=2,tp=2,cp=2,tile=2x1")
    assert [axis_group(a, plan) for a in ("tp", "cp", "columns", "rows")] == [(2, 1), (2, 2), (1, 4), (2, 4)]
    assert replicas(plan) == (8, 2), "replicas, and ranks with other parts of the samples, sum together"
    assert replicas(Plan.parse("dp=4,tp=2,zero=1,shard=2")) == (2, 4)
    assert slowest_hop(2, 1, NODES) == NODES.node.link
    assert slowest_hop(2, 4, NODES).bandwidth == 1e8 / 4


def test_tp_over_a_slow_network_costs_more() -> None:
    profile = zoo.profile("llama:8b", batch_size=16)
    assert SIXTEEN.network is not None
    slow = replace(SIXTEEN, network=replace(SIXTEEN.network, link=Link(1e-5, 1e9)))
    inside, across = (estimate(profile, parsed(p), slow).parts["communication"] for p in ("tp=8", "tp=8,cp=2"))
    assert across > inside, "keys and values leave the node"
    four = replace(slow, node=replace(slow.node, devices=4), network=replace(slow.network, nodes=4))
    assert estimate(profile, parsed("tp=8"), four).parts["communication"] > 10 * inside


def test_axes_of_size_one_change_nothing() -> None:
    """A plan with all axes 1 has the same estimate, and the model is whole."""
    model = OperatorCostModel(GPT, SIXTEEN, "bf16")
    assert model.estimate(parsed("dp=4,tp=1,pp=1,cp=1,tile=1x1")) == model.estimate(parsed("dp=4"))
    assert split_model(GPT, Plan()).profile == GPT


def test_tiles_without_halos_send_none() -> None:
    with_, without = (split_model(UNET, Plan(tile=(2, 2), halo=halo)) for halo in (True, False))
    sent = [[t for layer in rank.messages for t in layer if t.collective == "send"] for rank in (with_, without)]
    assert sent[0] and not sent[1]
    messages = [[t for layer in rank.messages for t in layer if t.collective != "send"] for rank in (with_, without)]
    assert messages[0] == messages[1], "statistics of norms still travel"
    model = OperatorCostModel(UNET, SIXTEEN, "bf16")
    with_halos, without_halos = (model.estimate(parsed(f"tile=2x2,dp=2{more}")) for more in ("", ",halo=false"))
    assert without_halos.parts["communication"] < with_halos.parts["communication"]


def test_the_cost_of_a_byte_between_stages() -> None:
    plan = Plan(pp=2, precision="bf16")
    inside, across = (flops_per_byte(p, SIXTEEN) for p in (plan, replace(plan, dp=8)))
    peak, link = SIXTEEN.device.peak["bf16"], SIXTEEN.node.link
    assert inside == pytest.approx(peak / link.bandwidth, rel=0.2) and across > 5 * inside


def test_the_bubble_is_that_of_the_timed_schedule() -> None:
    pipeline = OperatorCostModel(GPT, replace(SIXTEEN, overlap=1.0), "bf16").pipeline(parsed("pp=4,micro=8"))
    assert pipeline.bubble == pytest.approx(pipeline.times().bubble)
    assert 0.2 < pipeline.bubble < 0.5  # 3/11 where stages are equal and messages free


def test_measured_stages_are_priced_like_automatic_ones() -> None:
    measured, counted = (estimate(GPT, parsed(f"pp=4,micro=8{more}"), SIXTEEN) for more in (",split=measured", ""))
    assert measured.parts == counted.parts
