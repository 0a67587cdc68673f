"""Compressed gradients: fewer bytes, errors within the bound, PowerSGD starts when documented, and the loss shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import parity
import pytest
import small_jobs
import torch
import torch.distributed as dist
from world import World

from drumline.plans.engine_constants import POWERSGD_RANK
from drumline.runtime.engine import initialize
from drumline.runtime.strategies.replicate import FIRST_STEP

Worlds = Callable[..., World]
STEPS = FIRST_STEP + 3
NUMBERS = 6 * 400 + 400 + 2 * 400 * 800 + 800 + 400 + 400 * 3 + 3
"""Of the wide model."""


def steps(compress: str) -> tuple[list[int], list[float], dict[str, torch.Tensor]]:
    """Bytes that torch's hooks all-reduce in every step, the losses, and the first step's gradients."""
    engine = initialize(small_jobs.make("mlp", model=parity.Wide, clip=None), f"dp=2,compress={compress}")
    sent: list[int] = []
    plain = dist.all_reduce

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent[-1] += tensor.nbytes
        return plain(tensor, *args, **kwargs)

    gradients: dict[str, torch.Tensor] = {}

    def ready() -> None:
        if not gradients:
            gradients.update({k: g.clone() for k, g in engine.whole_gradients().items()})

    engine.gradients_ready = ready  # type: ignore[method-assign]  # this is what it is for
    losses = []
    with mock.patch("torch.distributed.all_reduce", counted):
        for batch in engine.data(STEPS):
            sent.append(0)
            losses.append(engine.step(batch))
    return sent, losses, gradients


def test_fp16_halves_the_bytes(world: Worlds) -> None:
    sent, losses, gradients = world(2).run(steps, "fp16")[0]
    assert all(2 * NUMBERS <= n <= 2 * NUMBERS + 256 for n in sent)  # and a few numbers of the engine's own
    _, exact_losses, exact = world(2).run(steps, "none")[0]
    assert losses == pytest.approx(exact_losses, rel=1e-2)
    largest = max(float(g.abs().max()) for g in exact.values())
    off = max(float((g - exact[k]).abs().max()) for k, g in gradients.items())
    assert 0 < off <= 2.0**-10 * largest


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_powersgd_sends_low_rank_factors_after_its_first_steps(world: Worlds, backend: str) -> None:
    """The model has several buckets, which must not wait for each other."""
    sent, losses, gradients = world(2, backend).run(steps, "powersgd")[0]
    _, exact_losses, exact = world(2).run(steps, "none")[0]
    assert all(4 * NUMBERS <= n <= 4 * NUMBERS + 256 for n in sent[:FIRST_STEP])
    matrices = 2 * POWERSGD_RANK * (400 + 800) * 4
    assert all(matrices <= n < 0.1 * 4 * NUMBERS for n in sent[FIRST_STEP:])
    for name, g in exact.items():
        torch.testing.assert_close(gradients[name], g, rtol=1e-5, atol=1e-7)
    assert losses[: FIRST_STEP + 1] == pytest.approx(exact_losses[: FIRST_STEP + 1], rel=1e-5)
    assert losses[FIRST_STEP + 1 :] != pytest.approx(exact_losses[FIRST_STEP + 1 :], rel=1e-6)  # so it did compress


@pytest.mark.parametrize("job", ["mlp", "gpt"])
@pytest.mark.parametrize("plan", ["dp=2,compress=fp16", "dp=3,compress=powersgd", "dp=2,compress=powersgd,micro=2"])
def test_error_bound(world: Worlds, job: str, plan: str) -> None:
    result = world(parity.Plan.parse(plan).ranks).run(parity.run_verify, job, plan, 6)[0]
    parity.check(result)
    assert any("is approximate: loss error" in note for note in result.notes)
