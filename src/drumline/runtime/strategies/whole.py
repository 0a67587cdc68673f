"""Base of the strategies that have the whole model in one process: its parameters are the pieces."""

from __future__ import annotations

from torch import nn

from ..state.pieces import Piece
from .strategy import Strategy


class WholeModel(Strategy):
    """One copy of the weights in this process; a subclass decides how it is called."""

    def __init__(self) -> None:
        self._model: nn.Module
        self._parameters: list[nn.Parameter] = []

    def keep(self, model: nn.Module) -> None:
        """Remember the model; `wrap` begins with this."""
        self._model, self._parameters = model, list(model.parameters())

    def pieces(self) -> list[Piece]:
        return [Piece(name, tuple(p.shape), 0, p, replicated=True) for name, p in self._model.named_parameters()]

    def gather_gradients(self) -> None:
        """Nothing to do: after the backward they are complete, in the parameters."""

    def after_update(self) -> None:
        self.drop_gradients()

    def drop_gradients(self) -> None:
        for p in self._parameters:
            p.grad = None
