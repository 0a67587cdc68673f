"""Selective recomputation: a layer keeps the results that are dear to compute again, and its input for the rest.

Which these are is told by the layer itself. Its first forward is watched, operator by operator, and its first backward
computes all of it again, which shows how far a backward needs it; from then on the choice of `model.selective` holds. A
result is found again by its operator's place in the forward, so a forward that takes another path keeps nothing beyond
the fork. Random operators are kept all or none, in-place operators with the value that they write, messages never.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

from ...errors import PlanError
from ...model.profile import Affine, Layer, Op
from ...model.selective import KEPT, Choice, choices, verdicts
from ...trace.kinds import flops_of, kind_of, size_of, tensors
from ...trace.lineage import Lineage, key_of, written_by
from .recompute import first_time, once_more, recompute_layer, recomputed_layers

MOST_LOOKS = 64
"""A layer without a backward, because nothing in it is trained, is watched so many times and then left alone."""

TELLS = "op_output" in inspect.signature(SelectiveCheckpointContext.__init__).parameters
"""Whether torch asks what to do with a result when it is there; releases before 2.12 ask before it is."""

SAC_IGNORED_OPS.update({
    torch.ops.profiler._record_function_enter_new.default, torch.ops.profiler._record_function_exit._RecordFunction,
    torch.ops.profiler._record_function_enter.default, torch.ops.profiler._record_function_exit.default,
})  # fmt: skip
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
        self.ops: tuple[Op, ...] = ()
        """The operators of its forward, with amounts in values; none before it was seen."""
        self.functions: tuple[Any, ...] = ()
        self.words: tuple[str, ...] = ()
        self._looks = 0

    def choices(self) -> list[Choice]:
        """The results of its forward by bytes saved per second lost, best first, and whether they are kept."""
        return choices(Layer(self.name, type(self.module).__name__, 0, ops=self.ops), self._device, 1)

    def contexts(self) -> Any:
        """Around one forward, and around its repetition."""
        moved: Moved = []
        if not self.words:
            if self._looks >= MOST_LOOKS:
                return first_time(self.module, moved), once_more(moved)
            look = _Look()
            return self._looking(moved, look), self._learning(moved, look)
        keeper = _Keeper(self)
        # what a layer itself writes in place is part of what is kept; the keeper finds what others write
        first, again = create_selective_checkpoint_contexts(keeper, allow_cache_entry_mutation=True)
        return self._keeping(moved, keeper, first), self._repeating(moved, keeper, again)

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
                self.words = verdicts(self.ops, self._device, 1)

    @contextmanager
    def _keeping(self, moved: Moved, keeper: _Keeper, mode: Any) -> Iterator[None]:
        with first_time(self.module, moved), _casts_apart(), nullcontext() if TELLS else _Results(keeper), mode:
            yield
        keeper.seal()

    @contextmanager
    def _repeating(self, moved: Moved, keeper: _Keeper, mode: Any) -> Iterator[None]:
        keeper.open()
        with once_more(moved), _casts_apart(), mode:
            yield


class _Look(TorchDispatchMode):
    """Writes down the operators of one forward."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
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

    def operators(self, needed: int) -> tuple[Op, ...]:
        """All of them, of which a backward needs the first ones."""
        bound = self._lineage.bound()
        found = []
        for i, (name, kind, flops, moved, made) in enumerate(self._seen):
            group = self._lineage.group(i)
            again = "never" if i >= needed else "always" if group in bound else ""
            amounts = (Affine(0.0, flops), Affine(0.0, moved))
            found.append(Op(name, kind, "forward", *amounts, 1, Affine(0.0, made), group + 1, again))
        return tuple(found)


class _Count(TorchDispatchMode):
    """Counts the operators of a repetition, which ends when all that the backward needs is there."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func not in SAC_IGNORED_OPS
        return func(*args, **(kwargs or {}))


class _Keeper:
    """Says of every operator of one forward whether its result is kept, and sees to it that nobody changes it."""

    def __init__(self, layer: SelectiveLayer) -> None:
        self._layer = layer
        self._place = 0
        self._same = True
        """Whether this forward has taken the path of the one that was watched."""
        self._keys: set[int] = set()
        self._results: list[torch.Tensor] = []
        self._versions: list[int] = []
        self.expects = False
        """Whether the operator that runs now has a result that is kept."""

    def __call__(self, context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        layer, i = self._layer, self._place
        self._place += 1
        self._same = self._same and i < len(layer.functions) and layer.functions[i] is func
        if self._same and layer.words[i] == KEPT:
            if TELLS:
                self.remember(context.op_output)
            self.expects = not TELLS
            return CheckpointPolicy.MUST_SAVE
        if self._keys and any(key_of(t) in self._keys for t in written_by(func, args, kwargs)):
            raise self._changed(f"by {func}")
        return CheckpointPolicy.MUST_RECOMPUTE

    def remember(self, result: Any) -> None:
        """This result is kept."""
        self.expects = False
        for t in tensors(result):
            self._keys.add(key_of(t))
            self._results.append(_alias(t))

    def seal(self) -> None:
        """The forward is over: from here on, nothing that is kept may change."""
        self._versions = [t._version for t in self._results]

    def open(self) -> None:
        """The backward begins: look at what was kept, and let go of it."""
        changed = any(t._version != v for t, v in zip(self._results, self._versions, strict=True))
        self._results, self._versions = [], []
        if changed:
            raise self._changed("after its forward")

    def _changed(self, how: str) -> PlanError:
        return PlanError(
            f"recompute=selective: a result that layer {self._layer.name} keeps was changed in place {how}",
            rule="what is kept for the backward stays as it was",
            fix="recompute=full or recompute=none, or an operator that is not in place",
        )


class _Results(TorchDispatchMode):
    """Tells the keeper of the results, where torch does not."""

    def __init__(self, keeper: _Keeper) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._keeper = keeper

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._keeper.expects:
            self._keeper.remember(out)
        return out


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
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return t.detach()
