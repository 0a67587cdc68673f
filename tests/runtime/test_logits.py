"""Lazy logits behave as tensors in every operation, and their loss equals that of the whole."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from drumline.runtime.memory.logits import LazyLogits
from drumline.runtime.memory.tiling import materialized_heads, tile

EQUAL = {"rtol": 1e-12, "atol": 1e-12}


def made(dtype: torch.dtype = torch.float64) -> tuple[nn.Linear, nn.Linear, torch.Tensor, torch.Tensor]:
    """A head, the same in parts, and an input for each."""
    torch.manual_seed(0)
    head = nn.Linear(4, 7).to(dtype)
    model = nn.Sequential(copy.deepcopy(head))
    tile(model, 3)
    a, b = (torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(2), dtype=dtype) for _ in range(2))
    assert isinstance(model[0], nn.Linear)
    return head, model[0], a.requires_grad_(), b.requires_grad_()


def _in_place(x: torch.Tensor) -> torch.Tensor:
    view = x.view(-1, 7)
    x.mul_(2)
    view[0] = 3.0
    return x + view.view(2, 3, 7)


def _copies(x: torch.Tensor) -> torch.Tensor:
    copied, kept = x[:, 1:].contiguous(), x.clone()
    x.mul_(2)
    return copied + x[:, 1:] + kept[:, 1:]


def _hooked(x: torch.Tensor) -> torch.Tensor:
    x.register_hook(lambda g: g * 2)
    return x.square()


LAZY = {
    "view": lambda x: x.view(-1, 7),
    "size": lambda x: x.view(-1, x.size(-1)),
    "reshape": lambda x: torch.reshape(x, (6, 7)),
    "flatten": lambda x: x.flatten(0, 1),
    "flatten by name": lambda x: torch.flatten(x, end_dim=-2),
    "unflatten": lambda x: x.unflatten(0, (1, 2)),
    "slice": lambda x: x[..., :-1, :],
    "slices": lambda x: x[:, 1:],
    "chosen": lambda x: x[torch.tensor([[1, 0, 1], [0, 1, 1]], dtype=torch.bool)],
    "at": lambda x: x[:, -1],
    "new dim": lambda x: x[None, 0],
    "unsqueeze": lambda x: x.unsqueeze(1).squeeze(1),
    "contiguous": lambda x: x[:, :-1].contiguous().view(-1, 7),
    "double": lambda x: x.double(),
    "float": lambda x: x.to(torch.float32),
    "clone": lambda x: x.clone(),
    "chosen by number": lambda x: x[torch.tensor([1, 1, 0])],
    "squeezed": lambda x: torch.squeeze(x[:, :1], 1),
    "reshaped": lambda x: x[:, :2].reshape(-1, 7),
}
WHOLE = {
    "last": lambda x: x[..., 0],
    "some": lambda x: x[..., 1:],
    "turned": lambda x: x.transpose(1, 2),
    "all": lambda x: x.view(-1),
    "other": lambda x: x.view(3, 2, 7).view(7, 6),
    "sum": lambda x: x.flatten(0, 1).sum(0),
    "scaled": lambda x: x / 2,
    "both": lambda x: x + x,
    "in place": _in_place,
    "copies": _copies,
    "hook": _hooked,
    "list": lambda x: torch.stack([x, x]),
    "rows": lambda x: torch.stack(list(x)),
    "argmax": lambda x: x.argmax(-1).double() * x.amax(),
    "int": lambda x: x.to("cpu"),
    "detached": lambda x: x * x.detach(),
}


@pytest.mark.parametrize("name", [*LAZY, *WHOLE])
def test_logits_are_tensors(name: str) -> None:
    """In every operation; some do not materialize them."""
    head, parted, a, b = made()
    function = {**LAZY, **WHOLE}[name]
    wanted, lazy = function(head(a)), parted(b)
    assert isinstance(lazy, LazyLogits) and isinstance(lazy, torch.Tensor)
    result = function(lazy)
    assert isinstance(result, LazyLogits) == (name in LAZY)
    assert (parted.materialized_by == "") == (name in LAZY)
    assert (result.shape, result.dtype, result.device) == (wanted.shape, wanted.dtype, wanted.device)
    assert (result.dim(), result.numel(), result.requires_grad) == (wanted.dim(), wanted.numel(), wanted.requires_grad)
    assert result.is_contiguous() == wanted.is_contiguous()
    torch.testing.assert_close(result + 0, wanted, **EQUAL)
    weights = torch.arange(wanted.numel(), dtype=wanted.dtype).view(wanted.shape)
    (wanted * weights).sum().backward()
    (result * weights).sum().backward()
    torch.testing.assert_close(b.grad, a.grad, **(EQUAL if name != "float" else {}))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("more", [{}, {"ignore_index": 5}, {"label_smoothing": 0.2}, {"weight": torch.arange(7.0)}])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_cross_entropy(reduction: str, more: dict[str, Any], dtype: torch.dtype) -> None:
    head, parted, a, b = made(dtype)
    more = {k: v.to(dtype) if k == "weight" else v for k, v in more.items()}
    target = torch.tensor([0, 6, 5, 2, 3, 5])
    losses = [
        F.cross_entropy(h(x).flatten(0, 1), target, reduction=reduction, **more) for h, x in ((head, a), (parted, b))
    ]
    assert losses[0].dtype == losses[1].dtype and losses[0].shape == losses[1].shape
    bound = {torch.float64: EQUAL, torch.float32: {}, torch.bfloat16: {"rtol": 0.05, "atol": 0.05}}[dtype]
    torch.testing.assert_close(losses[1], losses[0], **bound)
    for loss in losses:
        loss.sum().backward()
    torch.testing.assert_close(b.grad, a.grad, **bound)
    assert parted.materialized_by == ""


def test_cross_entropy_that_materializes() -> None:
    """Probabilities, and classes along another dim."""
    head, parted, a, b = made()
    for function in (
        lambda x: F.cross_entropy(x.flatten(0, 1), torch.full((6, 7), 1 / 7, dtype=torch.float64)),
        lambda x: F.cross_entropy(x.transpose(1, 2), torch.tensor([[0, 1, 2], [3, 4, 6]])),
        lambda x: F.cross_entropy(x[0, 0], torch.tensor(3)),
        lambda x: F.cross_entropy(
            x.flatten(0, 1),
            torch.arange(6),
            torch.rand(7, generator=torch.Generator().manual_seed(0), dtype=torch.float64),
            label_smoothing=0.1,
        ),
    ):
        torch.testing.assert_close(function(parted(b)), function(head(a)), **EQUAL)
    assert materialized_heads(nn.Sequential(parted)) == {"0": "cross_entropy"}


def test_invalid_targets_and_tokens() -> None:
    _, parted, _, b = made()
    with pytest.raises(RuntimeError, match="a target is not one of the 7 classes"):
        F.cross_entropy(parted(b).flatten(0, 1), torch.tensor([0, 1, 2, 3, 4, 7]))
    model = nn.Sequential(nn.Embedding(5, 4))
    tile(model, 2)
    with pytest.raises(RuntimeError, match="a token is not one of the 5 of the embedding"):
        model(torch.tensor([5]))


def test_all_targets_ignored_is_nan() -> None:
    """As torch's own."""
    _, parted, _, b = made()
    assert F.cross_entropy(parted(b).flatten(0, 1), torch.full((6,), -100)).isnan()


def test_modes_of_the_call_apply() -> None:
    """Logits of a call without gradients, or under autocast, keep these modes when they are computed later."""
    head, parted, a, b = made(torch.float32)
    with torch.no_grad():
        lazy = parted(b)
    assert not lazy.requires_grad and not lazy.square().requires_grad
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted, lazy, other = head(a), parted(b), parted(b)
    assert lazy.dtype == wanted.dtype == torch.bfloat16
    torch.testing.assert_close(lazy * 1, wanted)
    target = torch.arange(6)
    loss = F.cross_entropy(other.float().view(-1, 7), target)
    torch.testing.assert_close(loss, F.cross_entropy(wanted.float().view(-1, 7), target))
    assert loss.dtype == torch.float32
