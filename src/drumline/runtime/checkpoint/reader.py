"""Reads ranges of elements from a checkpoint, whichever ranks wrote them."""

from __future__ import annotations

from bisect import bisect_right
from functools import partial
from pathlib import Path

import torch

from .boxes import Box, fill_box
from .codec import dtype_of
from .manifest import BoxRuns, Manifest, ManifestEntry, key_of
from .tensor_files import ShardFiles

Runs = tuple[tuple[str, int, int], ...]


class CheckpointReader:
    """Reads the tensors of one verified checkpoint."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._shards = ShardFiles(folder)

    @torch.no_grad()
    def fill(self, name: str, start: int, out: torch.Tensor, box: Box | None = None) -> None:
        """Fill `out` with the elements of the flattened tensor `name` from `start` on, converted to its dtype.

        With a box, `start` is an index in the flattened box.
        """
        entry = self.manifest.tensors[name]
        same = next((b for b in entry.boxes if b.box == box), None)
        if box is not None and same is None:
            fill_box(partial(self.fill, name), entry.shape, box, start, out)
            return
        size = entry.numel if box is None else box.numel(entry.shape)
        assert start + out.numel() <= size, f"{name}: {start} + {out.numel()} of {size}"
        flat = out.detach().view(-1) if out.is_contiguous() else torch.empty(out.numel(), dtype=out.dtype)
        if same is not None:
            self._read(name, entry, same.runs, same, start, flat)
        elif entry.boxes:
            self._gather(name, entry, start, flat)
        else:
            self._read(name, entry, entry.runs, None, start, flat)
        if not out.is_contiguous():
            out.copy_(flat.view(out.shape))

    def whole(self, name: str) -> torch.Tensor:
        """Read a whole tensor in its saved shape and dtype."""
        entry = self.manifest.tensors[name]
        out = torch.empty(entry.shape, dtype=dtype_of(entry.dtype, str(self.folder)))
        self.fill(name, 0, out)
        return out

    def _read(
        self, name: str, entry: ManifestEntry, runs: Runs, boxed: BoxRuns | None, start: int, flat: torch.Tensor
    ) -> None:
        """Read elements as they are stored, indexed in the tensor or in a box of it."""
        dtype = dtype_of(entry.dtype, str(self.folder))
        starts = [run[1] for run in runs]
        position, stop = start, start + flat.numel()
        while position < stop:
            file, first, length = runs[bisect_right(starts, position) - 1]
            end = min(stop, first + length)
            key = key_of(name, boxed.box.tensor_index(entry.shape, first) if boxed else first)
            part = self._shards.flat(file, key, dtype, position - first, end - first)
            flat[position - start : end - start].copy_(part)
            position = end

    def _gather(self, name: str, entry: ManifestEntry, start: int, flat: torch.Tensor) -> None:
        """Assemble elements of the tensor from the boxes that it was saved in."""
        stop, dtype = start + flat.numel(), dtype_of(entry.dtype, str(self.folder))
        shape, some = entry.shape, entry.boxes[0].box
        if all(b.box.in_long_runs(shape, dtype.itemsize) for b in entry.boxes):
            for boxed in entry.boxes:
                for in_tensor, in_box, n in boxed.box.within(shape, start, stop):
                    self._read(name, entry, boxed.runs, boxed, in_box, flat[in_tensor - start : in_tensor - start + n])
            return
        row = some.row(shape)
        for first, count in some.windows(shape, start // row, -(-stop // row), dtype.itemsize):
            rows = torch.empty(count * row, dtype=dtype)
            for boxed in entry.boxes:
                in_box = boxed.box.row_in_box(shape)
                part = torch.empty(count * in_box, dtype=dtype)
                self._read(name, entry, boxed.runs, boxed, first * in_box, part)
                boxed.box.put(shape, rows, part)
            low, high = max(start, first * row), min(stop, (first + count) * row)
            flat[low - start : high - start].copy_(rows[low - first * row : high - first * row])
