"""A trace as on a GPU: casts, types and sizes of operators, dropout, partial reads of tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import drumline as dl
from drumline.core.errors import PlanError
from drumline.models.profile import Profile, ProfiledOp
from drumline.tracing import trace


class Net(nn.Module):
    """A norm, a matmul, dropout and a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.drop, self.down = (
            nn.LayerNorm(16),
            nn.Linear(16, 32),
            nn.Dropout(0.5),
            nn.Linear(32, 8),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.drop(F.relu(self.up(self.norm(x)))))


def profile(precision: str, device: str = "cuda", model: Any = Net, sample: Any = None) -> Profile:
    given = sample or (torch.zeros(16), torch.tensor(1))
    job = dl.Job(
        model=model,
        loss=F.cross_entropy,
        optimizer=lambda p: torch.optim.AdamW(p),
        data=lambda: [given] * 9,
        batch_size=8,
    )
    return trace(job, precision=precision, device=device)


def ops(p: Profile, name: str) -> list[ProfiledOp]:
    return [op for x in p.layers for op in x.ops if op.name == name]


def test_matmuls_are_in_half_precision_and_norms_are_not() -> None:
    p = profile("bf16")
    assert {op.dtype for op in ops(p, "addmm") + ops(p, "mm")} == {"bf16"}
    assert {op.dtype for op in ops(p, "native_layer_norm") + ops(p, "native_layer_norm_backward")} == {""}
    assert (p.precision, p.activation_bytes) == ("bf16", 2)


def test_a_matmul_with_a_cast_weight_can_still_be_split() -> None:
    half, single = ([op.dims for op in ops(profile(p), "addmm") if op.phase == "forward"] for p in ("bf16", "fp32"))
    assert half == single == [(1, 16, 32, 1), (1, 32, 8, 1)]


def test_every_weight_is_cast_once_and_its_gradient_back() -> None:
    p = profile("bf16")
    weights = 2 * (16 * 32 + 32 + 32 * 8 + 8)
    assert sum(x.cast for x in p.layers) == weights
    assert sum(x.cast for x in profile("fp32").layers) == 0
    forward = [op for op in ops(p, "_to_copy") if op.phase == "forward"]
    # two weights and two biases, and the norm's output; the kernel of the loss reads logits as they are
    assert sum(op.count for op in forward) == 5
    [loss] = ops(p, "_log_softmax")
    assert loss.bytes.at(8) == 8 * 8 * (2 + 4)


def test_a_cpu_has_its_own_autocast_lists() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 8))

    on_cpu, on_gpu = profile("bf16", "cpu", model), profile("bf16", "cuda", model)
    assert {op.dtype for op in ops(on_cpu, "native_layer_norm")} == {"bf16"}
    assert {op.dtype for op in ops(on_gpu, "native_layer_norm")} == {""}


def test_autocast_is_restored() -> None:
    """A trace leaves a CPU's autocast unchanged."""
    profile("bf16")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = torch.zeros(2, 16, dtype=torch.bfloat16)
        assert F.layer_norm(half, (16,)).dtype == torch.bfloat16


def test_dropout_keeps_one_byte_per_value() -> None:
    masks = ops(profile("fp32"), "native_dropout")
    assert [op.count for op in masks] == [1]
    n, values = 8, 8 * 32
    assert masks[0].bytes.at(n) == values * (4 + 4 + 1)
    assert not ops(profile("fp32", "cpu"), "native_dropout")


def test_sizes_grow_with_the_samples() -> None:
    [forward] = [op for op in ops(profile("fp32"), "addmm") if op.shape[2].at(1) == 32]
    for n in (1, 8, 100):
        assert [s.at(n) for s in forward.shape] == [1, n, 32, 16]
    backward = {tuple(s.at(8) for s in op.shape) for op in ops(profile("fp32"), "mm")}
    assert (1, 32, 16, 8) in backward  # the gradient of a weight: the samples are the inner dim


def test_only_selected_rows_of_a_table_are_read() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.Embedding(1000, 4), nn.Linear(4, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.words(x))

    p = profile("fp32", model=Table, sample=(torch.tensor(3), torch.tensor(1)))
    [look] = ops(p, "embedding")
    assert look.bytes.at(8) == 8 * (2 * 4 * 4 + 8)  # rows read and written, and their indices


def test_a_profile_of_another_precision_is_refused() -> None:
    from drumline.clusters import load
    from drumline.costs import estimate

    with pytest.raises(PlanError, match=r"traced in bf16 cannot be priced in fp32") as e:
        estimate(profile("bf16"), dl.Plan.parse("precision=fp32"), load("dgx-h100").with_devices(1))
    assert "precision=fp32" in str(e.value)
