"""Typical rates of GPUs that were not measured: steps measured on an H200 are within 25% of prices by data sheet."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from drumline.clusters import Cluster, KernelCurve, catalogue, load
from drumline.costs import cost_model, estimate
from drumline.costs.tuning import UNMEASURED_ERROR
from drumline.costs.typical_rates import HOST_OVERHEAD, with_typical_rates
from drumline.models import zoo
from drumline.planner import search
from drumline.plans import Plan

H200 = load("dgx-h200").with_devices(1)
MEASURED = (  # docs/gpu.md, in ms; two runs of a model: their mean
    ("resnet50", 128, "precision=bf16", 57.0),
    ("resnet50", 32, "precision=bf16", 22.85),
    ("resnet50", 32, "precision=bf16,graph=true", 15.2),
    ("vit:base", 128, "precision=bf16", 57.7),
    ("vit:base", 32, "precision=bf16", 22.7),
    ("vit:base", 32, "precision=bf16,graph=true", 17.1),
    ("bert:base", 32, "precision=bf16", 54.3),
    ("bert:base", 8, "precision=bf16", 33.15),
    ("mlp:32x512", 128, "precision=bf16", 9.04),
    ("mlp:32x512", 128, "precision=bf16,graph=true", 1.47),
    ("mlp:6x8192", 4096, "precision=tf32", 38.5),
    ("vgg16", 64, "precision=tf32", 48.7),
)
WITHIN = 0.25
PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"


def stated(cluster: Cluster, **more: object) -> Cluster:
    return replace(cluster, device=replace(cluster.device, **more))  # type: ignore[arg-type]  # named fields


@pytest.mark.parametrize(("name", "batch", "plan", "milliseconds"), MEASURED)
def test_measured_steps(name: str, batch: int, plan: str, milliseconds: float) -> None:
    e = estimate(zoo.profile(name, batch_size=batch), Plan.parse(plan), H200)
    assert 1e3 * e.step_seconds == pytest.approx(milliseconds, rel=WITHIN)
    assert e.error == UNMEASURED_ERROR > WITHIN  # of other GPUs nothing is known


def test_ideals_of_the_data_sheet_are_too_fast() -> None:
    """By as much as docs/gpu.md says, in the plain rows in bf16."""
    ideal, saved = stated(H200, rates="data-sheet"), []
    for name, batch, plan, milliseconds in MEASURED:
        if plan == "precision=bf16":
            e = estimate(zoo.profile(name, batch_size=batch), Plan.parse(plan), ideal)
            saved.append(1 - 1e3 * e.step_seconds / milliseconds)
    assert f"{100 * min(saved):.0f} to {max(saved):.0%} too fast" in PAGE.read_text()


def test_a_captured_step_is_offered_where_the_gpu_waits_for_its_host() -> None:
    answer, _ = search(zoo.profile("resnet50", batch_size=32), H200)
    assert answer.best.plan == Plan.parse("precision=bf16,graph=true")


def test_numbers_of_the_cluster_file_count_instead() -> None:
    curve = KernelCurve("norm", "fp32", (1e3,), (1e12,))
    own = stated(H200, host_overhead={"forward": 1e-6}, curve=(*H200.device.curve, curve))
    typical = with_typical_rates(own).device
    assert typical.curve_of("norm", "fp32") == curve
    assert typical.host_overhead == HOST_OVERHEAD | {"forward": 1e-6}
    assert with_typical_rates(stated(H200, rates="data-sheet")).device.host_overhead == {}


def test_measured_machines_have_their_own_rates() -> None:
    measured = replace(H200, origin={"device.peak": "measured"})
    assert with_typical_rates(measured).device == replace(measured.device, rates="data-sheet")


def test_the_fitted_model_of_language_models_is_not_changed() -> None:
    profile, plan = zoo.profile("gpt:1.3b", batch_size=8), Plan.parse("precision=bf16")
    plain, typical = (
        cost_model(profile, stated(H200, rates=rates), "bf16").estimate(plan).step_seconds
        for rates in ("data-sheet", "typical")
    )
    assert plain == typical


def test_every_gpu_of_the_catalogue_has_typical_rates() -> None:
    other = {name for name in catalogue() if load(name).device.rates != "typical"}
    assert other == {"tpu-v5p", "tpu-v6e"}
