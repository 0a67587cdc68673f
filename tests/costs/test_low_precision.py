"""What `precision=bf16-pure` and `fp8` cost: memory, messages, matmuls, and what rounding and scaling add."""

from __future__ import annotations

from dataclasses import replace

import pytest

from drumline.clusters import load
from drumline.core.errors import ClusterError
from drumline.costs import cost_model
from drumline.costs.kernel_time import FLOAT8_MATMULS, Pricer
from drumline.costs.operator_model import OperatorCostModel, estimate
from drumline.costs.stored_type import stored_in
from drumline.models import zoo
from drumline.planner.search import search
from drumline.plans import Plan

GPT = zoo.profile("gpt:1.3b", batch_size=8)
H100 = load("dgx-h100")


def test_eight_bytes_per_parameter() -> None:
    """Weights 2, gradients 2, Adam's two states 4: half of what fp32 weights take, and no cast copies."""
    pure, mixed = (estimate(GPT, Plan(precision=p, micro=8), H100) for p in ("bf16-pure", "bf16"))
    n = GPT.trained
    assert pure.memory_parts["optimizer"] == pytest.approx(4 * n)
    assert pure.memory_parts["gradients"] == pytest.approx(2 * n)
    assert pure.memory_parts["parameters"] == pytest.approx(2 * GPT.parameters + GPT.buffers)
    assert mixed.memory_parts["optimizer"] == pytest.approx(8 * n)
    assert pure.memory_bytes < 0.7 * mixed.memory_bytes


def test_gradient_messages_are_half_as_long() -> None:
    halves = [
        sum(m.bytes for _, m in _messages(Plan(dp=8, precision=p)) if m is not None) for p in ("bf16-pure", "bf16")
    ]
    assert halves[0] == pytest.approx(halves[1] / 2)


def _messages(plan: Plan) -> list[tuple[object, object]]:
    from drumline.costs.data_parallel_comm import layer_collectives

    return list(layer_collectives(stored_in(GPT, plan.precision), plan, H100))  # type: ignore[arg-type]


def test_rounding_is_paid_in_the_update() -> None:
    """About 200 bytes per parameter instead of 28, at the memory bandwidth."""
    pure, mixed = (estimate(GPT, Plan(precision=p, micro=8), H100) for p in ("bf16-pure", "bf16"))
    assert 4 < pure.parts["optimizer"] / mixed.parts["optimizer"] < 9


def test_a_profile_in_bf16_is_not_halved_again() -> None:
    small = stored_in(GPT, "bf16-pure")
    assert (small.parameter_bytes, small.state_per_parameter, small.optimizer_bytes) == (2, 4.0, 14.0)
    assert stored_in(small, "bf16-pure") is small
    assert stored_in(GPT, "bf16") is GPT


def test_fp8_makes_the_matmuls_of_linear_layers_faster_and_nothing_else() -> None:
    eight, half = (Pricer(GPT, H100.device, p) for p in ("fp8", "bf16"))
    faster = 0
    for layer in GPT.layers:
        for op in layer.ops:
            if op.kind == "matmul" and op.name in FLOAT8_MATMULS and op.flops.at(8) > 3e11:
                faster += 1
                assert 0.5 < eight.op_seconds(op, 8) / half.op_seconds(op, 8) < 1
            elif op.kind != "matmul":
                assert eight.op_seconds(op, 8) == half.op_seconds(op, 8)
    assert faster > 4


def test_scaling_costs_more_than_fp8_gains_on_thin_matmuls() -> None:
    thin = zoo.profile("gpt:125m", batch_size=1, sequence=64)
    kernels = replace(H100, device=replace(H100.device, rates="data-sheet"))  # a step that waits for its host has both
    model = [estimate(thin, Plan(precision=p), kernels).parts["forward"] for p in ("fp8", "bf16")]
    assert model[0] > model[1]


def test_the_rate_of_fp8_is_that_of_the_device() -> None:
    slow = replace(H100, device=replace(H100.device, peak={**H100.device.peak, "fp8": H100.device.peak["fp8"] / 4}))
    plan = Plan(dp=8, zero=1, micro=1, precision="fp8")
    assert estimate(GPT, plan, slow).parts["forward"] > 1.5 * estimate(GPT, plan, H100).parts["forward"]


def test_devices_without_fp8_are_refused() -> None:
    with pytest.raises(ClusterError, match="A100-SXM-80GB has no rate for fp8"):
        cost_model(GPT, load("dgx-a100"), "fp8")
    assert OperatorCostModel(GPT, load("dgx-a100"), "bf16-pure").estimate(Plan(precision="bf16-pure")).step_seconds > 0


def test_never_proposed_without_being_asked_for() -> None:
    answer, _ = search(GPT, H100)
    assert {c.plan.precision for c in answer.candidates} == {"bf16"}
    asked, estimates = search(GPT, H100, precision="fp8")
    assert {c.plan.precision for c in asked.candidates} == {"fp8"}
    assert all("approximate" in " ".join(e.notes) for e in estimates.values())
    assert all(c.plan.tp == c.plan.pp == 1 for c in asked.candidates)
