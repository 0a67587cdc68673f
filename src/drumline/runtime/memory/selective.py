"""Selective recomputation: a layer keeps the results that are dear to compute again, and its input for the rest.

Which these are is told by the layer itself. Its first forward is watched, operator by operator, and its first backward
computes all of it again, which shows how far a backward needs it; from then on the choice of `model.selective` holds. A
result is found again by its operator's place in the forward, so a forward that takes another path keeps nothing beyond
the fork. Random operators are kept all or none, in-place operators with the value that they write, messages never.
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
from ...tracing.lineage import Lineage, storage_key, written_by
from ...tracing.op_costs import flops_of, kind_of, size_of, tensors
from .recompute import first_time, once_more, recompute_layer, recomputed_layers

MOST_LOOKS = 64
"""A layer without a backward, because nothing in it is trained, is watched so many times and then left alone."""

SAC_IGNORED_OPS.update(SPAN_OPERATORS)
"""Names for the profiler are no results: a sharded part inside of a layer opens others the second time."""

Moved = list[tuple[torch.Tensor, torch.Tensor]]


def recompute_selectively(model: nn.Module, device: str) -> list[SelectiveLayer]:
    """Make every layer that holds other modules compute its cheap results again in the backward."""
    layers = [SelectiveLayer(s.name, s.module, device) for s in recomputed_layers(model, "selective")]
    for layer in layers:
        recompute_layer(layer.module, layer.contexts)
    return layers


class SelectiveLayer:
    """One layer, what was seen of its forward, and the choice that was made from it."""

    def __init__(self, name: str, module: nn.Module, device: str) -> None:
        self.name, self.module = name, module
        self._device = device
        self.ops: tuple[ProfiledOp, ...] = ()
        """The operators of its forward, with amounts in values; none before it was seen."""
        self.functions: tuple[Any, ...] = ()
        self.words: tuple[str, ...] = ()
        self._looks = 0

    def choices(self) -> list[RecomputeChoice]:
        """The results of its forward by bytes saved per second lost, best first, and whether they are kept."""
        return choices(Layer(self.name, type(self.module).__name__, 0, ops=self.ops), self._device, 1)

    def contexts(self) -> Any:
        """Around one forward, and what makes the context around its repetition."""
        moved: Moved = []
        if not self.words:
            if self._looks >= MOST_LOOKS:
                return first_time(self.module, moved), partial(once_more, moved)
            look = _Look()
            return self._looking(moved, look), partial(self._learning, moved, look)
        kept = _Kept(self)
        return self._keeping(moved, kept), partial(self._repeating, moved, kept)

    @contextmanager
    def _looking(self, moved: Moved, look: _Look) -> Iterator[None]:
        self._looks += 1  # not when it is evaluated: without gradients, nobody comes here
        with first_time(self.module, moved), _casts_apart(), look:
            yield

    @contextmanager
    def _learning(self, moved: Moved, look: _Look) -> Iterator[None]:
        count = _Count()
        try:
            with once_more(moved), _casts_apart(), count:
                yield
        finally:
            if not self.words:
                self.ops, self.functions = look.operators(count.calls), tuple(look.functions)
                self.words = recompute_verdicts(self.ops, self._device, 1)

    @contextmanager
    def _keeping(self, moved: Moved, kept: _Kept) -> Iterator[None]:
        with first_time(self.module, moved), _casts_apart(), _Keep(kept):
            yield
        kept.seal()

    @contextmanager
    def _repeating(self, moved: Moved, kept: _Kept) -> Iterator[None]:
        kept.open()
        with once_more(moved), _casts_apart(), _Give(kept):
            yield


class _Look(UnwrappedDispatchMode):
    """Writes down the operators of one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: list[Any] = []
        self._lineage = Lineage()
        self._seen: list[tuple[str, str, float, float, float]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func in SAC_IGNORED_OPS:
            return out
        results = tensors(out)
        made = sum(size_of(t) for t in self._lineage.add(func, args, kwargs, out))
        name = func._overloadpacket.__name__
        kind = kind_of(name)
        flops = moved = 0.0
        if made or func._schema.is_mutable:
            # in values: half the bytes move in half the time, but half precision computes at twice the speed, too
            width = results[0].element_size() if results else 1
            made /= width
            if not name.startswith(("empty", "new_empty")):
                flops = flops_of(func, kind, args, kwargs, out)
                moved = (sum(map(size_of, tensors((args, kwargs)))) + sum(map(size_of, results))) / width
        self.functions.append(func)
        self._seen.append((name, kind, flops, moved, made))
        return out

    def operators(self, needed: int) -> tuple[ProfiledOp, ...]:
        """All of them, of which a backward needs the first ones."""
        bound = self._lineage.always_recomputed()
        found = []
        for i, (name, kind, flops, moved, made) in enumerate(self._seen):
            group = self._lineage.group(i)
            again = "never" if i >= needed else "always" if group in bound else ""
            amounts = (Affine(0.0, flops), Affine(0.0, moved))
            found.append(ProfiledOp(name, kind, "forward", *amounts, 1, Affine(0.0, made), group + 1, again))
        return tuple(found)


class _Count(UnwrappedDispatchMode):
    """Counts the operators of a repetition, which ends when all that the backward needs is there."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func not in SAC_IGNORED_OPS
        return func(*args, **(kwargs or {}))


class _Kept:
    """The results that one forward keeps, until its repetition asks for them; sees to it that nobody changes them.

    A result is found again by its operator and how often that was called before: a sharded part inside of a layer sends
    other messages the second time. Torch has contexts for this, too, but what they ask for, and when, depends on the
    release.
    """

    def __init__(self, layer: SelectiveLayer) -> None:
        self.layer = layer
        self.functions = {f for f, word in zip(layer.functions, layer.words, strict=True) if word == KEPT}
        """The operators of which a result is kept."""
        self._results: dict[tuple[Any, int], Any] = {}
        self._keys: set[int] = set()
        self._versions: list[int] = []
        self._asked = False

    def keep(self, func: Any, number: int, out: Any) -> None:
        """The result of a call of an operator, the `number`th of them."""
        self._keys.update(storage_key(t) for t in tensors(out))
        self._results[func, number] = _aliased(out)

    def give(self, func: Any, number: int) -> Any:
        """That result, once; None where it is computed again."""
        return self._results.pop((func, number), None)

    def look_at(self, func: Any, args: Any, kwargs: Any) -> None:
        """An operator whose result is not kept may not write to one that is."""
        if self._keys and any(storage_key(t) in self._keys for t in written_by(func, args, kwargs)):
            raise self._changed(f"by {func}")

    def seal(self) -> None:
        """The forward is over: from here on, nothing that is kept may change."""
        self._versions = [t._version for t in tensors(list(self._results.values()))]

    def open(self) -> None:
        """The backward begins: look at what was kept."""
        if self._asked:
            raise PlanError(
                f"recompute=selective: a second backward through layer {self.layer.name}",
                rule="what is kept is given to one backward, and then forgotten",
                fix="recompute=full, or one backward",
            )
        self._asked = True
        if any(t._version != v for t, v in zip(tensors(list(self._results.values())), self._versions, strict=True)):
            raise self._changed("after its forward")

    def _changed(self, how: str) -> PlanError:
        return PlanError(
            f"recompute=selective: a result that layer {self.layer.name} keeps was changed in place {how}",
            rule="what is kept for the backward stays as it was",
            fix="recompute=full or recompute=none, or an operator that is not in place",
        )


class _Keep(UnwrappedDispatchMode):
    """Around one forward: keeps what was chosen, as long as it takes the path of the forward that was watched."""

    def __init__(self, kept: _Kept) -> None:
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
        self._same = self._same and i < len(layer.functions) and layer.functions[i] is func
        if self._same and layer.words[i] == KEPT:
            self._kept.keep(func, self._calls[func], out)
        else:
            self._kept.look_at(func, args, kwargs)
        if func in self._kept.functions:
            self._calls[func] += 1
        return out


class _Give(UnwrappedDispatchMode):
    """Around the repetition: gives what was kept, and lets go of it; the rest is computed."""

    def __init__(self, kept: _Kept) -> None:
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
def _casts_apart() -> Iterator[None]:
    """Without the memory of autocast: a weight that was cast earlier would not be cast in the first forward, but in its
    repetition, and every later cast would be taken for another one.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _alias(t: torch.Tensor) -> torch.Tensor:
    """The same memory and the same count of changes, without the graph that would keep itself alive."""
    # below autograd, a view gets a count of its own unless this key is let in
    with with_view_tracking():
        return t.detach()


def _aliased(out: Any) -> Any:
    """The results of an operator, which are tensors or a tuple or list of some."""
    if isinstance(out, torch.Tensor):
        return _alias(out)
    return type(out)(map(_aliased, out)) if isinstance(out, tuple | list) else out
