"""Exports a checkpoint as plain weights for other programs: `model.safetensors`, or Hugging Face shards with an index.

Names are those of the user's model. A tied weight is written once, with its other names in the file's metadata, as
safetensors' own `save_model` does; or under each name, for programs that do not know ties.
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
from .folder import find_checkpoints
from .tensor_files import CHUNK, SUPPORTED, TensorToWrite, write_tensors
from .weight_sources import CheckpointWeights

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def export(
    checkpoint: str | Path,
    output: str | Path,
    *,
    shard_bytes: int = 5 * 10**9,
    untie: bool = False,
    ema: bool = False,
    disk: Disk | None = None,
) -> list[Path]:
    """Write the weights of a checkpoint to a new folder; returns its files. `untie`: tied weights under each name;
    `ema`: the averaged weights of a job with `ema`.
    """
    disk, output = disk or Disk(), Path(os.path.abspath(output))
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InputError(f"{output} already exists", rule="nothing is overwritten", fix="use another folder")
    source = CheckpointWeights(find_checkpoints(Path(checkpoint))[0], ema=ema)
    ties = source.reader.manifest.tied
    tensors = [_tensor_to_write(source, name, name) for name in source.kinds]
    if untie:
        tensors += [_tensor_to_write(source, first, name) for name, first in ties.items() if first in source.kinds]
    shards = _split_shards(tensors, shard_bytes)
    temporary = output.with_name(f".{output.name}-writing")
    if temporary.exists():
        disk.remove_all(temporary)
    disk.make_folder(temporary)
    names = (
        [SINGLE]
        if len(shards) == 1
        else [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    )
    metadata = {"format": "pt"} | ({} if untie else ties)
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


def _tensor_to_write(source: CheckpointWeights, name: str, written: str) -> TensorToWrite:
    shape, kind = source.kinds[name]
    dtype = dtype_of(kind, name)
    if dtype not in SUPPORTED:
        raise InputError(
            f"{name!r} is {kind}, which safetensors does not support", rule="only real dtypes are exported"
        )
    return TensorToWrite(written, dtype, shape, _TensorParts(source, name, dtype))


class _TensorParts:
    """Iterates over the elements of one tensor, a few megabytes at a time."""

    def __init__(self, source: CheckpointWeights, name: str, dtype: torch.dtype) -> None:
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


def _split_shards(tensors: list[TensorToWrite], shard_bytes: int) -> list[list[TensorToWrite]]:
    """Shards of at most `shard_bytes`; a larger tensor has its own shard."""
    if shard_bytes < 1:
        raise InputError(f"shards of {shard_bytes} bytes", rule="at least one byte")
    shards: list[list[TensorToWrite]] = [[]]
    filled = 0
    for t in tensors:
        if shards[-1] and filled + t.size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(t)
        filled += t.size
    return shards


def _index(names: list[str], shards: list[list[TensorToWrite]]) -> bytes:
    total = sum(t.size for shard in shards for t in shard)
    where = {t.key: name for name, shard in zip(names, shards, strict=True) for t in shard}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    return (json.dumps(index, indent=2) + "\n").encode()
