"""Layer models, roofline, and bytes per link of tensor and pipeline parallelism: numbers by hand."""

from __future__ import annotations

import pytest

from drumline.clusters import load
from drumline.core.errors import ClusterError, InputError
from drumline.theory import layer_models as lm
from drumline.theory.link_traffic import all_reduce_share, needed_inside, per_link, seconds_per_block
from drumline.theory.roofline import Roofline, matmul


def test_a_linear_layer() -> None:
    one = lm.linear(1, 1024, 4096)
    assert one.work == 2 * 1024 * 4096
    assert one.bytes == 2 * (1024 * 4096 + 4096 + 1024 + 4096)
    assert one.depth == 1 + 10 + 1
    assert one.parameters == 1024 * 4096 + 4096
    assert one.backward_work == 2 * one.work
    many = lm.linear(1, 1024, 4096, n=64)
    assert many.work == 64 * one.work
    assert many.depth == one.depth  # rows do not wait for each other
    assert many.bytes < 64 * one.bytes  # the weight is read once
    assert many.intensity > one.intensity


def test_a_convolution_and_a_pool() -> None:
    conv = lm.convolution(64, 128, 3, 56, stride=2)
    assert conv.work == 2 * 64 * 128 * 9 * 28 * 28
    assert conv.depth == 1 + 10  # 576 products are summed: ceil(log2 576) = 10
    assert conv.parameters == 64 * 128 * 9
    pool = lm.pooling(64, 2, 56)
    assert pool.work == 64 * 28 * 28 * 3
    assert pool.depth == 2
    assert pool.parameters == 0
    assert lm.pooling(64, 2, 56, maximum=False).saved == 0 < pool.saved  # a maximum keeps where it stood
    with pytest.raises(InputError, match="windows of 9 in 4"):
        lm.pooling(3, 9, 4)


def test_attention() -> None:
    one, twice = lm.attention(1024, 768, 12), lm.attention(2048, 768, 12)
    assert one.work == 4 * 1024 * 1024 * 768
    assert twice.work == 4 * one.work
    assert twice.depth == one.depth + 3
    assert twice.saved == 2 * one.saved  # no scores are kept
    assert lm.attention(1024, 768, 12, kv_heads=3).bytes < one.bytes
    with pytest.raises(InputError, match="width 100, 12 heads"):
        lm.attention(10, 100, 12)


def test_norms_and_embeddings_are_bound_by_memory() -> None:
    roof = Roofline.of(load("dgx-a100").device, "bf16")
    for one in (lm.normalisation(1024, 768), lm.embedding(1024, 50_000, 768)):
        assert one.intensity < roof.ridge
        assert roof.bound(one.work, one.bytes) == "memory"
    assert lm.normalisation(1, 1024, root_mean_square=True).work == 4 * 1024
    assert lm.embedding(1024, 50_000, 768).parameters == 50_000 * 768
    assert lm.embedding(1024, 50_000, 768).depth == 1


def test_a_recurrent_layer_is_a_chain_of_tokens() -> None:
    one, twice = lm.recurrence(128, 512), lm.recurrence(256, 512)
    assert one.work == 16 * 128 * 512 * 512
    assert twice.work == 2 * one.work
    assert twice.depth == pytest.approx(2 * one.depth, rel=0.02)
    assert lm.attention(128, 512, 8).parallelism > 10 * one.parallelism / 16
    with pytest.raises(InputError, match="tokens = 0"):
        lm.recurrence(0, 4)


def test_the_roofline() -> None:
    roof = Roofline(peak=300e12, bandwidth=2e12)
    assert roof.ridge == 150
    assert roof.rate(15) == 30e12
    assert roof.rate(1500) == 300e12
    assert roof.seconds(300e12, 1) == 1
    assert roof.seconds(1, 2e12) == 1
    assert roof.bound(151, 1) == "compute"
    with pytest.raises(ClusterError, match=r"no rate for fp4\n.*bf16"):
        Roofline.of(load("dgx-a100").device, "fp4")


def test_larger_matmuls_are_more_efficient() -> None:
    device = load("dgx-a100").device
    costs = [matmul(device, "bf16", n, n, n) for n in (64, 256, 1024, 4096, 16384)]
    assert [one.efficiency for one in costs] == sorted(one.efficiency for one in costs)
    assert costs[0].seconds == pytest.approx(device.launch, rel=2)
    assert costs[-1].efficiency == pytest.approx(271 / 312, rel=0.02)
    thin = matmul(device, "bf16", 1, 4096, 4096)
    assert thin.intensity == pytest.approx(1, rel=0.01)
    assert thin.efficiency < 0.01
    with pytest.raises(InputError, match="a matmul of 0 x 3"):
        matmul(device, "bf16", 0, 2, 3)


def test_tensor_and_pipeline_traffic() -> None:
    assert all_reduce_share(8) == 1.75
    one = per_link(1e6, 8, sums=1)
    assert (one.tensor, one.pipeline, one.ratio) == (3.5e6, 2e6, 1.75)
    assert per_link(1e6, 8, blocks=6).ratio == 6 * 2 * 1.75
    assert needed_inside(8, 160e9) == 280e9
    tensor, pipeline = seconds_per_block(64e6, load("dgx-a100"), 8)
    assert tensor == pytest.approx(4 * 14 * (3e-6 + 8e6 / 300e9))
    assert pipeline == pytest.approx(2 * (10e-6 + 64e6 / 200e9))
    with pytest.raises(InputError, match="is one node"):
        seconds_per_block(1, load("one-a100"), 2)
    with pytest.raises(InputError, match="m > 0"):
        per_link(0, 8)
