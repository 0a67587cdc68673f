"""Reads runs of numbers out of a checkpoint, wherever the ranks that saved it have put them."""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path

import torch

from .codec import dtype_of
from .manifest import Manifest, key_of
from .shard import Shards


class Reader:
    """The tensors of one checkpoint whose digests were verified."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._shards = Shards(folder)

    @torch.no_grad()
    def fill(self, name: str, start: int, out: torch.Tensor) -> None:
        """Numbers `start` and on of the flattened tensor `name`, as many as `out` has; converted to its type."""
        flat = out.detach().view(-1) if out.is_contiguous() else torch.empty(out.numel(), dtype=out.dtype)
        entry = self.manifest.tensors[name]
        dtype = dtype_of(entry.dtype, str(self.folder))
        assert start + out.numel() <= entry.numel, f"{name}: {start} + {out.numel()} of {entry.numel}"
        starts = [run[1] for run in entry.runs]
        place, stop = start, start + out.numel()
        while place < stop:
            file, first, length = entry.runs[bisect_right(starts, place) - 1]
            end = min(stop, first + length)
            part = self._shards.flat(file, key_of(name, first), dtype, place - first, end - first)
            flat[place - start : end - start].copy_(part)
            place = end
        if not out.is_contiguous():
            out.copy_(flat.view(out.shape))

    def whole(self, name: str) -> torch.Tensor:
        """A whole tensor in its own shape and type."""
        entry = self.manifest.tensors[name]
        out = torch.empty(entry.shape, dtype=dtype_of(entry.dtype, str(self.folder)))
        self.fill(name, 0, out)
        return out
