"""Looks at a rank's own numbers where the plan splits the model: there operators run, and no modules that have hooks.

A bad number spreads to the ranks that share a layer, and to the stages behind its own. So an output of a module has a
place that all ranks count alike: micro-batch, and its place in the forward. Who has the first bad one made it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .finite import finite, spoiled

if TYPE_CHECKING:
    from ..engine import Engine
    from ..parallel import SplitModel
    from ..parallel.spreading import Shown

_ROOM = 10**7
"""More than a forward has outputs, or a stage has gradients."""


class SplitWatch:
    """Watches the outputs of modules, the gradients and the losses of one rank while a step runs."""

    def __init__(self, engine: Engine) -> None:
        assert engine.split is not None
        self._engine, self._split = engine, engine.split
        self._places: dict[tuple[str, int, int], int] = {}
        self.output: tuple[int, str] | None = None
        """The place of the first bad output, and its module."""
        self.loss = False
        """Whether a loss of this rank was bad."""
        self._came = 0
        self._gradients: dict[str, int] = {}
        """Parameters with a bad gradient -> how much of the backward came before."""
        self._hooks: list[Any] = []

    def __enter__(self) -> SplitWatch:
        self._places = {key: i for i, key in enumerate(self._split.first.outputs)}
        self._split.watch(self._sees)
        for name, p in self._engine.model.named_parameters():
            if p.requires_grad:
                self._hooks.append(p.register_hook(self._gradient(name)))
        _instead(self._split, "loss_of", self._looked)
        _instead(self._split, "train", self._trained)
        return self

    def __exit__(self, *_: object) -> None:
        self._split.unwatch()
        for hook in self._hooks:
            hook.remove()
        for name in ("loss_of", "train"):
            delattr(self._split, name)  # what was put before the methods

    @property
    def gradients(self) -> tuple[tuple[str, ...], int]:
        """Parameters whose own gradient was bad, in the order of the backward, and what came before the first."""
        names = tuple(sorted(self._gradients, key=lambda name: self._gradients[name]))
        return names, self._gradients[names[0]] if names else 0

    def _sees(self, micro: int, shown: Shown, value: torch.Tensor) -> None:
        if spoiled(value):
            place = micro * _ROOM + self._places[shown.module, shown.call, shown.which]
            self.output = min(self.output or (place, shown.module), (place, shown.module))

    def _gradient(self, name: str) -> Callable[[torch.Tensor], None]:
        mine = [s for s in self._split.places.held[name] if s in self._split.places.mine]
        # a backward begins with the last stage
        before = (self._split.places.order.stages - 1 - max(mine)) * _ROOM if self._split.places.pipelined else 0

        def hook(gradient: torch.Tensor) -> None:
            self._came += 1
            if not finite(gradient):
                self._gradients.setdefault(name, before + self._came)

        return hook

    def _looked(self, plain: Callable[..., Any], *args: Any) -> Any:
        total, weight, own = plain(*args)
        self.loss |= not finite(total)
        return total, weight, own

    def _trained(self, plain: Callable[..., Any], *args: Any) -> Any:
        losses, weighted = plain(*args)
        self.loss |= any(not finite(total) for total, *_ in losses)
        return losses, weighted


def _instead(split: SplitModel, name: str, looked: Callable[..., Any]) -> None:
    """Put a function before a method; it gets the method first."""
    plain = getattr(split, name)
    setattr(split, name, lambda *args: looked(plain, *args))
