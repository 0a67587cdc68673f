"""Operators with expanded inputs, and group norms: their kind and the sizes by which they are priced."""

from __future__ import annotations

import pytest
import torch

from drumline.clusters import DeviceSpec, ShapeTimes
from drumline.costs.kernel_time import Pricer
from drumline.costs.shape_interpolation import GROUP_NORM
from drumline.models.profile import Affine, Layer, Profile, ProfiledOp
from drumline.tracing.op_costs import kind_of_call
from drumline.tracing.op_sizes import sizes_of

WHOLE = torch.zeros(4, 6, 5, 5)


@pytest.mark.parametrize(
    ("other", "kind"),
    [
        (WHOLE, "pointwise"),
        (torch.zeros(4, 6, 1, 1), "broadcast"),
        (torch.zeros(5), "broadcast"),
        (torch.zeros(4, 6, 1, 1).expand(4, 6, 5, 5), "broadcast"),
        (torch.zeros(()), "pointwise"),
        (WHOLE.to(memory_format=torch.channels_last), "transpose"),
    ],
)
def test_an_input_that_is_expanded_makes_a_kind_of_its_own(other: torch.Tensor, kind: str) -> None:
    assert kind_of_call("mul", [WHOLE, other], [WHOLE]) == kind


def test_group_norms_are_rows_of_their_groups() -> None:
    x, weight = WHOLE, torch.ones(6)
    forward = (x, weight, weight, 4, 6, 25, 3, 1e-5)
    backward = (x, x, torch.zeros(4, 3), torch.zeros(4, 3), weight, 4, 6, 25, 3, [True, True, True])
    assert sizes_of("native_group_norm", "norm", forward, {}, x) == (12, 50)
    assert sizes_of("native_group_norm_backward", "norm_backward", backward, {}, x) == (12, 50)


def test_group_norms_are_priced_by_their_own_shapes() -> None:
    shapes = ((64.0, 1e5), (64.0, 1e6))
    times = tuple(
        ShapeTimes(kind, "fp32", shapes, (seconds, 10 * seconds))
        for kind, seconds in ((GROUP_NORM, 1e-3), (f"{GROUP_NORM}_backward", 2e-3))
    )
    device = DeviceSpec("toy", "cuda", 1e9, 1e12, {"fp32": 1e12}, 2e-5, shape_times=times)
    sizes, values = (Affine(64.0), Affine(1e5)), Affine(6.4e6)
    ops = [
        ProfiledOp(f"native_group_{kind}", kind, phase, values, values, shape=sizes)
        for kind, phase in (("norm", "forward"), ("norm_backward", "backward"))
    ]
    layer = Layer("norm", "GroupNorm", 4, ops=tuple(ops))
    pricer = Pricer(Profile("toy", 4, (layer,)), device, "fp32")
    forward, backward = (pricer.layer_time(layer, phase, 1.0).kernel for phase in ("forward", "backward"))
    assert (forward, backward) == pytest.approx((1e-3, 2e-3), rel=0.05)
