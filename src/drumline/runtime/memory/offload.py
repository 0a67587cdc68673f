"""Keeps the optimizer in host memory: its state, and the values that it updates; the device keeps the model.

Gradients are copied to the host, the update runs on its cores, the new values are copied back. On a CPU there is
nothing to move, and nothing is done.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

from ..state.pieces import Piece


class HostCopy:
    """Host copies of a rank's pieces, and of their gradients, in pinned memory."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self.pieces = [_host_piece(piece) for piece in pieces]
        """Pieces that the optimizer updates; each is copied back to its `device_value`."""
        self._gradients = [_host_tensor(piece.value, piece.device_value) for piece in self.pieces]

    @torch.no_grad()
    def gradients_down(self, gradients: Iterable[torch.Tensor | None]) -> None:
        """Copy the gradients from the device to the host."""
        device: torch.device | None = None
        for piece, copy, gradient in zip(self.pieces, self._gradients, gradients, strict=True):
            piece.value.grad = None if gradient is None else copy.copy_(gradient, non_blocking=True)
            device = device if gradient is None else gradient.device
        if device is not None and device.type == "cuda":
            torch.cuda.synchronize(device)

    def values_up(self) -> None:
        """Copy the updated values to the device, and drop the gradients."""
        values_up(self.pieces)
        for piece in self.pieces:
            piece.value.grad = None


@torch.no_grad()
def values_up(pieces: Iterable[Piece]) -> None:
    """Copy offloaded values to the device."""
    for piece in pieces:
        assert piece.device_value is not None
        piece.device_value.copy_(piece.value, non_blocking=True)


def _host_piece(piece: Piece) -> Piece:
    """The piece with its value in host memory."""
    value = piece.value.detach()
    return replace(piece, value=nn.Parameter(_host_tensor(value, value).copy_(value)), device_value=value)


def _host_tensor(like: torch.Tensor, on_device: torch.Tensor | None) -> torch.Tensor:
    pinned = on_device is not None and on_device.device.type == "cuda"
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=pinned)
