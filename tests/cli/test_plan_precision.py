"""A job planned in half precision is traced in it: with its casts, and with the operators that stay in fp32."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from drumline.cli import app
from drumline.loop.inputs import load_profile, profile_in_precision
from drumline.plans import Plan

JOB = str(Path(__file__).parents[2] / "examples" / "cnn.py")


def test_a_job_is_traced_again_for_half_precision_only() -> None:
    plain = dataclasses.replace(load_profile(JOB), batch_size=48)
    assert profile_in_precision(JOB, plain, "fp32", "cuda") is plain
    assert profile_in_precision(JOB, plain, "tf32", "cuda") is plain
    half = profile_in_precision(JOB, plain, "bf16", "cuda")
    assert (half.precision, half.batch_size, half.activation_bytes) == ("bf16", 48, 2)
    assert any(op.kind in ("narrow", "widen") for x in half.layers for op in x.ops)
    assert profile_in_precision(JOB, half, "bf16", "cuda") is half


def test_zoo_models_are_scaled() -> None:
    plain = load_profile("gpt:125m")
    assert profile_in_precision("gpt:125m", plain, "bf16", "cuda") is plain


def test_candidates_are_priced_with_the_half_precision_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, for any number of candidates."""
    import drumline.planner

    seen = []
    real = drumline.planner.search

    def search(profile, cluster, **more):  # type: ignore[no-untyped-def]  # passed on
        seen.append(profile.precision)
        return real(profile, cluster, **more)

    monkeypatch.setattr("drumline.planner.search", search)
    result = CliRunner().invoke(app, ["plan", JOB, "--cluster", "dgx-a100", "--devices", "2", "--json"])
    assert result.exit_code == 0, result.output
    assert seen == ["bf16"]
    assert Plan.parse(json.loads(result.stdout)["plans"][0]["plan"]).precision == "bf16"
