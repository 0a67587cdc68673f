"""What a GPU's host takes: by the kind of operator, by how a layer is recomputed; and recurrent layers, timed with it."""

from __future__ import annotations

import dataclasses

import pytest

from drumline.cluster import Cloud, Cluster, Device, Link, Node
from drumline.cost import estimate
from drumline.cost.pace import LOOK, at_pace, speed_at
from drumline.cost.work import Pricer, start_of
from drumline.model.profile import Affine, Layer, Op, Profile
from drumline.plan import Plan

START = {"forward": 5e-5, "backward": 4e-5, "cast": 1e-5, "again": 1e-3, "watched": 3e-5}
CLOUD = Cloud("recurrent", "fp32", ((64.0, 16.0, 8.0, 8.0, 1.0), (64.0, 16.0, 8.0, 8.0, 4.0)), (0.01, 0.04))
DEVICE = Device(
    "toy", "cuda", 1e9, 1e12, {"fp32": 1e12}, 2e-5, start=START, situ={"compute": 1.5}, cloud=(CLOUD,)
)  # fmt: skip


def op(name: str, kind: str, phase: str = "forward", **more: object) -> Op:
    return Op(name, kind, phase, Affine(0.0, 1e6), Affine(0.0, 4e6), **more)  # type: ignore[arg-type]  # named


OPS = (op("mm", "matmul"), op("_to_copy", "narrow"), op("add", "pointwise"), op("mm", "matmul", "backward"))


def priced(*ops: Op) -> tuple[Pricer, Layer]:
    layer = Layer("block", "Block", 4, ops=ops, composite=True)
    return Pricer(Profile("toy", 4, (layer,)), DEVICE, "fp32"), layer


def test_a_cast_costs_its_host_less() -> None:
    assert [start_of(x, DEVICE) for x in OPS] == [5e-5, 1e-5, 5e-5, 4e-5]
    plain = Device("toy", "cuda", 1e9, 1e12, {"fp32": 1e12}, 2e-5, start={"forward": 5e-5})
    assert [start_of(x, plain) for x in OPS] == [5e-5, 5e-5, 5e-5, 2e-5]


def test_layers_that_are_recomputed_cost_their_host_more() -> None:
    pricer, layer = priced(*OPS)
    plain, full, selective = (pricer.told(layer, "forward", 1.0, recompute=how) for how in ("none", "full", "selective"))
    assert plain.host == pytest.approx(1.1e-4)
    assert full.host - plain.host == pytest.approx(1e-3)
    assert selective.host - full.host == pytest.approx(2 * 3e-5)  # its two operators that are no casts
    assert plain.busy == full.busy == selective.busy


def test_recurrent_layers_are_not_slowed_once_more() -> None:
    shape = tuple(Affine(n) for n in (64.0, 16.0, 8.0, 8.0))
    pricer, layer = priced(op("_cudnn_rnn", "recurrent", shape=shape, dtype="fp32"))
    told = pricer.told(layer, "forward", 1.0)
    assert told.host == told.busy == pytest.approx(0.01, rel=0.05)
    pricer, layer = priced(OPS[0])
    assert pricer.told(layer, "forward", 1.0).busy == pytest.approx(1.5 * 4e6 / 1e12)


def test_a_gpu_is_told_of_a_recurrent_layer_while_it_is_busy_with_another() -> None:
    """Alone it takes as long as its host; after products it takes what the host needs beyond them."""
    busy = dataclasses.replace(CLOUD, kernel="recurrent_busy", seconds=(0.004, 0.016))
    device = dataclasses.replace(DEVICE, situ={}, cloud=(CLOUD, busy))
    shape = tuple(Affine(n) for n in (64.0, 16.0, 8.0, 8.0))
    layer = Layer("rnn", "LSTM", 4, ops=(op("_cudnn_rnn", "recurrent", shape=shape, dtype="fp32"),))
    told = Pricer(Profile("toy", 4, (layer,)), device, "fp32").told(layer, "forward", 1.0)
    assert (told.host, told.busy) == pytest.approx((0.01, 0.004), rel=0.05)
    products = Layer("before", "Linear", 4, ops=(op_of(5e8, "forward"),))  # some milliseconds
    cluster = Cluster("toy", device, Node(1, Link(1e-6, 1e10)))
    alone, after = (
        estimate(Profile("toy", 4, layers), Plan.parse("dp=1"), cluster).parts["forward"]
        for layers in ((layer,), (products, layer))
    )
    assert alone == pytest.approx(0.01, rel=0.05) and after == pytest.approx(0.01, rel=0.05)


def test_a_host_that_is_slower_now_slows_what_it_bounds() -> None:
    """A step of small operators takes as much longer as its host; one that the GPU bounds does not."""
    node = Node(1, Link(1e-6, 1e10))
    cluster = Cluster("toy", dataclasses.replace(DEVICE, start={**START, LOOK: 0.02}), node)
    small, large = (Layer("block", "Block", 4, ops=(op_of(size, "forward"), op_of(size, "backward"))) for size in (1e3, 1e12))
    slow = at_pace(cluster, 2.0)
    assert slow.device.start[LOOK] == 0.02 and slow.device.start["forward"] == 1e-4
    plan = Plan.parse("dp=1")
    assert speed_at(2.0, Profile("toy", 4, (small,)), plan, cluster) == pytest.approx(0.5, abs=0.1)
    assert speed_at(2.0, Profile("toy", 4, (large,)), plan, cluster) == pytest.approx(1.0, abs=0.01)


def op_of(flops: float, phase: str) -> Op:
    return Op("mm", "matmul", phase, Affine(0.0, flops), Affine(0.0, 1e3))
