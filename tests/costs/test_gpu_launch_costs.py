"""Launch overhead on the host of a GPU: by kind of operator, with recomputation, and of recurrent layers."""

from __future__ import annotations

import dataclasses

import pytest

from drumline.clusters import Cluster, DeviceSpec, Link, Node, ShapeTimes
from drumline.costs import estimate
from drumline.costs.kernel_time import (
    BACKWARD_CALL,
    BACKWARD_CAST,
    HOST_CALL,
    Pricer,
    backward_calls,
    host_calls,
    launch_overhead,
)
from drumline.costs.operator_model import launched_by
from drumline.costs.shape_interpolation import ROW_SUMS
from drumline.costs.tuning import (
    ATTENTION_CALLS,
    BACKWARD_ATTENTION_CALLS,
    CALLS_PER_OP,
    FUNCTION_CALLS,
    HALF_CONVOLUTION_CALLS,
    PARAMETER_CALLS,
    VIEW_CALLS,
)
from drumline.costs.what_if import SPEED_PROBE, speed_at_host_slowdown, with_host_slowdown
from drumline.models.profile import Affine, Layer, Profile, ProfiledOp
from drumline.plans import Plan

START = {"forward": 5e-5, "backward": 4e-5, "cast": 1e-5, "recompute": 1e-3, "selective_recompute": 3e-5}
CLOUD = ShapeTimes("recurrent", "fp32", ((64.0, 16.0, 8.0, 8.0, 1.0), (64.0, 16.0, 8.0, 8.0, 4.0)), (0.01, 0.04))
DEVICE = DeviceSpec(
    "toy",
    "cuda",
    1e9,
    1e12,
    {"fp32": 1e12},
    2e-5,
    host_overhead=START,
    in_step_slowdown={"compute": 1.5},
    shape_times=(CLOUD,),
)


def op(name: str, kind: str, phase: str = "forward", **more: object) -> ProfiledOp:
    return ProfiledOp(name, kind, phase, Affine(0.0, 1e6), Affine(0.0, 4e6), **more)  # type: ignore[arg-type]  # named


OPS = (op("mm", "matmul"), op("_to_copy", "narrow"), op("add", "pointwise"), op("mm", "matmul", "backward"))


def priced(*ops: ProfiledOp) -> tuple[Pricer, Layer]:
    layer = Layer("block", "Block", 4, ops=ops, composite=True)
    return Pricer(Profile("toy", 4, (layer,)), DEVICE, "fp32"), layer


def test_a_cast_has_less_overhead() -> None:
    assert [launch_overhead(x, DEVICE) for x in OPS] == [5e-5, 1e-5, 5e-5, 4e-5]
    plain = DeviceSpec("toy", "cuda", 1e9, 1e12, {"fp32": 1e12}, 2e-5, host_overhead={"forward": 5e-5})
    assert [launch_overhead(x, plain) for x in OPS] == [5e-5, 5e-5, 5e-5, 2e-5]


def test_recomputed_layers_have_more_overhead() -> None:
    pricer, layer = priced(*OPS)
    plain, full, selective = (
        pricer.layer_time(layer, "forward", 1.0, recompute=how) for how in ("none", "full", "selective")
    )
    assert plain.launch == pytest.approx(1.1e-4)
    assert full.launch - plain.launch == pytest.approx(1e-3)
    assert selective.launch - full.launch == pytest.approx(2 * 3e-5)  # its two operators that are no casts
    assert plain.kernel == full.kernel == selective.kernel


def test_recurrent_layers_have_no_in_step_slowdown() -> None:
    shape = tuple(Affine(n) for n in (64.0, 16.0, 8.0, 8.0))
    pricer, layer = priced(op("_cudnn_rnn", "recurrent", shape=shape, dtype="fp32"))
    time = pricer.layer_time(layer, "forward", 1.0)
    assert time.launch == time.kernel == pytest.approx(0.01, rel=0.05)
    pricer, layer = priced(OPS[0])
    assert pricer.layer_time(layer, "forward", 1.0).kernel == pytest.approx(1.5 * 4e6 / 1e12)


def test_recurrent_layers_are_launched_step_by_step() -> None:
    """Alone it takes as long as its launches; after matmuls the host may be ahead."""
    device = dataclasses.replace(DEVICE, in_step_slowdown={}, host_overhead={**START, "recurrent": 3e-4})
    shape = tuple(Affine(n) for n in (64.0, 16.0, 8.0, 8.0))
    layer = Layer("rnn", "LSTM", 4, ops=(op("_cudnn_rnn", "recurrent", shape=shape, dtype="fp32"),))
    time = Pricer(Profile("toy", 4, (layer,)), device, "fp32").layer_time(layer, "forward", 1.0)
    one = 1.6 * 64 * 3e-4  # a layer and its call, where four layers and their call take four times the measured time
    assert time.launch == pytest.approx(one) and time.kernel == pytest.approx(0.01, rel=0.05)
    four = dataclasses.replace(layer, ops=(dataclasses.replace(layer.ops[0], count=4),))
    pricer = Pricer(Profile("toy", 4, (four,)), device, "fp32")
    assert pricer.layer_time(four, "forward", 1.0).launch == pytest.approx(4 * 64 * 3e-4)
    products = Layer("before", "Linear", 4, ops=(op_of(8e9, "forward"),))
    cluster = Cluster("toy", device, Node(1, Link(1e-6, 1e10)))

    def forward(on: Cluster, *layers: Layer) -> float:
        return estimate(Profile("toy", 4, layers), Plan.parse("dp=1"), on).parts["forward"]

    assert forward(cluster, layer) == pytest.approx(one)
    assert forward(with_host_slowdown(cluster, 2.0), layer) == pytest.approx(2 * one)
    before = forward(cluster, products)
    assert before > one and forward(cluster, products, layer) == pytest.approx(before + 0.01, rel=0.05)


def test_views_and_functions_take_host_time() -> None:
    """By the counts of a layer's forward; a layer without counts is assumed to be typical."""
    device = dataclasses.replace(DEVICE, host_overhead={**START, HOST_CALL: 2e-5})
    ops = (*OPS, op("sdpa", "attention"))
    unseen = Layer("block", "Block", 4, ops=ops)
    plain = dataclasses.replace(unseen, python_calls=40)
    wordy = dataclasses.replace(plain, views=10, python_calls=240)
    assert host_calls(unseen) == CALLS_PER_OP * 3  # without the cast
    assert host_calls(plain) == pytest.approx(3 + ATTENTION_CALLS + 40 * FUNCTION_CALLS)
    assert host_calls(wordy) - host_calls(plain) == pytest.approx(10 * VIEW_CALLS + 200 * FUNCTION_CALLS)
    pricer = Pricer(Profile("toy", 4, (plain, wordy)), device, "fp32")
    for layer in (plain, wordy):
        assert pricer.layer_time(layer, "forward", 1.0).launch == pytest.approx(
            2e-5 * host_calls(layer) + START["cast"]
        )
        assert pricer.layer_time(layer, "backward", 1.0).launch == pytest.approx(START["backward"])


def test_parameters_and_layout_changes_take_host_time_in_the_backward() -> None:
    device = dataclasses.replace(DEVICE, host_overhead={**START, BACKWARD_CALL: 2e-5})
    convolutions = (op("convolution_backward", "conv_backward", "backward", dtype=t, count=2) for t in ("", "bf16"))
    ops = (*OPS, *convolutions, op("sdpa", "attention_backward", "backward"), op("_to_copy", "widen", "backward"))
    layer = Layer("block", "Block", 4, tensors=3, ops=ops)
    calls = 6 + BACKWARD_ATTENTION_CALLS + 2 * HALF_CONVOLUTION_CALLS + 3 * PARAMETER_CALLS
    assert backward_calls(layer) == pytest.approx(calls)  # without the casts
    profile = Profile("toy", 4, (layer,))
    measured, before = (
        Pricer(profile, spec, "fp32").layer_time(layer, "backward", 1.0).launch for spec in (device, DEVICE)
    )
    assert measured == pytest.approx(2e-5 * calls + START["cast"])
    own = dataclasses.replace(device, host_overhead={**device.host_overhead, BACKWARD_CAST: 3e-6})
    assert Pricer(profile, own, "fp32").layer_time(layer, "backward", 1.0).launch == pytest.approx(2e-5 * calls + 3e-6)
    assert before == pytest.approx(6 * START["backward"] + START["cast"]), "a file without the new key"
    captured = launched_by(device, Plan.parse("dp=1,graph=true"))
    assert Pricer(profile, captured, "fp32").layer_time(layer, "backward", 1.0).launch == 0.0


def test_row_sums_are_priced_by_their_width() -> None:
    cloud = ShapeTimes(ROW_SUMS, "fp32", ((1e5, 64.0), (1e5, 1024.0)), (2e-4, 5e-4))
    device = dataclasses.replace(DEVICE, shape_times=(cloud,), in_step_slowdown={})
    sizes = (Affine(1e5), Affine(64.0))
    ops = [ProfiledOp("sum", "reduce", "backward", Affine(6.4e6), Affine(2.56e7), shape=shape) for shape in (sizes, ())]
    layers = [Layer("bias", "Linear", 4, ops=(x,)) for x in ops]
    pricer = Pricer(Profile("toy", 4, tuple(layers)), device, "fp32")
    rows, plain = (pricer.layer_time(layer, "backward", 1.0).kernel for layer in layers)
    assert rows == pytest.approx(2e-4, rel=0.05) and plain < rows / 4


def test_a_slower_host_slows_steps_that_it_bounds() -> None:
    """A step of small operators slows down with its host; one that is bound by the GPU does not."""
    node = Node(1, Link(1e-6, 1e10))
    cluster = Cluster("toy", dataclasses.replace(DEVICE, host_overhead={**START, SPEED_PROBE: 0.02}), node)
    small, large = (
        Layer("block", "Block", 4, ops=(op_of(size, "forward"), op_of(size, "backward"))) for size in (1e3, 1e12)
    )
    slow = with_host_slowdown(cluster, 2.0)
    assert slow.device.host_overhead[SPEED_PROBE] == 0.02 and slow.device.host_overhead["forward"] == 1e-4
    plan = Plan.parse("dp=1")
    assert speed_at_host_slowdown(2.0, Profile("toy", 4, (small,)), plan, cluster) == pytest.approx(0.5, abs=0.1)
    assert speed_at_host_slowdown(2.0, Profile("toy", 4, (large,)), plan, cluster) == pytest.approx(1.0, abs=0.01)


def op_of(flops: float, phase: str) -> ProfiledOp:
    return ProfiledOp("mm", "matmul", phase, Affine(0.0, flops), Affine(0.0, 1e3))
