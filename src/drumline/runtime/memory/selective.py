"""Selective recomputation: a layer keeps the results that are expensive to recompute, and its input for the rest.

The layer's own first forward decides: it is traced, operator by operator, and its first backward recomputes all of it,
which shows how far a backward needs it; from then on the choice of `models.selective` applies. A result is identified
by its operator's place in the forward, so a forward that takes another path keeps nothing beyond the branch. Random
operators are kept all or none, in-place operators with the value that they write, messages never.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import SAC_IGNORED_OPS

from ...core.errors import PlanError
from ...models.profile import Affine, Layer, ProfiledOp
from ...models.recompute_choice import KEPT, RecomputeChoice, choices, recompute_verdicts
from ...torchkit.dispatch_modes import UnwrappedDispatchMode, with_view_tracking
from ...torchkit.profiler import SPAN_OPERATORS
from ...torchkit.schemas import writes_in_place
from ...tracing.lineage import Lineage, storage_key, written_by
from ...tracing.op_costs import flops_of, kind_of, size_of, tensors
from .recompute import recompute_layer, recomputed_layers, saving_buffers, with_saved_buffers

MAX_TRACES = 64
"""A layer that never has a backward, because nothing in it is trained, is traced at most this many times."""

SAC_IGNORED_OPS.update(SPAN_OPERATORS)
"""Profiler ranges are no results: a sharded part inside a layer opens different ones the second time."""

SavedBuffers = list[tuple[torch.Tensor, torch.Tensor]]


def recompute_selectively(model: nn.Module, device: str) -> list[SelectiveLayer]:
    """Make every layer that has submodules recompute its cheap results in the backward."""
    layers = [SelectiveLayer(s.name, s.module, device) for s in recomputed_layers(model, "selective")]
    for layer in layers:
        recompute_layer(layer.module, layer.contexts)
    return layers


class SelectiveLayer:
    """One layer, the trace of its forward, and the choice made from it."""

    def __init__(self, name: str, module: nn.Module, device: str) -> None:
        self.name, self.module = name, module
        self._device = device
        self.ops: tuple[ProfiledOp, ...] = ()
        """The operators of its forward, with amounts in elements; none before it was traced."""
        self.operators: tuple[Any, ...] = ()
        self.verdicts: tuple[str, ...] = ()
        self._traces = 0

    def choices(self) -> list[RecomputeChoice]:
        """The results of its forward by bytes saved per second lost, best first, and whether each is kept."""
        return choices(Layer(self.name, type(self.module).__name__, 0, ops=self.ops), self._device, 1)

    def contexts(self) -> Any:
        """The context around one forward, and a factory of the context around its repetition."""
        saved: SavedBuffers = []
        if not self.verdicts:
            if self._traces >= MAX_TRACES:
                return saving_buffers(self.module, saved), partial(with_saved_buffers, saved)
            trace = _OperatorTrace()
            return self._tracing(saved, trace), partial(self._learning, saved, trace)
        kept = _KeptResults(self)
        return self._keeping(saved, kept), partial(self._repeating, saved, kept)

    @contextmanager
    def _tracing(self, saved: SavedBuffers, trace: _OperatorTrace) -> Iterator[None]:
        self._traces += 1  # not in evaluation: without gradients this is not called
        with saving_buffers(self.module, saved), _without_autocast_cache(), trace:
            yield

    @contextmanager
    def _learning(self, saved: SavedBuffers, trace: _OperatorTrace) -> Iterator[None]:
        count = _OperatorCount()
        try:
            with with_saved_buffers(saved), _without_autocast_cache(), count:
                yield
        finally:
            if not self.verdicts:
                self.ops, self.operators = trace.operators(count.calls), tuple(trace.functions)
                self.verdicts = recompute_verdicts(self.ops, self._device, 1)

    @contextmanager
    def _keeping(self, saved: SavedBuffers, kept: _KeptResults) -> Iterator[None]:
        with saving_buffers(self.module, saved), _without_autocast_cache(), _KeepMode(kept):
            yield
        kept.seal()

    @contextmanager
    def _repeating(self, saved: SavedBuffers, kept: _KeptResults) -> Iterator[None]:
        kept.open()
        with with_saved_buffers(saved), _without_autocast_cache(), _ReplayMode(kept):
            yield


class _OperatorTrace(UnwrappedDispatchMode):
    """Records the operators of one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: list[Any] = []
        self._lineage = Lineage()
        self._calls: list[tuple[str, str, float, float, float]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func in SAC_IGNORED_OPS:
            return out
        results = tensors(out)
        made = sum(size_of(t) for t in self._lineage.add(func, args, kwargs, out))
        name = func.overloadpacket.__name__
        kind = kind_of(name)
        flops = moved = 0.0
        if made or writes_in_place(func):
            # in elements: in half precision bytes move and operators compute at twice the speed
            width = results[0].element_size() if results else 1
            made /= width
            if not name.startswith(("empty", "new_empty")):
                flops = flops_of(func, kind, args, kwargs, out)
                moved = (sum(map(size_of, tensors((args, kwargs)))) + sum(map(size_of, results))) / width
        self.functions.append(func)
        self._calls.append((name, kind, flops, moved, made))
        return out

    def operators(self, needed: int) -> tuple[ProfiledOp, ...]:
        """All operators, of which a backward needs the first `needed`."""
        bound = self._lineage.always_recomputed()
        ops = []
        for i, (name, kind, flops, moved, made) in enumerate(self._calls):
            group = self._lineage.group(i)
            again = "never" if i >= needed else "always" if group in bound else ""
            amounts = (Affine(0.0, flops), Affine(0.0, moved))
            ops.append(ProfiledOp(name, kind, "forward", *amounts, 1, Affine(0.0, made), group + 1, again))
        return tuple(ops)


class _OperatorCount(UnwrappedDispatchMode):
    """Counts the operators of a repetition, which ends once the backward has all that it needs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func not in SAC_IGNORED_OPS
        return func(*args, **(kwargs or {}))


class _KeptResults:
    """The results that one forward keeps for its repetition; checks that they are not changed meanwhile.

    A result is identified by its operator and the number of earlier calls of it: a sharded part inside a layer sends
    other messages the second time. Torch has contexts for this too, but their behaviour depends on the release.
    """

    def __init__(self, layer: SelectiveLayer) -> None:
        self.layer = layer
        self.functions = {f for f, word in zip(layer.operators, layer.verdicts, strict=True) if word == KEPT}
        """The operators with a result to keep."""
        self._results: dict[tuple[Any, int], Any] = {}
        self._keys: set[int] = set()
        self._versions: list[int] = []
        self._asked = False

    def keep(self, func: Any, number: int, out: Any) -> None:
        """Keep the result of the `number`th call of an operator."""
        self._keys.update(storage_key(t) for t in tensors(out))
        self._results[func, number] = _aliased(out)

    def give(self, func: Any, number: int) -> Any:
        """That result, once; None where it is recomputed."""
        return self._results.pop((func, number), None)

    def check_write(self, func: Any, args: Any, kwargs: Any) -> None:
        """Refuse an operator that writes in place to a kept result."""
        if self._keys and any(storage_key(t) in self._keys for t in written_by(func, args, kwargs)):
            raise self._changed(f"by {func}")

    def seal(self) -> None:
        """After the forward: from now on, kept results may not change."""
        self._versions = [t._version for t in tensors(list(self._results.values()))]

    def open(self) -> None:
        """When the backward begins: check what was kept."""
        if self._asked:
            raise PlanError(
                f"recompute=selective: a second backward through layer {self.layer.name}",
                rule="kept results are for one backward, and then freed",
                fix="recompute=full, or one backward",
            )
        self._asked = True
        if any(t._version != v for t, v in zip(tensors(list(self._results.values())), self._versions, strict=True)):
            raise self._changed("after its forward")

    def _changed(self, how: str) -> PlanError:
        return PlanError(
            f"recompute=selective: a result that layer {self.layer.name} keeps was changed in place {how}",
            rule="results kept for the backward must not change",
            fix="recompute=full or recompute=none, or an operator that is not in place",
        )


class _KeepMode(UnwrappedDispatchMode):
    """Around one forward: keeps the chosen results, as long as it takes the path of the traced forward."""

    def __init__(self, kept: _KeptResults) -> None:
        super().__init__()
        self._kept, self._place, self._same = kept, 0, True
        self._calls: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func in SAC_IGNORED_OPS:
            return out
        layer, i = self._kept.layer, self._place
        self._place += 1
        self._same = self._same and i < len(layer.operators) and layer.operators[i] is func
        if self._same and layer.verdicts[i] == KEPT:
            self._kept.keep(func, self._calls[func], out)
        else:
            self._kept.check_write(func, args, kwargs)
        if func in self._kept.functions:
            self._calls[func] += 1
        return out


class _ReplayMode(UnwrappedDispatchMode):
    """Around the repetition: returns and frees kept results; the rest is computed."""

    def __init__(self, kept: _KeptResults) -> None:
        super().__init__()
        self._kept = kept
        self._calls: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._kept.functions:
            number = self._calls[func]
            self._calls[func] += 1
            result = self._kept.give(func, number)
            if result is not None:
                return result
        return func(*args, **(kwargs or {}))


@contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Without autocast's cache: a weight that was cast earlier would not be cast in the first forward but in its
    repetition, and every later cast would be mistaken for another one.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _alias(t: torch.Tensor) -> torch.Tensor:
    """The same memory and version counter, without the graph, which would keep itself alive."""
    # below autograd, a view gets a version counter of its own unless this key is included
    with with_view_tracking():
        return t.detach()


def _aliased(out: Any) -> Any:
    """Aliases of the results of an operator: tensors, or a tuple or list of them."""
    if isinstance(out, torch.Tensor):
        return _alias(out)
    return type(out)(map(_aliased, out)) if isinstance(out, tuple | list) else out
