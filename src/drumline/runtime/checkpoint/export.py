"""A checkpoint as plain weights, for any other program: `model.safetensors`, or Hugging Face's shards with their index.

Names are those of the user's model. A weight with several names is written once, and the file's metadata tells the
other names, as safetensors' own `save_model` does; or under each name, for programs that know nothing of ties.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from ...core.errors import InputError
from .codec import dtype_of
from .disk import Disk
from .folder import find
from .shard import CHUNK, EXACT, Stored, write_tensors
from .sources import Checkpoint

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def export(
    checkpoint: str | Path,
    output: str | Path,
    *,
    largest: int = 5 * 10**9,
    each: bool = False,
    disk: Disk | None = None,
) -> list[Path]:
    """Write the weights of a checkpoint to a new folder; its files. `each`: tied weights under each of their names."""
    disk, output = disk or Disk(), Path(os.path.abspath(output))
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InputError(f"{output} is there already", rule="nothing is overwritten", fix="another folder")
    source = Checkpoint(find(Path(checkpoint))[0])
    ties = source.reader.manifest.tied
    tensors = [_stored(source, name, name) for name in source.kinds]
    if each:
        tensors += [_stored(source, first, name) for name, first in ties.items() if first in source.kinds]
    shards = _cut(tensors, largest)
    temporary = output.with_name(f".{output.name}-writing")
    if temporary.exists():
        disk.remove_all(temporary)
    disk.make_folder(temporary)
    names = (
        [SINGLE]
        if len(shards) == 1
        else [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    )
    metadata = {"format": "pt"} | ({} if each else ties)
    for name, shard in zip(names, shards, strict=True):
        write_tensors(disk, temporary / name, shard, metadata if len(shards) == 1 else {"format": "pt"})
    if len(shards) > 1:
        disk.write_file(temporary / INDEX, _index(names, shards))
        names.append(INDEX)
    disk.sync_folder(temporary)
    if output.exists():
        disk.remove_folder(output)
    disk.rename(temporary, output)
    disk.sync_folder(output.parent)
    return [output / name for name in names]


def _stored(source: Checkpoint, name: str, written: str) -> Stored:
    shape, kind = source.kinds[name]
    dtype = dtype_of(kind, name)
    if dtype not in EXACT:
        raise InputError(f"{name!r} is {kind}, which safetensors has no name for", rule="real numbers are exported")
    return Stored(written, dtype, shape, _Parts(source, name, dtype))


class _Parts:
    """The numbers of one tensor, a few megabytes at a time."""

    def __init__(self, source: Checkpoint, name: str, dtype: torch.dtype) -> None:
        self._source, self._name, self._dtype = source, name, dtype

    def __iter__(self) -> Iterator[torch.Tensor]:
        total = 1
        for n in self._source.kinds[self._name][0]:
            total *= n
        step = CHUNK // self._dtype.itemsize
        for start in range(0, total, step):
            part = torch.empty(min(step, total - start), dtype=self._dtype)
            self._source.fill(self._name, start, part)
            yield part


def _cut(tensors: list[Stored], largest: int) -> list[list[Stored]]:
    """Shards of at most `largest` bytes; a tensor that is larger has one of its own."""
    if largest < 1:
        raise InputError(f"shards of {largest} bytes", rule="at least one byte")
    shards: list[list[Stored]] = [[]]
    filled = 0
    for t in tensors:
        if shards[-1] and filled + t.size > largest:
            shards.append([])
            filled = 0
        shards[-1].append(t)
        filled += t.size
    return shards


def _index(names: list[str], shards: list[list[Stored]]) -> bytes:
    total = sum(t.size for shard in shards for t in shard)
    where = {t.key: name for name, shard in zip(names, shards, strict=True) for t in shard}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    return (json.dumps(index, indent=2) + "\n").encode()
