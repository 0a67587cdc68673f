"""Selective recomputation: results kept by bytes saved per second lost, for zoo models and constructed operators."""

from __future__ import annotations

import dataclasses

import pytest

from drumline.clusters import load
from drumline.costs import estimate
from drumline.models import Affine, Layer, ProfiledOp, zoo
from drumline.models.recompute_choice import (
    MAX_MOVED_PER_BYTE,
    OPERATIONS_PER_VALUE,
    choice_table,
    choices,
    kept_bytes,
    recompute_verdicts,
)
from drumline.plans import Plan


def made(
    name: str, kind: str, *, flops: float = 0, moved: float = 0, output: float = 0, group: int = 0, recompute: str = ""
) -> ProfiledOp:
    return ProfiledOp(
        name, kind, "forward", Affine(0.0, flops), Affine(0.0, moved), 1, Affine(0.0, output), group, recompute
    )


def matmul(k: int, n: int = 4) -> ProfiledOp:
    """One row of k values times a matrix, in fp32."""
    return made("mm", "matmul", flops=2 * k * n, moved=4 * (k + n), output=4 * n)


def verdicts(*ops: ProfiledOp, device: str = "cpu", width: int = 4) -> list[str]:
    return list(recompute_verdicts(ops, device, width))


def test_memory_bound_operators_are_recomputed_and_reductions_kept() -> None:
    unary = made("gelu", "special", flops=1, moved=8, output=4)
    fused = made("addcmul", "pointwise", moved=16, output=4)
    total = made("sum", "reduce", moved=404, output=4)
    assert verdicts(unary, fused, total) == ["again", "again", "kept"]


@pytest.mark.parametrize("device", OPERATIONS_PER_VALUE)
@pytest.mark.parametrize("width", [2, 4, 8])
def test_matmuls_are_kept_by_the_length_of_their_rows(device: str, width: int) -> None:
    k = int(MAX_MOVED_PER_BYTE * OPERATIONS_PER_VALUE[device] / 2)  # 2 k operations make one value
    scale = width / 4
    at, above = (
        made("mm", "matmul", flops=8 * k, moved=4 * (k + 4) * scale / 1000, output=16 * scale) for k in (k, k + 8)
    )
    assert verdicts(at, above, device=device, width=width) == ["again", "kept"]


def test_grouped_operators_are_treated_alike() -> None:
    draw, divide = (
        made("bernoulli_", "special", moved=8, output=4, group=1),
        made("div_", "pointwise", moved=8, group=1),
    )
    assert verdicts(draw, divide) == ["again", "again"]
    costly = made("attention", "attention", flops=1e6, moved=16, output=4, group=1)
    assert verdicts(draw, divide, costly) == ["kept"] * 3
    assert verdicts(costly, made("all_gather", "pointwise", moved=8, group=1, recompute="always")) == ["again"] * 2


def test_unused_results_are_neither_kept_nor_recomputed() -> None:
    last = made("mm", "matmul", flops=1e6, moved=16, output=4, recompute="never")
    assert verdicts(matmul(1000), last) == ["kept", "unused"]
    # a value that is changed after the last needed operator would be kept in its later state
    assert verdicts(
        made("mm", "matmul", flops=1e6, moved=16, output=4, group=1),
        made("mul_", "pointwise", moved=8, group=1, recompute="never"),
    ) == ["again", "unused"]


def test_backward_operators_have_no_verdict() -> None:
    assert verdicts(ProfiledOp("mm", "matmul", "backward", Affine(0.0, 1e6), Affine(0.0, 4.0))) == [""]


def test_choices_are_ranked_and_add_up() -> None:
    layer = Layer("block", "Block", 0, ops=(matmul(1000), made("gelu", "special", moved=32, output=16), matmul(200)))
    ranked = choices(layer, "cpu", 4)
    assert [(c.name, c.verdict) for c in ranked] == [("gelu", "again"), ("mm", "kept"), ("mm", "kept")]
    assert kept_bytes(layer, "cpu", 4) == Affine(0.0, 32.0)
    assert ranked[0].seconds(2, bandwidth=64.0) == 1.0


def test_layer_outputs_are_not_counted_twice() -> None:
    """The next layer keeps its input anyway."""
    ops = (matmul(1000), dataclasses.replace(matmul(1000), is_output=True))
    assert verdicts(*ops) == ["kept", "kept"]
    assert kept_bytes(Layer("block", "Block", 0, ops=ops), "cpu", 4) == Affine(0.0, 16.0)


@pytest.mark.parametrize("name", ["gpt:1.3b", "llama:8b", "bert:base", "vit:base"])
def test_transformers_keep_matmuls_and_attention(name: str) -> None:
    profile = zoo.profile(name)
    block = next(x for x in profile.layers if x.name == "blocks.0")
    ranked = choices(block, "cuda", profile.activation_bytes)
    costly = [c for c in ranked if c.name in ("mm", "addmm", "scaled_dot_product_attention")]
    assert {c.verdict for c in costly} == {"kept", "unused"}
    assert sum(c.verdict == "unused" for c in costly) == 1  # the last matmul
    assert {c.verdict for c in ranked if c not in costly} == {"again", "unused"}
    assert 0.4 * block.saved.at(1) < kept_bytes(block, "cuda", profile.activation_bytes).at(1) < 0.7 * block.saved.at(1)
    assert any("gelu" in line or "silu" in line for line in choice_table(profile, "cuda"))


@pytest.mark.parametrize("name", ["gpt:1.3b", "llama:8b", "resnet50", "vgg16", "unet"])
def test_the_estimate_is_between_none_and_full(name: str) -> None:
    profile, cluster = zoo.profile(name, batch_size=64), load("dgx-h100").with_devices(2)
    none, selective, full = (
        estimate(profile, Plan.parse(f"dp=2,precision=bf16,recompute={r}"), cluster)
        for r in ("none", "selective", "full")
    )
    assert none.memory_bytes > selective.memory_bytes > full.memory_bytes
    assert 0 == none.parts["recompute"] < selective.parts["recompute"] < full.parts["recompute"]
    assert sum(selective.parts.values()) == pytest.approx(selective.step_seconds)
    # the bytes that it saves are cheaper than those that full recomputation saves beyond it
    price = selective.parts["recompute"] / (none.memory_bytes - selective.memory_bytes)
    more = (full.parts["recompute"] - selective.parts["recompute"]) / (selective.memory_bytes - full.memory_bytes)
    assert price < more
