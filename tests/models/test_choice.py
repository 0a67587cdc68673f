"""What selective recomputation keeps: by bytes saved per second lost, for zoo models and for operators by hand."""

from __future__ import annotations

import dataclasses

import pytest

from drumline.clusters import load
from drumline.costs import estimate
from drumline.models import Affine, Layer, ProfiledOp, zoo
from drumline.models.selective import OPERATIONS_PER_VALUE, MAX_MOVED_PER_BYTE, choices, kept_bytes, choice_table, recompute_verdicts
from drumline.plans import Plan


def made(
    name: str, kind: str, *, flops: float = 0, moved: float = 0, output: float = 0, group: int = 0, again: str = ""
) -> ProfiledOp:
    return ProfiledOp(name, kind, "forward", Affine(0.0, flops), Affine(0.0, moved), 1, Affine(0.0, output), group, again)


def product(k: int, n: int = 4) -> ProfiledOp:
    """One row of k values times a matrix, in fp32."""
    return made("mm", "matmul", flops=2 * k * n, moved=4 * (k + n), output=4 * n)


def words(*ops: ProfiledOp, device: str = "cpu", width: int = 4) -> list[str]:
    return list(recompute_verdicts(ops, device, width))


def test_memory_bound_operators_are_computed_again_and_reductions_kept() -> None:
    unary = made("gelu", "special", flops=1, moved=8, output=4)
    fused = made("addcmul", "pointwise", moved=16, output=4)
    total = made("sum", "reduce", moved=404, output=4)
    assert words(unary, fused, total) == ["again", "again", "kept"]


@pytest.mark.parametrize("device", OPERATIONS_PER_VALUE)
@pytest.mark.parametrize("width", [2, 4, 8])
def test_products_are_kept_by_the_length_of_their_rows(device: str, width: int) -> None:
    k = int(MAX_MOVED_PER_BYTE * OPERATIONS_PER_VALUE[device] / 2)  # 2 k operations make one value
    scale = width / 4
    at, above = (
        made("mm", "matmul", flops=8 * k, moved=4 * (k + 4) * scale / 1000, output=16 * scale) for k in (k, k + 8)
    )
    assert words(at, above, device=device, width=width) == ["again", "kept"]


def test_what_belongs_together_is_treated_alike() -> None:
    draw, divide = (
        made("bernoulli_", "special", moved=8, output=4, group=1),
        made("div_", "pointwise", moved=8, group=1),
    )
    assert words(draw, divide) == ["again", "again"]
    dear = made("attention", "attention", flops=1e6, moved=16, output=4, group=1)
    assert words(draw, divide, dear) == ["kept"] * 3
    assert words(dear, made("all_gather", "pointwise", moved=8, group=1, recompute="always")) == ["again"] * 2


def test_what_nothing_needs_is_neither() -> None:
    last = made("mm", "matmul", flops=1e6, moved=16, output=4, recompute="never")
    assert words(product(1000), last) == ["kept", "unused"]
    # a value that is changed after the last needed operator would be found in its later state
    assert words(
        made("mm", "matmul", flops=1e6, moved=16, output=4, group=1),
        made("mul_", "pointwise", moved=8, group=1, recompute="never"),
    ) == [
        "again",
        "unused",
    ]


def test_backward_operators_have_no_say() -> None:
    assert words(ProfiledOp("mm", "matmul", "backward", Affine(0.0, 1e6), Affine(0.0, 4.0))) == [""]


def test_the_choice_is_ranked_and_adds_up() -> None:
    layer = Layer("block", "Block", 0, ops=(product(1000), made("gelu", "special", moved=32, output=16), product(200)))
    found = choices(layer, "cpu", 4)
    assert [(c.name, c.verdict) for c in found] == [("gelu", "again"), ("mm", "kept"), ("mm", "kept")]
    assert kept_bytes(layer, "cpu", 4) == Affine(0.0, 32.0)
    assert found[0].seconds(2, bandwidth=64.0) == 1.0


def test_what_is_handed_on_is_not_counted_twice() -> None:
    """The next layer keeps its input anyway."""
    ops = (product(1000), dataclasses.replace(product(1000), is_output=True))
    assert words(*ops) == ["kept", "kept"]
    assert kept_bytes(Layer("block", "Block", 0, ops=ops), "cpu", 4) == Affine(0.0, 16.0)


@pytest.mark.parametrize("name", ["gpt:1.3b", "llama:8b", "bert:base", "vit:base"])
def test_transformers_keep_their_products_and_attention(name: str) -> None:
    profile = zoo.profile(name)
    block = next(x for x in profile.layers if x.name == "blocks.0")
    found = choices(block, "cuda", profile.activation_bytes)
    dear = [c for c in found if c.name in ("mm", "addmm", "scaled_dot_product_attention")]
    assert {c.verdict for c in dear} == {"kept", "unused"}
    assert sum(c.verdict == "unused" for c in dear) == 1  # the last product
    assert {c.verdict for c in found if c not in dear} == {"again", "unused"}
    assert 0.4 * block.saved.at(1) < kept_bytes(block, "cuda", profile.activation_bytes).at(1) < 0.7 * block.saved.at(1)
    assert any("gelu" in line or "silu" in line for line in choice_table(profile, "cuda"))


@pytest.mark.parametrize("name", ["gpt:1.3b", "llama:8b", "resnet50", "vgg16", "unet"])
def test_the_estimate_lies_between_none_and_full(name: str) -> None:
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
