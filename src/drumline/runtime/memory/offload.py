"""The optimizer in host memory: its state, and the values that it updates, live there; the device keeps the model.

Gradients go down, the update runs on the host's cores, the new values come up. On a CPU there is nothing to move, and
nothing is done.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

from ..strategies.pieces import Piece


class Host:
    """The host's side of a rank's pieces: twins of their values, and room for their gradients, in pinned memory."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self.pieces = [_twin(piece) for piece in pieces]
        """What the optimizer updates; `home` is where each goes back to."""
        self._rooms = [_room(piece.value, piece.home) for piece in self.pieces]

    @torch.no_grad()
    def gradients_down(self, gradients: Iterable[torch.Tensor | None]) -> None:
        """Give the host's values the gradients of the device."""
        device: torch.device | None = None
        for piece, room, gradient in zip(self.pieces, self._rooms, gradients, strict=True):
            piece.value.grad = None if gradient is None else room.copy_(gradient, non_blocking=True)
            device = device if gradient is None else gradient.device
        if device is not None and device.type == "cuda":
            torch.cuda.synchronize(device)

    def values_up(self) -> None:
        """Bring the updated values back to the device, and forget the gradients."""
        values_up(self.pieces)
        for piece in self.pieces:
            piece.value.grad = None


@torch.no_grad()
def values_up(pieces: Iterable[Piece]) -> None:
    """Bring offloaded values back to the device."""
    for piece in pieces:
        assert piece.home is not None
        piece.home.copy_(piece.value, non_blocking=True)


def _twin(piece: Piece) -> Piece:
    """The piece with its value in host memory."""
    home = piece.value.detach()
    value = _room(home, home).copy_(home)
    return replace(piece, value=nn.Parameter(value), home=home)


def _room(like: torch.Tensor, home: torch.Tensor | None) -> torch.Tensor:
    pinned = home is not None and home.device.type == "cuda"
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=pinned)
