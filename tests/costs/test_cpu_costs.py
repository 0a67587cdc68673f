"""Costs on a CPU: operators by name, overhead of a kernel, large outputs, idle ranks."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from drumline.clusters import (
    Cluster,
    CollectiveTable,
    DeviceSpec,
    KernelCurve,
    Link,
    Node,
    PartialOccupancy,
    ShapeTimes,
)
from drumline.core.errors import ClusterError
from drumline.costs import estimate
from drumline.costs.kernel_time import Pricer
from drumline.costs.shape_interpolation import ShapeInterpolation
from drumline.models import zoo
from drumline.models.profile import Affine, Layer, Profile, ProfiledOp
from drumline.planner.break_even import with_slower_messages
from drumline.plans import Plan
from drumline.simulator.step import simulate_step

DEVICE = DeviceSpec(
    "core",
    "cpu",
    1e10,
    1e10,
    {"fp32": 1e11},
    5e-6,
    curve=(
        KernelCurve("pointwise", "fp32", (3e3, 3e6), (3e9, 1e10)),
        KernelCurve("special", "fp32", (1e3,), (4e9,)),
        KernelCurve("bernoulli_", "fp32", (1e3,), (5e8,)),
        KernelCurve("transpose", "fp32", (1e3,), (2e9,)),
        KernelCurve("matmul", "fp32", (1e6,), (5e10,)),
        KernelCurve("new_pages", "fp32", (1e6,), (2e9,)),
        KernelCurve("update", "fp32", (1e3,), (1e10,)),
    ),
)
PROFILE = Profile("m", 16, (Layer("a", "Linear", 1000, tensors=2),))


def op(name: str, kind: str, size: float) -> ProfiledOp:
    return ProfiledOp(name, kind, "forward", Affine(), Affine(size))


def price(one: ProfiledOp, device: DeviceSpec = DEVICE) -> float:
    return Pricer(PROFILE, device, "fp32").op_seconds(one, 1)


AROUND = 5e-6 - 1e-6
"""`launch` less the smallest kernel."""


def test_an_operator_is_priced_by_its_own_name() -> None:
    assert price(op("bernoulli_", "special", 1e6)) == pytest.approx(1e6 / 5e8 + AROUND)
    assert price(op("gelu", "special", 1e6)) == pytest.approx(1e6 / 4e9 + AROUND)
    assert price(op("bernoulli", "special", 1e6)) == pytest.approx(1e6 / 4e9 + AROUND)


def test_operators_that_change_the_layout_are_priced_by_kind() -> None:
    other = dataclasses.replace(DEVICE, curve=(*DEVICE.curve, KernelCurve("clone", "fp32", (1e3,), (1e10,))))
    assert price(op("clone", "transpose", 1e6), other) == pytest.approx(1e6 / 2e9 + AROUND)
    assert price(op("clone", "pointwise", 1e6), other) == pytest.approx(1e6 / 1e10 + AROUND)


def test_the_smallest_operator_takes_one_launch() -> None:
    assert price(op("add", "pointwise", 12.0)) == pytest.approx(5e-6)


def test_large_outputs_map_new_memory() -> None:
    """Matmuls were measured with smaller outputs; the memory of a large one is mapped page by page."""
    shapes = tuple((1.0, m, m, 8.0) for m in (256.0, 512.0, 1024.0))
    device = dataclasses.replace(DEVICE, shape_times=(ShapeTimes("matmul", "fp32", shapes, (1e-5, 4e-5, 16e-5)),))

    def product(m: float) -> float:
        sizes = tuple(map(Affine, (1.0, m, m, 8.0)))
        return price(
            ProfiledOp("mm", "matmul", "backward", Affine(2 * m * m * 8), Affine(4 * m * m), shape=sizes), device
        )

    assert product(4096) - 16 * (product(1024) - AROUND) == pytest.approx(4.0 * 4096**2 / 2e9, rel=0.2)
    assert product(2048) < 5 * product(1024)


def test_recurrent_layers_of_a_cpu_run_one_after_the_other() -> None:
    device = dataclasses.replace(
        DEVICE, shape_times=(ShapeTimes("recurrent", "fp32", ((32.0, 16.0, 64.0, 64.0),), (2e-3,)),)
    )
    sizes = tuple(map(Affine, (32.0, 16.0, 64.0, 64.0)))
    layers = ProfiledOp("mkldnn_rnn_layer", "recurrent", "forward", Affine(1.0), Affine(1.0), count=2, shape=sizes)
    assert price(layers, device) == pytest.approx(2e-3 + AROUND, rel=1e-3)


def test_forward_and_backward_have_their_own_factors() -> None:
    ops = (op("add", "pointwise", 1e6), dataclasses.replace(op("add", "pointwise", 1e6), phase="backward"))
    layer = Layer("a", "Linear", 10, tensors=1, ops=ops)
    slow = dataclasses.replace(
        DEVICE, in_step_slowdown={"compute_forward": 1.5, "compute_backward": 1.25, "conv_forward": 9.0}
    )
    pricer = Pricer(PROFILE, slow, "fp32")
    alone = price(ops[0])
    assert pricer.layer_seconds(layer, "forward", 1) == pytest.approx(1.5 * alone)
    assert pricer.layer_seconds(layer, "backward", 1) == pytest.approx(1.25 * alone)


def test_each_operator_of_a_step_has_overhead() -> None:
    ops = (op("add", "pointwise", 1e6), dataclasses.replace(op("add", "pointwise", 1e6), phase="backward", count=3))
    layer = Layer("a", "Linear", 10, tensors=1, ops=ops)
    start = {"operator_forward": 1e-3, "operator_backward": 2e-3}
    pricer = Pricer(
        PROFILE, dataclasses.replace(DEVICE, host_overhead=start, in_step_slowdown={"compute_forward": 2.0}), "fp32"
    )
    alone = price(ops[0])
    assert pricer.layer_seconds(layer, "forward", 1) == pytest.approx(2.0 * alone + 1e-3)
    assert pricer.layer_seconds(layer, "backward", 1) == pytest.approx(3 * (alone + 2e-3))


def test_an_update_takes_its_kernels_and_overhead_per_tensor() -> None:
    device = dataclasses.replace(DEVICE, host_overhead={"update": 1e-4})
    seconds = Pricer(PROFILE, device, "fp32").update_seconds(PROFILE.layers[0], 28.0, 1.0, 1.0)
    assert seconds == pytest.approx(28.0 * 1000 / 1e10 + 2e-4)


def test_values_that_are_only_read_are_no_update() -> None:
    device = dataclasses.replace(DEVICE, host_overhead={"update": 1e-4}, in_step_slowdown={"update": 2.0})
    pricer = Pricer(PROFILE, device, "fp32")
    assert pricer.update_seconds(PROFILE.layers[0], 28.0, 1.0, 1.0) == pytest.approx(2 * 28.0 * 1000 / 1e10 + 2e-4)
    rate = pricer.memory_rate("reduce", 2000.0)
    assert pricer.update_seconds(PROFILE.layers[0], 4.0, 0.0, 1.0) == pytest.approx(4000 / rate + 2 * 5e-6)


def test_grouped_convolutions_are_priced_by_grouped_ones() -> None:
    """On a CPU they are other kernels: those without groups are not comparable, however near."""
    plain = [(8.0, 1.0, c, 256.0, 9.0, 1.0, 1.0, 1.0) for c in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)] * 3
    grouped = [(8.0, 1.0, 1.0, places, 9.0, 1.0, 16.0, 1.0) for places in (64.0, 256.0, 1024.0)]
    shapes = (*plain, *grouped)
    work = [2 * math.prod(s[:5]) * s[6] for s in shapes]
    seconds = tuple(w / (1e10 if s[6] == 1 else 1e9) for s, w in zip(shapes, work, strict=True))
    device = dataclasses.replace(DEVICE, launch=1e-9, shape_times=(ShapeTimes("conv", "fp32", shapes, seconds),))
    shape = (8.0, 1.0, 1.0, 400.0, 9.0, 1.0, 8.0, 1.0)
    flops = 2 * math.prod(shape[:5]) * shape[6]
    took = ShapeInterpolation(device).seconds("conv", "fp32", shape)
    assert took == pytest.approx(flops / 1e9, rel=0.2)


def cluster(**more: object) -> Cluster:
    tables = tuple(
        CollectiveTable(name, "shm", 4, (8.0, 1e6), (1e-4, 1e-3))
        for name in ("all_reduce", "all_gather", "reduce_scatter")
    )
    plain = Cluster("c", DEVICE, Node(4, Link(1e-5, 1e9)), collective=tables)
    return dataclasses.replace(plain, **more)  # type: ignore[arg-type]  # of several kinds


def test_ranks_compute_faster_when_others_are_idle() -> None:
    shared = cluster(
        partial_occupancy={"1": PartialOccupancy(0.4), "2": PartialOccupancy(0.5), "4": PartialOccupancy()}
    )
    assert [shared.compute_factor(n) for n in (1, 2, 3, 4, 8)] == pytest.approx([0.4, 0.5, 0.75, 1.0, 1.0])
    assert cluster().compute_factor(2) == 1.0
    layer = Layer("a", "Linear", 1000, tensors=2, ops=(op("add", "pointwise", 1e6),))
    profile = dataclasses.replace(PROFILE, layers=(layer,))
    for text, factor in (("dp=1", 0.4), ("dp=2", 0.5), ("dp=4", 1.0)):
        before, after = (estimate(profile, Plan.parse(text), c) for c in (cluster(), shared))
        for part in ("forward", "optimizer"):
            assert after.parts[part] == pytest.approx(factor * before.parts[part])


def test_messages_are_faster_when_other_ranks_are_idle(tmp_path: Path) -> None:
    """A measurement of some ranks is used for plans of as many; plans of all ranks are priced as before."""
    quick = tuple(dataclasses.replace(t, ranks=2, seconds=(1e-5, 1e-4)) for t in cluster().collective)
    crowded = cluster(straggler_slowdown=1.5, mid_step_message_s=0.2, sharded_unit_s=0.3)
    shared = dataclasses.replace(
        crowded, partial_occupancy={"2": PartialOccupancy(0.5, 1.1, 0.02, 0.03, quick), "4": PartialOccupancy()}
    )
    profile = zoo.profile("gpt:125m", batch_size=16)
    for text in ("dp=4", "dp=4,zero=3", "dp=2,tp=2"):
        before, after = (estimate(profile, Plan.parse(text), c) for c in (crowded, shared))
        assert before == after
    alone = {"2": PartialOccupancy(0.5), "4": PartialOccupancy()}
    two = dataclasses.replace(
        shared,
        straggler_slowdown=1.1,
        mid_step_message_s=0.02,
        sharded_unit_s=0.03,
        collective=quick,
        partial_occupancy=alone,
    )
    for text in ("dp=2", "dp=2,zero=3", "dp=1,tp=2", "dp=1,pp=2,micro=2"):
        plan = Plan.parse(text)
        assert estimate(profile, plan, shared).parts == pytest.approx(estimate(profile, plan, two).parts)
        spans, others = (simulate_step(profile, plan, c).spans for c in (shared, two))
        assert [s.end for s in spans] == pytest.approx([s.end for s in others])
    slow = with_slower_messages(shared, 2.0).with_active_ranks(2)
    assert slow.mid_step_message_s == 0.04 and slow.collective[0].seconds == (2e-5, 2e-4)
    assert (
        shared.with_active_ranks(1) == shared.with_active_ranks(2)
        and shared.with_active_ranks(3) is shared
        and shared.with_active_ranks(8) is shared
    )
    shared.save(tmp_path / "c.toml")
    assert Cluster.load(tmp_path / "c.toml") == shared


def test_a_plain_factor_of_older_files_is_read(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    cluster().save(path)
    path.write_text(path.read_text(encoding="utf-8") + "\n[fewer]\n1 = 0.4\n2 = 0.5\n4 = 1\n", encoding="utf-8")
    assert [Cluster.load(path).compute_factor(n) for n in (1, 2, 4)] == [0.4, 0.5, 1.0]
    path.write_text(path.read_text(encoding="utf-8").replace("2 = 0.5", '2 = "half"'), encoding="utf-8")
    with pytest.raises(ClusterError, match=r"partial_occupancy\.2"):
        Cluster.load(path)


def test_gradients_are_copied_into_buckets() -> None:
    profile = dataclasses.replace(PROFILE, layers=(Layer("a", "Linear", 10**7, tensors=2),))
    moved = 2.0 * 4e7 / 1e10
    sent = [estimate(profile, Plan.parse(p), cluster()).parts["communication"] for p in ("dp=4", "dp=1")]
    assert sent[1] == 0.0 and sent[0] == pytest.approx(1e-3 * 4e7 / 1e6 + moved)
