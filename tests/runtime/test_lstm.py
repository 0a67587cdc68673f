"""LSTMs in half precision on a CPU, where oneDNN may have none."""

from __future__ import annotations

import threading
import warnings
from unittest import mock

import pytest
import torch
from torch import nn

from drumline.runtime.numerics import precision
from drumline.runtime.numerics.precision import HALVES, compute_precision
from drumline.runtime.numerics.recurrent import LstmWithoutOnednn

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def lacking() -> object:
    """Pretend that oneDNN has no such LSTM on this processor."""
    with mock.patch.object(precision, "onednn_lacks", lambda _: True):
        yield


def _trained(model: nn.LSTM, x: torch.Tensor, half: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model.zero_grad()
    with compute_precision(half, CPU):
        out, _ = model(x)
    out.float().square().sum().backward()
    return out, [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("how", [{}, {"bidirectional": True, "num_layers": 2}, {"proj_size": 3}])
def test_lstm_without_onednn(half: str, how: dict[str, int]) -> None:
    torch.manual_seed(0)
    model, x = nn.LSTM(4, 6, batch_first=True, **how), torch.randn(3, 5, 4)  # type: ignore[arg-type]  # of several types
    before = torch._C._get_mkldnn_enabled()
    out, gradients = _trained(model, x, half)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says once that oneDNN has no projections
        plain, exact = _trained(model, x, "fp32")
    assert out.dtype == HALVES[half]
    assert torch._C._get_mkldnn_enabled() == before
    torch.testing.assert_close(out.float(), plain, rtol=0.05, atol=0.02)
    assert len(gradients) == len(exact)
    for mine, theirs in zip(gradients, exact, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.1, atol=0.1)


def test_packed_sequences_keep_their_sizes() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.randn(n, 4) for n in (5, 3, 2)])
    with compute_precision("bf16", CPU):
        out, (h, c) = nn.LSTM(4, 6)(packed)
    assert torch.equal(out.batch_sizes, packed.batch_sizes)
    assert {out.data.dtype, h.dtype, c.dtype} == {torch.bfloat16}


def test_last_thread_enables_onednn_again() -> None:
    """Replicas in threads compute at the same time."""
    before = torch._C._get_mkldnn_enabled()
    inside, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with LstmWithoutOnednn._without():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=stay)
    thread.start()
    assert inside.wait(10)
    with LstmWithoutOnednn._without():
        pass
    assert not torch._C._get_mkldnn_enabled()
    leave.set()
    thread.join()
    assert torch._C._get_mkldnn_enabled() == before


def test_no_override_where_onednn_supports_it() -> None:
    with mock.patch.object(precision, "onednn_lacks", lambda _: False), compute_precision("bf16", CPU):
        assert torch.overrides._get_current_function_mode() is None
