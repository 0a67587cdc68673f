"""Memory that autocast keeps beyond halved activations, against hand-computed numbers."""

from __future__ import annotations

import dataclasses

import pytest

from drumline.costs.memory import cast_bytes, peak_memory, wide_bytes
from drumline.models.profile import Affine, Layer, Profile, ProfiledOp
from drumline.plans import Plan

NORM = ProfiledOp("native_layer_norm", "norm", "forward", Affine(), Affine(), count=2, output=Affine(0, 100))
SOFTMAX = ProfiledOp("_log_softmax", "softmax", "forward", Affine(), Affine())
BLOCK = Layer("block", "Block", 1000, tensors=1, largest=1000, ops=(NORM,), composite=True, repeats=3)
LOSS = Layer("loss", "loss", 0, ops=(SOFTMAX,), local_backward=Affine(0, 80))
PROFILE = Profile("tiny", 8, (BLOCK, LOSS))


@pytest.mark.parametrize(
    ("plan", "copies"),
    [
        ("precision=bf16", [6000, 6000, 6000, 6000]),  # three blocks of 1000 numbers of 2 bytes
        ("precision=bf16,recompute=full", [6000, 2000, 6000, 0]),  # the backward has those of one block
        ("precision=bf16,zero=3", [0, 0, 0, 0]),  # gathered in bf16 already
        ("precision=fp32", [0, 0, 0, 0]),
    ],
)
def test_copies_of_weights(plan: str, copies: list[float]) -> None:
    assert cast_bytes(PROFILE, Plan.parse(plan)) == copies


@pytest.mark.parametrize(
    ("plan", "more"),
    [
        # of 4 samples: half of what two norms keep in each of three blocks; half of the loss's probabilities
        ("precision=bf16", [1200, 1200, 1200, 1360]),
        ("precision=fp16,recompute=full", [400, 400, 0, 160]),
        ("precision=tf32", [0, 0, 0, 0]),
    ],
)
def test_values_kept_in_fp32(plan: str, more: list[float]) -> None:
    assert wide_bytes(PROFILE, Plan.parse(plan), 4) == more


def test_amounts_traced_in_half_precision_are_not_scaled() -> None:
    half = dataclasses.replace(PROFILE, activation_bytes=2)
    assert wide_bytes(half, Plan.parse("precision=bf16"), 4) == [0, 0, 0, 0]


def test_no_weight_copies_remain_during_the_update() -> None:
    """Its temporaries make it the worst moment; the copies were dropped with the graph."""
    large = dataclasses.replace(PROFILE, layers=(dataclasses.replace(BLOCK, largest=10**6), LOSS))
    assert peak_memory(large, Plan.parse("precision=bf16"), 1).parameters == 3 * 1000 * 4


def test_gradients_of_chunked_parameters_come_in_parts() -> None:
    """A layer of 1000 parameters whose gradient of 4000 bytes is counted as live."""
    alive = dataclasses.replace(
        BLOCK, repeats=1, shard_unit=True, live_backward=Affine(4000, 0), local_backward=Affine(4000, 0)
    )
    profile = dataclasses.replace(PROFILE, layers=(alive, LOSS))
    whole, parts = (peak_memory(profile, Plan.parse(f"zero=3,offload=all,chunk={c}"), 0) for c in (1, 4))
    assert whole.activations == 4000 and parts.activations == 1000
    assert parts.communication == whole.communication / 4
