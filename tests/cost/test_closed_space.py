"""The whole space of layouts: as many as the rules allow, priced in one go, and never worse than what was published."""

from __future__ import annotations

import itertools
from dataclasses import fields

import numpy as np
import pytest

from drumline.cluster import load
from drumline.cost.closed import Layouts, Models, constants_for, machines_for
from drumline.cost.closed.inputs import SCHEDULES
from drumline.cost.closed.space import Priced, every_layout, price


def gpt(layers: int, hidden: int, heads: int) -> Models:
    return Models.of(
        layers=layers, hidden=hidden, heads=heads, kv_heads=heads, inner=4 * hidden, gated=0, vocabulary=51200, tied=1,
        sequence=2048, causal=1, predicted=1, experts=1, active=1,
    )  # fmt: skip


def priced(model: Models, ranks: int, batch: int) -> Priced:
    cluster = load("dgx-a100").with_devices(ranks)
    layouts = every_layout(model, ranks, batch, node=8)
    return price(model, layouts, machines_for(cluster, "bf16"), constants_for(cluster), context=cluster.device.context)


def test_small_space_by_hand() -> None:
    """The rules as plain loops: 4 layers and 4 heads on 4 ranks, 8 samples."""
    found = every_layout(gpt(4, 512, 4), 4, 8, node=8)
    count = 0
    for t, p, c in itertools.product((1, 2, 4), repeat=3):
        if 4 % (t * p * c):
            continue
        d = 4 // (t * p * c)
        sizes = [b for b in (1, 2, 4, 8) if 8 % (d * b) == 0]
        zeros = 1 if d == 1 else 2 if p > 1 else 4
        turns = sum(4 % (p * v) == 0 for v in (2, 4))
        orders = 1 if p == 1 else len(SCHEDULES) - 2 + turns
        count += len(sizes) * zeros * 3 * (2 if t > 1 else 1) * orders
    assert len(found.tp) == count and np.all(found.ranks == 4)
    assert np.all(found.slice * found.micro * found.dp == 8)


def test_a_hundred_thousand_candidates_for_large_models() -> None:
    both = [priced(gpt(96, 12288, 96), 1024, 1536), priced(gpt(128, 25600, 160), 3072, 3072)]
    assert sum(len(found.bytes) for found in both) >= 100_000
    for found in both:
        best = found.order[0]
        assert found.bytes[best] <= 80 * 2**30 and found.layouts.tp[best] <= 8 and found.layouts.pp[best] > 1
        assert np.all(np.diff(found.times.total[found.order]) >= 0)


@pytest.mark.parametrize(("shape", "ranks", "batch", "published"), [
    ((24, 2304, 24), 32, 512, {"tp": 1, "pp": 1, "slice": 16}),
    ((40, 6144, 48), 256, 1024, {"tp": 8, "pp": 1, "slice": 8}),
    ((80, 12288, 96), 1536, 2304, {"tp": 8, "pp": 8, "virtual": 2, "slice": 2}),
    ((128, 25600, 160), 3072, 3072, {"tp": 8, "pp": 64, "slice": 1}),
])  # fmt: skip
def test_never_worse_than_a_published_layout(shape: tuple[int, int, int], ranks: int, batch: int, published: dict[str, int]) -> None:
    """Layouts of a well-known table, with everything recomputed, priced as the space is."""
    model = gpt(*shape)
    found = priced(model, ranks, batch)
    best = found.times.total[found.order[0]]
    dp = ranks // (published["tp"] * published["pp"])
    theirs = {f.name: getattr(found.layouts, f.name)[0] for f in fields(Layouts)} | published | {
        "dp": dp, "shard": dp, "micro": batch / dp / published["slice"], "zero": 0, "cp": 1, "sequence_split": 0, "again_products": 1,
        "again_attention": 1, "again_passes": 1, "order": SCHEDULES.index("interleaved" if published.get("virtual", 1) > 1 else "1f1b"),
    }  # fmt: skip
    cluster = load("dgx-a100").with_devices(ranks)
    alone = price(model, Layouts.of(**theirs), machines_for(cluster, "bf16"), constants_for(cluster), context=cluster.device.context)
    assert best <= alone.times.total[0]
