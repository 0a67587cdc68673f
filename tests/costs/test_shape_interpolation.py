"""Interpolation between measured shapes, and the two clocks of a GPU and its host."""

from __future__ import annotations

import dataclasses

import pytest

from drumline.clusters import DeviceSpec, ShapeTimes, load
from drumline.costs import estimate
from drumline.costs.kernel_time import Pricer
from drumline.costs.shape_interpolation import ShapeInterpolation, kernel_work
from drumline.models.profile import Affine, Layer, Profile, ProfiledOp
from drumline.plans import Plan

SHAPES = tuple((1.0, m, n, k) for m in (64.0, 512.0, 4096.0) for n in (64.0, 512.0, 4096.0) for k in (64.0, 4096.0))


def seconds(shape: tuple[float, ...]) -> float:
    """A device whose efficiency falls with the smallest size."""
    return kernel_work("matmul", shape) / (1e12 * min(shape[1:]) / 4096) + 1e-6


def device(**more: object) -> DeviceSpec:
    cloud = ShapeTimes("matmul", "fp32", SHAPES, tuple(map(seconds, SHAPES)))
    given: dict[str, object] = {"curve": (), "shape_times": (cloud,), **more}
    plain = DeviceSpec("d", "cuda", 1e9, 1e12, {"fp32": 1e12}, 1e-5)
    return dataclasses.replace(plain, **given)  # type: ignore[arg-type]  # of several kinds


def test_measured_shapes_are_reproduced() -> None:
    clouds = ShapeInterpolation(device())
    for shape in SHAPES:
        assert clouds.seconds("matmul", "fp32", shape) == pytest.approx(seconds(shape), rel=0.05)


def test_other_shapes_are_interpolated() -> None:
    clouds = ShapeInterpolation(device())
    for shape in ((1.0, 1024.0, 512.0, 4096.0), (1.0, 512.0, 200.0, 4096.0), (1.0, 2000.0, 4096.0, 64.0)):
        assert clouds.seconds("matmul", "fp32", shape) == pytest.approx(seconds(shape), rel=0.35)


def test_kernels_that_were_not_measured_have_no_time() -> None:
    clouds = ShapeInterpolation(device())
    assert clouds.seconds("conv", "fp32", (1.0,) * 7) is None
    assert clouds.seconds("matmul", "bf16", (1.0, 64.0, 64.0, 64.0)) is None
    assert (
        clouds.seconds("matmul", "tf32", (1.0, 64.0, 64.0, 64.0)) is not None
    )  # by fp32's, which it is no slower than


def test_shapes_and_times_must_match() -> None:
    with pytest.raises(ValueError, match="2 shapes but 1 times"):
        ShapeTimes("matmul", "fp32", ((1.0,), (2.0,)), (1.0,))
    with pytest.raises(ValueError, match="different numbers of sizes"):
        ShapeTimes("matmul", "fp32", ((1.0,), (2.0, 3.0)), (1.0, 1.0))


def product(shape: tuple[float, ...], flops: float, phase: str = "forward", count: int = 1) -> ProfiledOp:
    sizes = tuple(Affine(s) for s in shape)
    return ProfiledOp("mm", "matmul", phase, Affine(flops), Affine(1.0), count=count, shape=sizes)


def test_an_operator_that_ranks_divide_is_not_priced_by_its_shape() -> None:
    shape = (1.0, 512.0, 512.0, 4096.0)
    whole, half = product(shape, kernel_work("matmul", shape)), product(shape, kernel_work("matmul", shape) / 2)
    pricer = Pricer(Profile("p", 1, ()), device(launch=0.0), "fp32")
    assert pricer.op_seconds(whole, 1) == pytest.approx(seconds(shape), rel=0.1)
    assert pricer.op_seconds(half, 1) == pytest.approx(kernel_work("matmul", shape) / 2 / 0.7e12)  # by the peak


def test_kernels_are_launched_ahead_of_the_gpu() -> None:
    """A layer that keeps the GPU busy gives the host time to launch many small ones."""
    large = product((1.0, 4096.0, 4096.0, 4096.0), kernel_work("matmul", (1.0, 4096.0, 4096.0, 4096.0)))
    small = product((1.0, 64.0, 64.0, 64.0), kernel_work("matmul", (1.0, 64.0, 64.0, 64.0)), count=1000)
    cluster = dataclasses.replace(load("dgx-h100").with_devices(1), device=device(launch=5e-5))

    def forward(*layers: ProfiledOp) -> float:
        profile = Profile("p", 1, tuple(Layer(str(i), "L", 1, ops=(op,)) for i, op in enumerate(layers)))
        return estimate(profile, Plan.parse("precision=fp32"), cluster).parts["forward"]

    host = 1000 * 5e-5
    busy = seconds((1.0, 4096.0, 4096.0, 4096.0))
    assert busy > host
    assert forward(small) == pytest.approx(host, rel=0.01)
    assert forward(large, small) < busy + 0.75 * host  # the host is ahead when the small ones come
    assert forward(small, large) == pytest.approx(host + busy, rel=0.06)  # it is not, when they come first
