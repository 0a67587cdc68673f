"""Recurrent layers compute in the type of the plan, which autocast on a GPU does not give them."""

from __future__ import annotations

from functools import partial

import pytest
import small_jobs
import torch
from torch import nn

from drumline.runtime.numerics import recurrent
from drumline.runtime.numerics.precision import HALVES, compute_precision
from drumline.runtime.numerics.recurrent import RecurrentDtype, has_recurrent_layers, note_recurrent_layers
from drumline.runtime.state.weights import seeded_model

LAYERS = {"lstm": partial(nn.LSTM, 4, 6), "gru": partial(nn.GRU, 4, 6), "rnn": partial(nn.RNN, 4, 6, 2)}


@pytest.mark.parametrize("layer", LAYERS)
def test_recurrent_layers_get_the_dtype(layer: str) -> None:
    module, x = LAYERS[layer](), torch.randn(5, 3, 4, requires_grad=True)
    with RecurrentDtype(torch.bfloat16):
        out, _ = module(x)
        other = x.sin()
    out.float().sum().backward()
    assert (out.dtype, other.dtype) == (torch.bfloat16, torch.float32)
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in (x, *module.parameters()))


def test_float64_and_batch_sizes_are_kept() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.randn(n, 4, dtype=torch.float64) for n in (5, 3)])
    with RecurrentDtype(torch.bfloat16):
        out, _ = nn.LSTM(4, 6, dtype=torch.float64)(packed)
    assert out.data.dtype is torch.float64 and torch.equal(out.batch_sizes, packed.batch_sizes)


def test_override_only_for_models_with_recurrent_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "_known", False)
    note_recurrent_layers(nn.Sequential(nn.Linear(2, 2)))
    assert not has_recurrent_layers()
    seeded_model(small_jobs.make("lstm"))
    assert has_recurrent_layers()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("layer", LAYERS)
def test_on_a_gpu(layer: str, half: str) -> None:
    module, x = LAYERS[layer]().cuda(), torch.randn(5, 3, 4, device="cuda")
    note_recurrent_layers(module)
    with compute_precision(half, x.device):
        out, _ = module(x)
        assert torch.is_autocast_enabled("cuda") and (x @ x.mT).dtype is HALVES[half]
    assert out.dtype is HALVES[half]
