"""Verification on a GPU. Two ranks share it, over gloo."""

from __future__ import annotations

from collections.abc import Callable

import parity
import pytest
import torch
from world import World

from drumline.plans import Plan

Worlds = Callable[[int], World]
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.parametrize(
    "plan",
    [
        "dp=1",
        "dp=1,zero=1",
        "dp=1,zero=3",
        "dp=1,micro=2,recompute=full",
        "dp=1,recompute=selective",
        "dp=1,precision=bf16",
        "dp=1,offload=optimizer",
        "dp=1,zero=3,offload=all",
        "dp=2",
        "dp=2,zero=1",
        "dp=2,zero=2,micro=2",
        "dp=2,zero=3",
        "dp=2,recompute=selective,precision=bf16",
        "dp=1,precision=tf32",
        "dp=1,zero=3,precision=fp16",
    ],
)
@pytest.mark.parametrize("job", ["mlp", "gpt", "cnn", "lstm"])
def test_equals_one_device(world: Worlds, job: str, plan: str) -> None:
    parity.check(world(Plan.parse(plan).ranks).run(parity.run_verify, job, plan, 3, timeout=120)[0])


@pytest.mark.parametrize(
    ("job", "plan"),
    [
        ("gpt", "tp=2"),
        ("cnn", "tp=2"),
        ("llama", "tp=2"),
        ("gpt", "pp=2,micro=2"),
        ("gpt", "pp=2,micro=4,schedule=1f1b"),
        ("unet", "pp=2,micro=2"),
        ("lstm", "pp=2,micro=2"),
        ("gpt", "pp=2,micro=4,virtual=2,schedule=interleaved"),
        ("gpt", "pp=2,micro=4,schedule=zero-bubble"),
        ("gpt", "cp=2"),
        ("llama", "cp=2"),
        ("groups", "tile=2x1"),
        ("resnet", "tile=1x2"),
        ("gpt", "tp=2,precision=bf16"),
        ("gpt", "pp=2,micro=2,precision=bf16"),
        ("lstm", "pp=2,micro=2,precision=bf16"),
        ("lstm", "pp=2,micro=2,recompute=full,precision=fp16"),
    ],
)
def test_split_models_equal_one_device(world: Worlds, job: str, plan: str) -> None:
    parity.check(world(2).run(parity.run_verify, job, plan, 3, timeout=120)[0])


@pytest.mark.parametrize(
    ("job", "plan"),
    [("named", "pp=2,schedule=pipedream"), ("gpt", "pp=2,micro=2,schedule=pipedream-2bw,precision=bf16")],
)
def test_batches_in_flight_equal_delayed_updates(world: Worlds, job: str, plan: str) -> None:
    parity.check(world(2).run(parity.run_verify, job, plan, 6, timeout=120)[0])
