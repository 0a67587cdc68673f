"""The lazy output of a tiled head: logits that are computed when, and as far as, they are needed.

`LazyLogits` looks like the tensor (..., vocabulary) and holds the head's input (..., width). Reshapes that keep the
last dim stay lazy, and `F.cross_entropy` runs tile by tile. Everything else materializes the whole tensor: correct, but
as large as without tiling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from ...torchkit.dispatch_modes import without_function_modes
from ...torchkit.pytree import tree_leaves, tree_map
from .chunked_loss import Scorer, cross_entropy

T = torch.Tensor


class LogitsHead(Protocol):
    """A tiled linear layer."""

    materialized_by: str

    def whole(self, hidden: torch.Tensor) -> torch.Tensor:
        """All logits."""

    def scorers(self) -> Sequence[tuple[range, Scorer]]:
        """The tiles, for the loss."""


@dataclass(frozen=True, slots=True)
class _CallState:
    """The modes in which the head was called: it is computed later, under the same modes."""

    head: LogitsHead
    grad: bool
    autocast: torch.dtype | None

    @contextmanager
    def restored(self, device: torch.device) -> Iterator[None]:
        on = self.autocast is not None
        with (
            torch.set_grad_enabled(self.grad and torch.is_grad_enabled()),
            torch.autocast(device.type, dtype=self.autocast, enabled=on),
        ):
            yield


class _UseParameters(torch.autograd.Function):
    """Identity on the hidden states that puts the head's parameters into their graph, so that DDP does not see them as
    unused; their gradients come another way."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.n = len(parameters)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], *([None] * ctx.n)


class LazyLogits(torch.Tensor):
    """Logits that are not computed yet. Its memory is that of the hidden states."""

    _state: _CallState
    _root: LazyLogits | None = None
    """The tensor that it is a view of; None if it is no view."""
    _step: Callable[[torch.Tensor], torch.Tensor]
    """Computes its values from the root's."""
    _like: torch.Tensor
    """Shape, strides and type of the logits, as a meta tensor."""
    _full: torch.Tensor | None = None

    @classmethod
    def defer(
        cls, head: LogitsHead, hidden: torch.Tensor, words: int, parameters: Sequence[nn.Parameter]
    ) -> LazyLogits:
        """The lazy output of a head for its input."""
        device = hidden.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        dtype = hidden.dtype if autocast is None or hidden.dtype == torch.float64 else autocast
        state = _CallState(head, torch.is_grad_enabled(), autocast)
        trained = [p for p in parameters if p.requires_grad]
        if trained and state.grad:
            hidden = _UseParameters.apply(hidden, *trained)  # type: ignore[no-untyped-call]  # torch's own
        like = torch.empty(*hidden.shape[:-1], words, dtype=dtype, device="meta")
        return _lazy_logits(hidden if state.grad else hidden.detach(), state, like)

    @property
    def is_whole(self) -> bool:
        """Whether all of it was computed."""
        root = self if self._root is None else self._root
        return root._full is not None or self._full is not None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        lazy = _LAZY.get(func)
        if lazy is not None and args and isinstance(args[0], LazyLogits) and not args[0].is_whole:
            result = lazy(*args, **kwargs)
            if result is not NotImplemented:
                return result
        args, kwargs = tree_map(lambda x: _whole(x, func) if isinstance(x, LazyLogits) else x, (args, kwargs))
        return func(*args, **kwargs)


def materialized_to_plain(module: nn.Module, args: Any, output: Any) -> Any:
    """Forward hook of a model: logits that were materialized inside leave it as plain tensors.

    Wrappers of a model (DDP) may read tensors in C++, where Python cannot answer for them.
    """
    whole = [x for x in tree_leaves(output) if isinstance(x, LazyLogits) and x.is_whole]
    if not whole:
        return None
    return tree_map(lambda x: _whole(x, None) if isinstance(x, LazyLogits) and x.is_whole else x, output)


def _lazy_logits(hidden: torch.Tensor, state: _CallState, like: torch.Tensor) -> LazyLogits:
    with without_function_modes():
        new = hidden.as_subclass(LazyLogits)
    new._state, new._like = state, like
    return new


def _hidden(x: LazyLogits) -> torch.Tensor:
    with without_function_modes():
        return x.as_subclass(torch.Tensor)


def _whole(x: LazyLogits, func: Any) -> torch.Tensor:
    """All values, computed once; a view's are a view of its root's, so that in-place writes are seen in both."""
    if x._full is None:
        if x._root is not None:
            x._full = x._step(_whole(x._root, func))
        else:
            hidden, state = _hidden(x), x._state
            state.head.materialized_by = getattr(func, "__qualname__", getattr(func, "__name__", str(func)))
            with state.restored(hidden.device):
                x._full = state.head.whole(hidden).to(x._like.dtype)
    return x._full


# -- what stays lazy


def _view(x: LazyLogits, hidden: torch.Tensor, like: torch.Tensor, step: Callable[[T], T]) -> LazyLogits:
    """A tensor that shares its memory with `x`."""
    new = _lazy_logits(hidden, x._state, like)
    before = x._step if x._root is not None else None
    new._root = x if x._root is None else x._root
    new._step = step if before is None else lambda full: step(before(full))
    return new


def _copy(x: LazyLogits, hidden: torch.Tensor, dtype: torch.dtype | None = None) -> LazyLogits:
    """A tensor with memory of its own."""
    shape = (*hidden.shape[:-1], x._like.shape[-1])
    return _lazy_logits(hidden, x._state, torch.empty(shape, dtype=dtype or x._like.dtype, device="meta"))


def _reshaped(func: Any) -> Callable[..., Any]:
    """A reshape keeps the order of elements: if the last dim stays, only the tokens are reshaped."""

    def lazy(x: LazyLogits, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(a, torch.dtype) for a in (*args, *kwargs.values())):
            return NotImplemented
        like, hidden = func(x._like, *args, **kwargs), _hidden(x)
        if not like.dim() or like.shape[-1] != x._like.shape[-1]:
            return NotImplemented
        hidden = hidden.reshape(*like.shape[:-1], hidden.shape[-1])
        if like._base is None and like is not x._like:  # torch would have copied too
            return _copy(x, hidden)
        return _view(x, hidden, like, lambda full: func(full, *args, **kwargs))

    return lazy


def _indexed(x: LazyLogits, index: Any) -> Any:
    """Index tokens, each with all of its logits."""
    items = index if isinstance(index, tuple) else (index,)
    if any(isinstance(i, list | LazyLogits) for i in items) or not _keeps_last_dim(items, x._like.dim()):
        return NotImplemented
    hidden = _hidden(x)[index]
    if any(isinstance(i, torch.Tensor) for i in items):
        return _copy(x, hidden)
    return _view(x, hidden, x._like[index], lambda full: full[index])


def _keeps_last_dim(items: tuple[Any, ...], dims: int) -> bool:
    """Whether an index keeps the last dim whole."""
    last_is_all = not items or (isinstance(items[-1], slice) and items[-1] == slice(None))
    if any(i is Ellipsis for i in items):
        return items[-1] is Ellipsis or last_is_all
    taken = sum(
        0 if i is None else i.dim() if isinstance(i, torch.Tensor) and i.dtype == torch.bool else 1 for i in items
    )
    return taken < dims or (taken == dims and last_is_all)


def _contiguous(x: LazyLogits, **kwargs: Any) -> Any:
    if kwargs:
        return NotImplemented
    return x if x._like.is_contiguous() else _copy(x, _hidden(x))


def _cast(dtype: torch.dtype) -> Callable[[LazyLogits], Any]:
    return lambda x: x if dtype == x._like.dtype else _copy(x, _hidden(x), dtype)


def _to(x: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    if len(args) == 1 and not kwargs and isinstance(args[0], torch.dtype) and args[0].is_floating_point:
        return _cast(args[0])(x)
    return NotImplemented


def _clone(x: LazyLogits, **kwargs: Any) -> Any:
    return NotImplemented if kwargs else _copy(x, _hidden(x).clone())


def _cross_entropy(
    x: LazyLogits,
    target: Any,
    weight: T | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    hidden, state = _hidden(x), x._state
    by_class = isinstance(target, torch.Tensor) and not target.is_floating_point() and target.shape == hidden.shape[:-1]
    old = size_average is not None or reduce is not None
    both = weight is not None and label_smoothing > 0
    if hidden.dim() != 2 or not by_class or old or both or reduction not in ("mean", "sum", "none"):
        return NotImplemented
    with state.restored(hidden.device):
        loss = cross_entropy(
            state.head.scorers(),
            hidden,
            target,
            weight=weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
    return loss if state.autocast is not None else loss.to(x._like.dtype)


def _hook(x: LazyLogits, hook: Any) -> Any:
    """FSDP's hook only marks the start of the backward; other hooks need the gradient of the logits."""
    if not type(getattr(hook, "__self__", None)).__module__.startswith("torch.distributed.fsdp"):
        return NotImplemented
    with without_function_modes():
        return x.register_hook(hook)  # type: ignore[no-untyped-call]  # torch's own


def _get(name: str) -> Any:
    """The function by which torch reads an attribute."""
    return getattr(T, name).__get__


_SHAPE = (
    T.size,
    T.dim,
    T.numel,
    T.nelement,
    T.stride,
    T.is_contiguous,
    T.is_floating_point,
    T.is_complex,
    T.element_size,
    _get("shape"),
    _get("dtype"),
    _get("ndim"),
)
"""Answered by the meta tensor."""

_PLACE = (
    T.get_device,
    *map(_get, ("device", "layout", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_nested")),
    *map(_get, ("requires_grad", "grad_fn", "is_leaf", "is_quantized")),
)
"""Answered by the hidden states as by the logits."""

_LAZY: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: _cross_entropy,
    T.__getitem__: _indexed,
    T.contiguous: _contiguous,
    T.float: _cast(torch.float32),
    T.double: _cast(torch.float64),
    T.to: _to,
    T.clone: _clone,
    T.register_hook: _hook,
    _get("_base"): lambda x: x._root,
    **{f: _reshaped(f) for f in (T.view, T.reshape, T.flatten, T.unflatten, T.squeeze, T.unsqueeze)},
    **{f: _reshaped(f) for f in (torch.reshape, torch.flatten, torch.squeeze, torch.unsqueeze)},
    **{f: lambda x, *args, f=f, **kwargs: f(x._like, *args, **kwargs) for f in _SHAPE},
    **{f: lambda x, *args, f=f: f(_hidden(x), *args) for f in _PLACE},
}
