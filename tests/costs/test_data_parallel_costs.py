"""Data parallelism against hand-computed numbers: memory, bytes sent, and seconds."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import replace

import pytest

from drumline.clusters import Cluster, DeviceSpec, HostMemory, Link, Network, Node, load
from drumline.core.errors import ClusterError, InputError
from drumline.costs import Estimate, estimate
from drumline.costs.collectives import collective_seconds
from drumline.costs.data_parallel_comm import gradient_collectives, layer_collectives, parameter_collectives
from drumline.costs.memory import BUCKETS_ALIVE, peak_memory
from drumline.costs.optimizer_update import host_bytes
from drumline.models import Profile, zoo
from drumline.models.profile import Layer
from drumline.plans import Plan
from drumline.schedules import Schedule, Send, collective_schedule
from drumline.simulator.step import simulate_step
from drumline.theory.alpha_beta import NodeTopology, schedule_seconds

ALPHA, BANDWIDTH = 1e-6, 1e9
HOST = HostMemory(memory=1e9, bandwidth=1e9, copy=1e8)
DEVICE = DeviceSpec("toy", "cuda", 1e9, 1e12, {"fp32": 1e12, "bf16": 1e12, "fp16": 1e12}, 0.0, host=HOST)
NODE = Cluster("toy", DEVICE, Node(4, Link(ALPHA, BANDWIDTH)))
NODES = dataclasses.replace(NODE, network=Network(4, Link(1e-5, 1e8)))
WIDE = dataclasses.replace(NODE, node=Node(64, NODE.node.link))


def layer(name: str, numbers: int, **more: object) -> Layer:
    return Layer(name, "Linear", numbers, tensors=1, largest=numbers, shard_unit=True, **more)  # type: ignore[arg-type]


A, B = layer("a", 1000), layer("b", 3000)
PROFILE = Profile("tiny", 64, (A, B))
"""4000 numbers of 4 bytes, with 8 bytes of state each, and no activations."""


def memory(text: str) -> dict[str, float]:
    return peak_memory(PROFILE, Plan.parse(text), 1).parts()


def sent(text: str, cluster: Cluster = NODE) -> list[tuple[str, float, float]]:
    """(collective, bytes, seconds) of every message of one micro-batch, gathers of the forward alone."""
    around = layer_collectives(PROFILE, Plan.parse(text), cluster)
    return [(m.collective, m.bytes, m.seconds) for pair in around for m in pair if m]


def test_memory_of_each_zero_level() -> None:
    """At the optimizer two temporaries of the largest piece are alive: of 3000 numbers, of 1000 in a flat shard of
    1000, and of 750 where each parameter is cut in four."""
    assert memory("dp=4") == {
        "parameters": 16000,
        "gradients": 16000,
        "optimizer": 32000,
        "activations": 24000,
        "communication": 0,
        "workspace": 0,
    }
    assert memory("dp=4,zero=1") == {
        "parameters": 16000,
        "gradients": 16000,
        "optimizer": 8000,
        "activations": 8000,
        "communication": 0,
        "workspace": 0,
    }
    # while gradients travel: a quarter of them, and no more buckets in flight than there are gradients
    assert memory("dp=4,zero=2,micro=2") == {
        "parameters": 16000,
        "gradients": 4000,
        "optimizer": 8000,
        "activations": 0,
        "communication": 16000,
        "workspace": 0,
    }
    # b: its parameters gathered and copied out, its gradients copied in
    assert memory("dp=4,zero=3,micro=2") == {
        "parameters": 4000,
        "gradients": 4000,
        "optimizer": 8000,
        "activations": 0,
        "communication": 36000,
        "workspace": 0,
    }


def test_few_buckets_are_in_flight() -> None:
    many = dataclasses.replace(PROFILE, layers=tuple(layer(f"x.{i}", 1000) for i in range(40)))
    plan = Plan.parse("dp=4,zero=2,bucket=5000")
    assert peak_memory(many, plan, 1).communication == BUCKETS_ALIVE * 5000
    assert peak_memory(many, dataclasses.replace(plan, bucket=100), 1).communication == BUCKETS_ALIVE * 4000


def test_hybrid_shards_need_more_memory() -> None:
    assert memory("dp=8,shard=2,zero=1")["optimizer"] == 16000
    assert memory("dp=8,shard=4,zero=1")["optimizer"] == 8000
    assert memory("dp=8,shard=4,zero=3")["parameters"] == 4000


@pytest.mark.parametrize("name", ["gpt:1.3b", "resnet50"])
def test_each_zero_level_needs_less_memory(name: str) -> None:
    profile = zoo.profile(name)
    needs = [peak_memory(profile, Plan.parse(f"dp=8,zero={z},micro=8,precision=bf16"), 1).total for z in range(4)]
    assert needs == sorted(needs, reverse=True) and len(set(needs)) == 4
    hybrid = [peak_memory(profile, Plan.parse(f"dp=8,shard={s},zero=3,precision=bf16"), 1).total for s in (2, 4, 8)]
    assert hybrid == sorted(hybrid, reverse=True)


def test_messages_of_each_zero_level() -> None:
    """One bucket of m = 16000 bytes over p = 4: an all-reduce is a reduce-scatter and an all-gather."""
    share = ALPHA + 4000 / BANDWIDTH
    assert sent("dp=4") == [("all_reduce", 16000, pytest.approx(6 * share))]
    assert sent("dp=4,zero=1") == sent("dp=4,zero=2") == [("reduce_scatter", 16000, pytest.approx(3 * share))]
    (gather,) = parameter_collectives(PROFILE, Plan.parse("dp=4,zero=1"), NODE)
    assert (gather.bytes, gather.seconds) == (16000, pytest.approx(3 * share))
    assert (
        parameter_collectives(PROFILE, Plan.parse("dp=4"), NODE)
        == parameter_collectives(PROFILE, Plan.parse("dp=4,zero=3"), NODE)
        == []
    )
    a, b = (3 * (ALPHA + m / 4 / BANDWIDTH) for m in (4000, 12000))
    assert sent("dp=4,zero=3") == [
        ("all_gather", 4000, pytest.approx(a)),
        ("reduce_scatter", 4000, pytest.approx(a)),
        ("all_gather", 12000, pytest.approx(b)),
        ("reduce_scatter", 12000, pytest.approx(b)),
    ]


def test_buckets_are_gathered_one_by_one() -> None:
    gathers = parameter_collectives(PROFILE, Plan.parse("dp=4,zero=1,bucket=4000"), NODE)
    assert [g.bytes for g in gathers] == [4000] * 4
    assert sum(g.seconds for g in gathers) == pytest.approx(4 * 3 * (ALPHA + 1000 / BANDWIDTH))


def test_hybrid_shards_are_summed_over_replicas() -> None:
    """Four nodes of four: scattered inside a node, then four groups at once sum 4000 bytes each across four nodes."""
    inside = 3 * (ALPHA + 4000 / BANDWIDTH)
    across = 6 * (1e-5 + 1000 / (1e8 / 4))
    for zero in (1, 2):
        plan = Plan.parse(f"dp=16,shard=4,zero={zero},micro=2")
        assert sent(str(plan), NODES) == [("reduce_scatter", 16000, pytest.approx(inside))]
        (share,) = gradient_collectives(PROFILE, plan, NODES)
        assert (share.bytes, share.seconds) == (4000, pytest.approx(across))
        often = 1 if zero == 1 else 2  # the replicas meet once a step, whatever the shards do
        assert seconds(str(plan), cluster=NODES).parts["communication"] == pytest.approx((often + 1) * inside + across)
    assert gradient_collectives(PROFILE, Plan.parse("dp=16,zero=1"), NODES) == []
    around = layer_collectives(PROFILE, Plan.parse("dp=16,shard=4,zero=3"), NODES)
    assert [g.seconds for g, _ in around if g] == pytest.approx(
        [3 * (ALPHA + m / 4 / BANDWIDTH) for m in (4000, 12000)]
    )
    assert [r.seconds for _, r in around if r] == pytest.approx(
        [3 * (ALPHA + m / 4 / BANDWIDTH) + 6 * (1e-5 + m / 16 / (1e8 / 4)) for m in (4000, 12000)]
    )


@pytest.mark.parametrize(("ranks", "stride"), [(4, 4), (2, 8), (3, 4)])
def test_groups_across_nodes_equal_their_concurrent_schedules(ranks: int, stride: int) -> None:
    """All groups at once, each by its ring, priced send by send on nodes that share one port each."""
    nodes = dataclasses.replace(NODES, network=Network(ranks * stride // 4, NODES.network.link))  # type: ignore[union-attr]
    ring = collective_schedule("all_reduce", "ring", ranks)
    rounds = tuple(
        tuple(
            Send(s.src * stride + g, s.dst * stride + g, s.chunk + g * ring.chunks, s.reduce)
            for g in range(stride)
            for s in sends
        )
        for sends in ring.rounds
    )
    m = 1200 * ranks
    every = dataclasses.replace(ring, rounds=rounds) if dataclasses.is_dataclass(ring) else Schedule(rounds)
    sizes = ring.sizes(m) * stride
    seconds_ = collective_seconds("all_reduce", ranks, m, nodes, stride=stride)
    assert seconds_ == pytest.approx(schedule_seconds(every, sizes, NodeTopology.of(nodes)))


def test_strides_inside_a_node_and_between() -> None:
    near = collective_seconds("all_reduce", 2, 1e6, NODE)
    assert collective_seconds("all_reduce", 2, 1e6, NODE, stride=2) == near
    # two ranks of a group on each of two nodes: they meet inside first, and two groups share the port
    two = dataclasses.replace(NODES, network=Network(2, NODES.network.link))  # type: ignore[union-attr]
    phases = (ALPHA + 5e5 / BANDWIDTH) * 2 + 2 * (1e-5 + 5e5 / (1e8 / 2))
    assert collective_seconds("all_reduce", 4, 1e6, two, stride=2) == pytest.approx(phases)
    with pytest.raises(InputError, match="0 apart"):
        collective_seconds("all_reduce", 4, 1e6, two, stride=0)
    with pytest.raises(ClusterError, match="more than one node|ranks on toy"):
        collective_seconds("all_reduce", 4, 1e6, NODE, stride=2)


def seconds(text: str, profile: Profile = PROFILE, cluster: Cluster = NODE) -> Estimate:
    return estimate(profile, Plan.parse(text), cluster)


def test_reducing_in_every_micro_batch_is_priced() -> None:
    """No compute to hide behind: zero=1 reduces and gathers once, zero=2 reduces eight times."""
    reduce = 3 * (ALPHA + 4000 / BANDWIDTH)
    assert seconds("dp=4,zero=1,micro=8").parts["communication"] == pytest.approx(2 * reduce)
    assert seconds("dp=4,zero=2,micro=8").parts["communication"] == pytest.approx(9 * reduce)
    assert seconds("dp=4,zero=2").parts["communication"] == pytest.approx(2 * reduce)


def test_on_a_slow_link_accumulating_gradients_is_faster() -> None:
    slow = dataclasses.replace(load("dgx-h100").with_devices(8), overlap=0.9)
    slow = dataclasses.replace(slow, node=dataclasses.replace(slow.node, link=Link(1e-5, 1e9)))
    profile = zoo.profile("gpt:1.3b", batch_size=64)
    one, two = (seconds(f"dp=8,zero={z},micro=8,precision=bf16", profile, slow) for z in (1, 2))
    assert two.step_seconds > 2 * one.step_seconds
    assert two.memory_parts["gradients"] == pytest.approx(one.memory_parts["gradients"] / 8)


def test_hybrid_shards_use_fast_nodes() -> None:
    """Over slow nodes it pays to gather inside a node: in fp32, parameters travel as far as gradients do."""
    machines = load("p4d").with_devices(32)
    profile = zoo.profile("gpt:1.3b", batch_size=256)
    whole, hybrid = (seconds(f"dp=32{s},zero=3,micro=8,precision=tf32", profile, machines) for s in ("", ",shard=8"))
    assert hybrid.parts["communication"] < whole.parts["communication"]
    assert hybrid.memory_bytes > whole.memory_bytes


def test_offloaded_optimizer() -> None:
    """Gradients of 4000 numbers go down, values come up; 28 bytes a number are moved in host memory."""
    e = seconds("offload=optimizer")
    assert e.host_bytes == 4000 * (4 + 4 + 8) and e.host_limit == HOST.memory and e.fits
    assert e.memory_parts["optimizer"] == 0
    copies, update = 2 * 16000 / HOST.copy, 4000 * 28 / (0.8 * HOST.bandwidth)
    assert e.parts["optimizer"] == pytest.approx(copies + update, rel=1e-3)  # and the norm, on the device
    quarter = seconds("dp=4,zero=1,offload=optimizer")
    assert quarter.host_bytes == e.host_bytes / 4
    assert quarter.parts["optimizer"] == pytest.approx((copies + update) / 4, rel=1e-3)


def test_offloaded_parameters() -> None:
    """Each unit is copied to the device when it is gathered, its gradients back; nothing stays on the device."""
    e = seconds("dp=4,zero=3,offload=all")
    assert {k for k, v in e.memory_parts.items() if v} == {"communication"}
    plain = seconds("dp=4,zero=3")
    # a stays gathered between forward and backward, b is copied twice; both send their gradients down
    moved = (1000 + 2 * 3000 + 4000) * 4 / 4 / HOST.copy
    assert e.parts["communication"] - plain.parts["communication"] == pytest.approx(moved)
    assert e.parts["optimizer"] == pytest.approx(1000 * (28 + 4) / (0.8 * HOST.bandwidth))
    twice = seconds("dp=4,zero=3,offload=all,micro=2")
    added = 3 * 4000 / (0.8 * HOST.bandwidth)
    assert twice.parts["communication"] == pytest.approx(2 * e.parts["communication"] + added)


def test_one_rank_offloads() -> None:
    """Nothing is gathered, so nothing is prefetched: copies are exposed."""
    e = seconds("zero=3,offload=all")
    assert e.parts["communication"] == pytest.approx((1000 + 2 * 3000 + 4000) * 4 / HOST.copy)
    assert e.memory_bytes < seconds("").memory_bytes
    assert e.host_bytes == host_bytes(PROFILE, Plan.parse("zero=3,offload=all")) == 4000 * 16


def test_host_memory_is_a_separate_limit() -> None:
    small = dataclasses.replace(NODE, device=dataclasses.replace(DEVICE, host=dataclasses.replace(HOST, memory=5e4)))
    e = seconds("offload=optimizer", cluster=small)
    assert not e.fits and e.lacks == ("host", 64000 - 50000)
    assert "48.8 KiB of the host" in str(e)
    assert seconds("", cluster=small).fits


def test_a_cpu_offloads_nothing() -> None:
    machines = dataclasses.replace(NODE, device=dataclasses.replace(DEVICE, kind="cpu", host=None))
    plain, moved = (seconds(f"dp=2,zero=3,offload={o}", cluster=machines) for o in ("none", "all"))
    assert "moves nothing" in moved.notes[0]
    assert dataclasses.replace(moved, plan=plain.plan, notes=()) == plain


def test_a_cluster_without_host_memory() -> None:
    machines = dataclasses.replace(NODE, device=dataclasses.replace(DEVICE, host=None))
    with pytest.raises(ClusterError, match="offloading from toy cannot be priced") as caught:
        seconds("offload=optimizer", cluster=machines)
    assert "[device.host]" in caught.value.fix


def test_half_precisions_cost_the_same_except_for_the_overflow_check() -> None:
    bf16, fp16 = (seconds(f"dp=4,precision={p}") for p in ("bf16", "fp16"))
    assert fp16.memory_parts == bf16.memory_parts
    check = 4000 * 2 * 4 / (0.8 * DEVICE.bandwidth)
    assert fp16.step_seconds - bf16.step_seconds == pytest.approx(check, rel=1e-6)


def test_tensors_that_a_rank_updates() -> None:
    """A GPU takes 32 tensors at once; a flat shard has a quarter of them, and one more where it is cut."""
    started = replace(DEVICE, launch=1e-3)
    many = replace(PROFILE, layers=tuple(layer(f"x.{i}", 10) for i in range(128)), optimizer_ops=10.0)
    gpu = replace(NODE, device=started)
    cpu = replace(NODE, device=replace(started, kind="cpu"))
    calls = {
        (machines.device.kind, zero): pytest.approx(
            seconds(f"dp=4,zero={zero}", many, machines).parts["optimizer"] / 1e-3
        )
        for machines in (gpu, cpu)
        for zero in (0, 1, 3)
    }
    # the norm is one operator more
    assert [calls["cuda", zero] for zero in (0, 1, 3)] == [11 * 4, 11 * (128 + 3) / 4 / 32, 11 * 4]
    assert [calls["cpu", zero] for zero in (0, 1, 3)] == [11 * 128, 11 * (128 + 3) / 4, 11 * 128]


def test_chunks_shrink_gathered_buffers() -> None:
    """b, the largest, in four parts; a is less than half as large and stays whole."""
    whole, parts = memory("dp=4,zero=3"), memory("dp=4,zero=3,chunk=4")
    assert whole["communication"] == 3000 * 12 and parts["communication"] == 1000 * 12
    chunked = [s for c, _, s in sent("dp=4,zero=3,chunk=4") if c == "all_gather"]
    assert chunked[1] == pytest.approx(4 * 3 * (ALPHA + 3000 / 4 / BANDWIDTH))
    assert any("logits are counted whole" in note for note in seconds("dp=4,zero=3,chunk=4").notes)


def test_compressed_gradients() -> None:
    m = sent("dp=4")[0][1]
    assert sent("dp=4,compress=fp16")[0][1] == m / 2
    assert sent("dp=4,compress=powersgd")[0][1] == pytest.approx(4 * 2 * (4000 * 2) ** 0.5 * 4)
    assert memory("dp=4,compress=powersgd")["gradients"] == 2 * memory("dp=4")["gradients"]
    assert any("square" in note for note in seconds("dp=4,compress=powersgd").notes)


def test_assumptions_are_noted() -> None:
    assert any("compile" in note for note in seconds("compile=true").notes)
    assert seconds("dp=4,zero=2").notes == ()


def family() -> list[str]:
    plans = [
        f"dp=16,zero={zero}{shard},micro={micro},offload={offload}"
        for zero, shard, micro, offload in itertools.product(
            (1, 2, 3), ("", ",shard=8", ",shard=4"), (1, 4), ("none", "optimizer")
        )
    ]
    plans += [f"dp=16,zero=3,micro={m},offload=all{s}" for m in (1, 4) for s in ("", ",shard=8", ",chunk=4")]
    return [*plans, "zero=3,offload=all,micro=2", "dp=16,compress=fp16"]


@pytest.mark.parametrize("overlap", [0.0, 0.9])
@pytest.mark.parametrize("text", family())
def test_the_timeline_agrees_with_the_estimate(text: str, overlap: float) -> None:
    plan = Plan.parse(text + ",precision=bf16")
    machines = dataclasses.replace(load("dgx-h100").with_devices(16), overlap=overlap)
    profile = zoo.profile("gpt:1.3b", batch_size=64)
    e = estimate(profile, plan, machines)
    assert sum(e.parts.values()) == pytest.approx(e.step_seconds)
    assert sum(e.memory_parts.values()) == pytest.approx(e.memory_bytes)
    assert all(v >= 0 for v in [*e.parts.values(), *e.memory_parts.values(), e.hidden_seconds])
    timeline = simulate_step(profile, plan, machines)
    assert timeline.seconds == pytest.approx(e.step_seconds, rel=0.05)
