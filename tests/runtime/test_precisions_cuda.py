"""On a GPU: bf16-pure and fp8 stay within their bounds, and fp8's matmuls run on the float8 units."""

from __future__ import annotations

from collections.abc import Iterator

import parity
import pytest
import small_jobs
import torch
from test_float8 import wide_job

import drumline as dl
from drumline.comm.environment import disconnect
from drumline.plans import Plan
from drumline.runtime.engine import initialize
from drumline.runtime.numerics.float8 import missing_float8
from drumline.runtime.verification.verify import verify

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
needs_float8 = pytest.mark.skipif(
    bool(missing_float8(torch.device("cuda" if torch.cuda.is_available() else "cpu"))), reason="no float8"
)
MORE = ["", ",zero=1,micro=2", ",zero=3", ",zero=3,recompute=full"]


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    yield
    disconnect()


def check(job: dl.Job, plan: str) -> None:
    with parity.shard_small_layers(plan):
        result = verify(job, Plan.parse(plan), steps=4)
    assert result is not None
    parity.check(result)


@pytest.mark.parametrize("name", ["gpt", "cnn", "mlp"])
@pytest.mark.parametrize("more", MORE)
def test_bf16_pure(name: str, more: str) -> None:
    check(small_jobs.make(name), f"dp=1{more},precision=bf16-pure")


@needs_float8
@pytest.mark.parametrize("more", MORE[:3])
def test_fp8(more: str) -> None:
    check(wide_job(), f"dp=1{more},precision=fp8")


@needs_float8
def test_float8_kernels_run() -> None:
    engine = initialize(wide_job(), "dp=1,precision=fp8")
    batches = list(engine.data(4))
    for batch in batches[:3]:
        engine.step(batch)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        engine.step(batches[3])
    calls = {event.key: event.count for event in profiler.key_averages()}
    assert calls["aten::_scaled_mm"] == 5  # two layers: forward, gradients of weights, and of one input
