"""Predicted messages and memory of plans that split the model, compared with real ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import split_cost_functions as functions
from world import World

from drumline.clusters import load
from drumline.costs.data_parallel_comm import gradient_collectives
from drumline.costs.layer_time import largest_micro_batch
from drumline.costs.operator_model import OperatorCostModel
from drumline.plans import Plan
from drumline.plans.engine_constants import LOSS_MESSAGE_BYTES
from drumline.tracing import trace

Worlds = Callable[[int], World]
CLUSTER = load("dgx-h100")
AGREES = Counter({("all_reduce", float(LOSS_MESSAGE_BYTES)): 1, ("all_reduce", 8.0): 1})
"""The engine's own: the loss with its weight and the norm of the gradients."""


def predicted(plan: Plan, sizes: Any) -> tuple[Counter[tuple[str, float]], int]:
    """Messages of one step by collective and bytes, and the elements of a rank."""
    profile = trace(functions.job(*sizes) if len(sizes) > 1 else functions.of_name(*sizes))
    model = OperatorCostModel(profile, CLUSTER, plan.precision)
    rank = model.rank_model(plan)
    n = largest_micro_batch(profile.batch_size, plan)
    result: Counter[tuple[str, float]] = Counter()
    for layer, sent in zip(rank.profile.layers, rank.messages, strict=True):
        for t in sent:
            result[t.collective, t.size(n, plan.precision, profile)] += layer.repeats * plan.micro
    for message in gradient_collectives(rank.profile, plan, CLUSTER):
        result[message.collective, message.bytes] += 1
    return result, rank.profile.parameters


@pytest.mark.parametrize(
    ("plan", "words", "length"),
    [
        ("tp=2", 11, 5),
        ("tp=2", 11, 6),
        ("tp=2", 32, 5),
        ("tp=2", 32, 6),
        ("tp=2", 64, 32),
        ("tp=2,precision=bf16", 32, 6),
        ("tp=2,precision=bf16", 11, 6),
        ("tp=2,micro=2", 11, 5),
    ],
    ids=[
        "nothing divides",
        "tokens",
        "words",
        "both",
        "and the table of positions",
        "bf16",
        "bf16, words do not divide",
        "micro-batches",
    ],
)
def test_tp_messages_match_the_prediction(world: Worlds, plan: str, words: int, length: int) -> None:
    """Every message of the layers: its kind, its bytes, how often."""
    sizes = ("gpt", 8, words, length, 6)
    for sent, numbers in world(2).run(functions.sends, plan, *sizes):
        messages, parameters = predicted(Plan.parse(plan), sizes)
        assert Counter(sent) - AGREES == messages
        assert numbers == parameters


def test_recomputed_layers_send_again(world: Worlds) -> None:
    """All messages of a block's forward but the last, which nothing in the block needs."""
    sizes = ("gpt", 8, 32, 6, 6)
    plain, again = (world(2).run(functions.sends, plan, *sizes)[0][0] for plan in ("tp=2", "tp=2,recompute=full"))
    rank = OperatorCostModel(trace(functions.job(*sizes)), CLUSTER, "fp32").rank_model(Plan.parse("tp=2"))
    result: Counter[tuple[str, float]] = Counter()
    for layer, sent in zip(rank.profile.layers, rank.messages, strict=True):
        if layer.composite:
            resent = [t for t in sent if t.phase == "forward"][:-1]
            result.update({(t.collective, t.size(6, "fp32", rank.profile)): 0 for t in resent})
            for t in resent:
                result[t.collective, t.size(6, "fp32", rank.profile)] += layer.repeats
    assert Counter(again) - Counter(plain) == result and result


def test_mlp_messages_match_the_prediction(world: Worlds) -> None:
    for sent, numbers in world(2).run(functions.sends, "tp=2", "mlp"):
        messages, parameters = predicted(Plan.parse("tp=2"), ("mlp",))
        assert Counter(sent) - AGREES == messages
        assert numbers == parameters


@pytest.mark.parametrize("plan", ["tile=1x2", "tile=2x1"])
def test_halo_messages_match_the_prediction(world: Worlds, plan: str) -> None:
    """Of every convolution of a U-Net, forward and back. Its pools and transposed convolutions need none."""
    messages, parameters = predicted(Plan.parse(plan), ("unet",))
    edges = {size: count for (kind, size), count in messages.items() if kind == "send"}
    for sent, numbers in world(2).run(functions.sends, plan, "unet"):
        result: Counter[float] = Counter()
        for (name, size), count in sent.items():
            if name.startswith("halo"):
                result[size] += count
        assert result == edges
        assert numbers == parameters


@pytest.mark.parametrize("plan", ["pp=2,micro=4", "pp=2,micro=4,split=blocks.1", "pp=2,micro=4,schedule=gpipe"])
def test_stage_memory_matches_the_prediction(world: Worlds, plan: str) -> None:
    """To 5%, on both ranks: states with the tied table twice, and the peak that a step adds."""
    sizes = ("deep", 64, 96, 32, 16)
    memories = OperatorCostModel(trace(functions.job(*sizes)), CLUSTER, "fp32").memory_by_stage(Plan.parse(plan))
    for result, memory in zip(world(2).run(functions.holds, plan, *sizes), memories, strict=True):
        states = memory.parameters + memory.gradients + memory.optimizer
        assert states == pytest.approx(result["states"], rel=0.05)
        assert memory.activations + memory.communication == pytest.approx(result["step"], rel=0.05)


@pytest.mark.parametrize("plan", ["pp=2,micro=4,recompute=full", "tp=2,recompute=full"])
def test_memory_of_recomputed_layers_matches_the_prediction(world: Worlds, plan: str) -> None:
    sizes = ("deep", 64, 96, 32, 16)
    memories = OperatorCostModel(trace(functions.job(*sizes)), CLUSTER, "fp32").memory_by_stage(Plan.parse(plan))
    for result, memory in zip(
        world(2).run(functions.holds, plan, *sizes), memories * (2 // len(memories)), strict=True
    ):
        assert memory.activations + memory.communication == pytest.approx(result["step"], rel=0.1)


def test_memory_of_a_split_backward_is_bounded_by_the_prediction(world: Worlds) -> None:
    """Memory that the engine frees between the two halves is not predicted: an upper bound, to 20%."""
    plan, sizes = "pp=2,micro=4,schedule=zero-bubble,split=blocks.2", ("deep", 64, 96, 32, 16)
    memories = OperatorCostModel(trace(functions.job(*sizes)), CLUSTER, "fp32").memory_by_stage(Plan.parse(plan))
    for result, memory in zip(world(2).run(functions.holds, plan, *sizes), memories, strict=True):
        assert 0.95 * result["step"] <= memory.activations + memory.communication <= 1.2 * result["step"]


def test_tp_memory_matches_the_prediction(world: Worlds) -> None:
    plan, sizes = "tp=2", ("deep", 64, 96, 32, 16)
    (memory,) = OperatorCostModel(trace(functions.job(*sizes)), CLUSTER, "fp32").memory_by_stage(Plan.parse(plan))
    for result in world(2).run(functions.holds, plan, *sizes):
        assert memory.parameters + memory.gradients + memory.optimizer == pytest.approx(result["states"], rel=0.05)
        assert memory.activations == pytest.approx(result["step"], rel=0.05)
