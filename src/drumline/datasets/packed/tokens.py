"""`dl.PackedTokens`: packed text as samples (input, target) of a fixed length, for training a language model."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from ...core.errors import InputError
from .layout import TOKEN_BLOCK, PackIndex
from .shard_reader import ShardReader


class PackedTokens(Dataset[Any]):
    """Windows of `length` tokens: the input, and the target, which is one token further. Windows do not overlap.

    Sample i is tokens i * length to (i + 1) * length, over the ends of files and shards; tokens after the last whole
    window are not used. Each block of 64 KiB is checked when it is first read.
    """

    def __init__(self, path: str | Path, *, length: int) -> None:
        self.path, self.length = Path(path), length
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise InputError(f"length={length!r}", rule="tokens of a sample: a whole number of at least 1")
        self.index = PackIndex.load(self.path)
        if self.index.kind != "tokens":
            raise InputError(f"{path} is not packed text", rule="samples, not tokens", fix="PackedDataset(path)")
        if self.index.samples <= length:
            rule = f"more than length={length} tokens, one for the last target"
            raise InputError(f"{path} has {self.index.samples} tokens", rule=rule)
        self._rows = self.index.rows(self.path)
        self._checked = np.zeros(len(self._rows), dtype=bool)
        self._first_block = np.searchsorted(self._rows["shard"], np.arange(len(self.index.shards))).tolist()
        self._starts = [0, *accumulate(s.samples for s in self.index.shards)]
        self._dtype = np.dtype(self.index.dtype).newbyteorder("<")
        self._reader = ShardReader(self.path, self.index.shards)

    def __len__(self) -> int:
        return (self.index.samples - 1) // self.length

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.from_numpy(self._windows([i])[0])
        return tokens[:-1], tokens[1:]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Several samples, in the order asked for."""
        return list(zip(*self.collated(indices), strict=True))

    def collated(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """A batch: inputs and targets."""
        tokens = torch.from_numpy(self._windows(indices))
        return [tokens[:, :-1], tokens[:, 1:]]

    def tokens(self, start: int, end: int) -> np.ndarray:
        """The tokens from `start` to `end` (excluded) of the whole text."""
        parts = []
        while start < end:
            shard = bisect_right(self._starts, start) - 1
            last = min(end, self._starts[shard + 1])
            parts.append(self._of_shard(shard, start - self._starts[shard], last - self._starts[shard]))
            start = last
        return np.concatenate(parts) if len(parts) != 1 else parts[0]

    def _windows(self, indices: Sequence[int]) -> np.ndarray:
        made = np.empty((len(indices), self.length + 1), dtype=np.int64)
        for k, i in enumerate(indices):
            i = int(i) + (len(self) if i < 0 else 0)
            if not 0 <= i < len(self):
                raise IndexError(f"samples are numbered from 0 to {len(self) - 1}")
            made[k] = self.tokens(i * self.length, (i + 1) * self.length + 1)
        return made

    def _of_shard(self, shard: int, first: int, last: int) -> np.ndarray:
        width = self._dtype.itemsize
        begin, end = first * width, last * width
        low, high = begin // TOKEN_BLOCK, -(-end // TOKEN_BLOCK)
        base = self._first_block[shard]
        if self._checked[base + low : base + high].all():
            return self._reader.read_unchecked(shard, begin, end - begin).view(self._dtype)
        rows = self._rows[base + low : base + high]
        data = self._reader.read(rows["shard"], rows["start"], rows["length"], rows["checksum"])
        self._checked[base + low : base + high] = True
        return data.view(self._dtype)[first - low * TOKEN_BLOCK // width :][: last - first].copy()

    def __getstate__(self) -> Mapping[str, Any]:
        """For a process that is not forked: it opens the pack itself."""
        return {"path": self.path, "length": self.length}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__(state["path"], length=state["length"])  # type: ignore[misc]  # opens the pack, as the first time
