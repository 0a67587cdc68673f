"""The optimizer in host memory: its state, and the values that it updates, live there; the device keeps the model.

Gradients go down, the update runs on the host's cores, the new values come up. On a CPU there is nothing to move, and
nothing is done.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

from .pieces import Piece


def to_host(piece: Piece) -> Piece:
    """The piece with its value in host memory."""
    pin = piece.value.device.type == "cuda"
    twin = torch.empty(piece.value.shape, dtype=piece.value.dtype, pin_memory=pin)
    twin.copy_(piece.value.detach())
    return replace(piece, value=nn.Parameter(twin), home=piece.value.detach())


@torch.no_grad()
def gradients_down(pieces: Iterable[Piece], gradients: Iterable[torch.Tensor | None]) -> None:
    """Give the host's values the gradients of the device."""
    device: torch.device | None = None
    for piece, gradient in zip(pieces, gradients, strict=True):
        if gradient is None:
            piece.value.grad = None
            continue
        device = gradient.device
        place = torch.empty(gradient.shape, dtype=gradient.dtype, pin_memory=device.type == "cuda")
        piece.value.grad = place.copy_(gradient, non_blocking=True)
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.no_grad()
def values_up(pieces: Iterable[Piece]) -> None:
    """Bring the updated values back to the device."""
    for piece in pieces:
        assert piece.home is not None
        piece.home.copy_(piece.value, non_blocking=True)
