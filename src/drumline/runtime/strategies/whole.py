"""What the strategies share that hold the whole model in one process: its parameters are the pieces."""

from __future__ import annotations

from torch import nn

from ..state.pieces import Piece
from .strategy import Strategy


class WholeModel(Strategy):
    """One copy of the weights in this process; a subclass says how it is called."""

    def __init__(self) -> None:
        self._model: nn.Module
        self._parameters: list[nn.Parameter] = []

    def hold(self, model: nn.Module) -> None:
        """From now on this is the model; `wrap` begins with it."""
        self._model, self._parameters = model, list(model.parameters())

    def pieces(self) -> list[Piece]:
        return [Piece(name, tuple(p.shape), 0, p, replicated=True) for name, p in self._model.named_parameters()]

    def gather_gradients(self) -> None:
        """They are complete where the weights are when the backward has ended."""

    def after_update(self) -> None:
        self.drop_gradients()

    def drop_gradients(self) -> None:
        for p in self._parameters:
            p.grad = None
