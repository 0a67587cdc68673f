"""`dl.PackedDataset`: the samples of a pack by number, one or a whole batch, as a map-style dataset."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate

from ...core.errors import CorruptFile, InputError, JobError
from ...core.regular_files import read_lines
from .decode import decode_column, decode_member
from .layout import NAMES, PackIndex
from .shard_order import shard_order
from .shard_reader import ShardReader

SHUFFLES = ("samples", "shards")


class PackedDataset(Dataset[Any]):
    """A pack that `drumline pack` wrote, for `Job.data` or torch's DataLoader.

    A sample is what was packed: (file, label) of a folder with classes, (input, target) of tensors, a dict of a dataset
    of dicts. `.npy` members become tensors, images tensors of bytes [3, height, width], labels whole numbers, texts
    strings. `decode` gets the bytes of a sample by their endings instead, `{"jpg": b"...", "cls": b"3"}`; `transform`
    changes a decoded sample. `shuffle="shards"` draws an epoch's order from few shards at a time, for data that is
    larger than the memory: see `shard_order`.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        decode: Callable[[dict[str, bytes]], Any] | None = None,
        transform: Callable[[Any], Any] | None = None,
        shuffle: str = "samples",
    ) -> None:
        self.path, self._decode, self._transform, self._shuffle = Path(path), decode, transform, shuffle
        if shuffle not in SHUFFLES:
            raise InputError(f"shuffle={shuffle!r}", rule=" or ".join(SHUFFLES))
        self.index = PackIndex.load(self.path)
        if self.index.kind != "samples":
            raise InputError(f"{path} is packed text", rule="tokens, not samples", fix="PackedTokens(path, length=...)")
        self._rows = np.asarray(self.index.rows(self.path))  # still mapped; a plain array is quicker to index
        self._reader = ShardReader(self.path, self.index.shards)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the labels, by number."""
        return self.index.classes

    def __len__(self) -> int:
        return self.index.samples

    def __getitem__(self, i: int) -> Any:
        return self.__getitems__([i])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Several samples, in the order asked for; read in the order of the disk."""
        rows, order = self._sorted_rows(indices)
        view = self._read(rows).data
        begins = np.concatenate([[0], np.cumsum(rows["length"], dtype=np.int64)])
        made: list[Any] = [None] * len(order)
        for k, position in enumerate(order.tolist()):
            made[k] = self._sample(rows[position], view[begins[position] : begins[position + 1]], int(indices[k]))
        return made

    @property
    def runs_user_code(self) -> bool:
        """Whether samples pass through a function of the user's, which may draw random numbers."""
        return self._decode is not None or self._transform is not None

    def collated(self, indices: Sequence[int]) -> Any:
        """A batch, as torch's default_collate would make it of the samples; much faster where they have one shape."""
        if not self.runs_user_code:
            rows, order = self._sorted_rows(indices)
            batch = self._decoded_together(rows, order)
            if batch is not None:
                return batch
        return default_collate(self.__getitems__(indices))

    def epoch_order(self, generator: torch.Generator) -> torch.Tensor:
        """The order of one epoch, a function of the generator's seed alone."""
        if self._shuffle == "samples":
            return torch.randperm(len(self), generator=generator)
        return shard_order([s.samples for s in self.index.shards], generator)

    def prefetch(self, indices: Sequence[int]) -> None:
        """Ask for samples that will be read soon, if reading waits for a disk."""
        if self._reader.is_cold and len(indices):
            rows, _ = self._sorted_rows(indices)
            self._reader.prefetch(rows["shard"], rows["start"], rows["length"])

    def name(self, i: int) -> str:
        """Where a sample was packed from."""
        for number, line in enumerate(read_lines(self.path / NAMES)):
            if number == i:
                return str(json.loads(line))
        return ""

    # -- reading

    def _sorted_rows(self, indices: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """The rows of the index in the order of the disk, and where each asked-for sample is among them."""
        wanted = np.array(indices, dtype=np.int64)
        if len(wanted) and not (-len(self) <= wanted.min() and wanted.max() < len(self)):
            raise IndexError(f"samples are numbered from 0 to {len(self) - 1}")
        wanted[wanted < 0] += len(self)
        by_number = wanted.argsort()  # samples lie in the order of their numbers
        order = np.empty_like(by_number)
        order[by_number] = np.arange(len(wanted))
        return self._rows.take(wanted[by_number]), order

    def _read(self, rows: np.ndarray) -> np.ndarray:
        if not len(rows):
            return np.empty(0, dtype=np.uint8)
        return self._reader.read(rows["shard"], rows["start"], rows["length"], rows["checksum"])

    def _sample(self, row: Any, data: memoryview, i: int) -> Any:
        members = {}
        for at, size, code in zip(row["at"].tolist(), row["size"].tolist(), row["ending"].tolist(), strict=True):
            if at + size > len(data) or code >= len(self.index.endings):
                raise CorruptFile(f"{self.path / 'index.npy'} is damaged", where=f"sample {i}")
            members[self.index.endings[code]] = bytes(data[at : at + size])
        if self._decode is not None:
            sample = self._decode(members)
        else:
            try:
                values = [decode_member(member, ending) for ending, member in members.items()]
            except InputError as e:
                raise type(e)(
                    e.what, where=f"sample {i} of {self.path}, {self.name(i)!r}", rule=e.rule, fix=e.fix
                ) from None
            except Exception as e:  # each library has its own errors
                raise JobError(
                    f"sample {i} of {self.path} cannot be decoded: {e}",
                    where=self.name(i),
                    rule="its file is as packed",
                ) from e
            sample = self._shaped(values)
        return sample if self._transform is None else self._transform(sample)

    def _shaped(self, values: list[Any]) -> Any:
        form = self.index.form
        if form == "value":
            return values[0]
        return dict(zip(self.index.columns, values, strict=True)) if form == "dict" else tuple(values)

    def _decoded_together(self, rows: np.ndarray, order: np.ndarray) -> Any:
        """A batch whose samples have members of the same sizes, without a loop over the samples; else None."""
        if not len(rows) or not _are_alike(rows):
            return None
        first = rows[0]
        endings = [self.index.endings[code] for code in first["ending"].tolist()]
        if not all(e.rpartition(".")[2] in ("npy", "cls") for e in endings):
            return None
        table = self._read(rows).reshape(len(rows), int(first["length"]))
        columns = []
        for at, size, ending in zip(first["at"].tolist(), first["size"].tolist(), endings, strict=True):
            column = decode_column(table[:, at : at + size], order, ending)
            if column is None:
                return None
            columns.append(column)
        shaped = self._shaped(columns)
        return list(shaped) if isinstance(shaped, tuple) else shaped

    def __getstate__(self) -> Mapping[str, Any]:
        """For a process that is not forked: it opens the pack itself."""
        return {"path": self.path, "decode": self._decode, "transform": self._transform, "shuffle": self._shuffle}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        options = dict(state)
        self.__init__(options.pop("path"), **options)  # type: ignore[misc]  # opens the pack, as the first time


def _are_alike(rows: np.ndarray) -> bool:
    """Whether all samples have the same members: what follows the checksum in their rows, and the length."""
    _, after = rows.dtype.fields["checksum"][:2]  # type: ignore[index]  # it has fields
    members = rows.view(np.uint8).reshape(len(rows), -1)[:, after + 8 :]
    return bool((rows["length"] == rows["length"][0]).all() and (members == members[0]).all())
