"""Sources of pretrained weights, read in ranges, so that no rank ever loads the whole model.

Safetensors files, single or in Hugging Face shards; torch files, of which only tensors are unpickled; our own
checkpoints.
"""

from __future__ import annotations

import math
import pickle
import re
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from ...core import files
from ...core.errors import CorruptFile, InputError
from .codec import dtype_name
from .manifest import MANIFEST, check_file, read_manifest
from .reader import CheckpointReader
from .tensor_files import CHUNK, ShardFiles

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SINGLES = ("model.safetensors", "pytorch_model.bin")
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}\Z")
_TORCH = (".pt", ".pth", ".bin")


class WeightSource(ABC):
    """Named tensors."""

    kinds: dict[str, tuple[tuple[int, ...], str]]
    """Shape and dtype by name."""

    @abstractmethod
    def fill(self, name: str, start: int, out: torch.Tensor) -> None:
        """Fill `out` with the elements of a flattened tensor from `start` on."""


def open_source(path: str | Path) -> WeightSource:
    """The source at a path, by its name."""
    path = Path(path)
    if (path / MANIFEST).exists():
        return CheckpointWeights(path)
    if path.is_dir():
        for name in _INDEXES:
            if (path / name).exists():
                return _indexed(path, name)
        for name in _SINGLES:
            if (path / name).exists():
                path = path / name
                break
        else:
            known = ", ".join([MANIFEST, *_INDEXES, *_SINGLES])
            raise InputError(f"no weights in {path}", rule=f"a folder of weights has one of {known}")
    if not path.is_file():
        raise InputError(f"no file {path}")
    if path.suffix in _TORCH:
        return TorchWeights({path.name: path})
    if path.suffix == ".safetensors":
        return SafetensorsWeights(path.parent, [path.name])
    raise InputError(
        f"{path} has an unknown extension", rule=f"weights are .safetensors, {', '.join(_TORCH)}, or a folder"
    )


def _indexed(folder: Path, name: str) -> WeightSource:
    """The shards listed in an index."""
    index = files.read_json(folder / name)
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict) or not all(isinstance(v, str) for v in names.values()):
        raise CorruptFile(f"{name} is no weight index", where=str(folder / name), rule="it has a weight_map")
    shards = sorted(set(names.values()))
    for shard in shards:
        if not _PLAIN.match(shard):
            raise CorruptFile(
                f"{name} names the file {shard!r}", where=str(folder / name), rule="file names have no folders"
            )
    source: WeightSource
    if name.startswith("model"):
        source = SafetensorsWeights(folder, shards)
    else:
        source = TorchWeights({shard: folder / shard for shard in shards})
    missing = [n for n in names if n not in source.kinds]
    if missing:
        raise CorruptFile(f"{names[missing[0]]} has no {missing[0]!r}", where=str(folder), rule=f"{name} lists it")
    return source


class CheckpointWeights(WeightSource):
    """The weights of one of our checkpoints, verified first."""

    def __init__(self, folder: Path, *, ema: bool = False) -> None:
        manifest = read_manifest(folder)
        for name, record in manifest.files.items():
            check_file(folder, name, record)
        self.reader = CheckpointReader(folder, manifest)
        self.entries = {
            name.partition("/")[2]: name
            for name, entry in manifest.tensors.items()
            if name.startswith(("model/", "buffer/")) and entry.kept
        }
        if ema:
            averaged = {n.partition("/")[2]: n for n in manifest.tensors if n.startswith("ema/")}
            if not averaged:
                raise InputError(
                    f"{folder.name} has no averaged weights",
                    rule="a job with `ema` saves them",
                    fix="leave out --ema: the checkpoint has the weights of its last step",
                )
            self.entries |= averaged
        self.kinds = {n: (manifest.tensors[e].shape, manifest.tensors[e].dtype) for n, e in self.entries.items()}

    def fill(self, name: str, start: int, out: torch.Tensor) -> None:
        self.reader.fill(self.entries[name], start, out)


class SafetensorsWeights(WeightSource):
    """One or more safetensors files in a folder."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        self._shards, self._folder = ShardFiles(folder), folder
        self._files: dict[str, str] = {}
        self.kinds = {}
        for file in names:
            opened = self._shards.file(file)
            for key in opened.keys():  # noqa: SIM118  # not a dict
                part = opened.get_slice(key)
                dtype = _DTYPES.get(part.get_dtype(), part.get_dtype())
                self.kinds[key], self._files[key] = (tuple(part.get_shape()), dtype), file

    def fill(self, name: str, start: int, out: torch.Tensor) -> None:
        shape, _ = self.kinds[name]
        opened = self._shards.file(self._files[name])
        try:
            if not shape:
                out.copy_(opened.get_tensor(name).view(out.shape))
                return
            part = opened.get_slice(name)
            _fill_rows(lambda a, b: part[a:b], shape, start, out)
        except SafetensorError as e:
            raise CorruptFile(
                f"{name!r} cannot be read", where=str(self._folder / self._files[name]), rule=str(e)[:200]
            ) from None


_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


@torch.no_grad()
def _fill_rows(rows: Any, shape: tuple[int, ...], start: int, out: torch.Tensor) -> None:
    """Read the rows that contain a range of elements, a few megabytes at a time."""
    width = max(1, math.prod(shape[1:]))
    flat = out.detach().view(-1) if out.is_contiguous() else torch.empty(out.numel(), dtype=out.dtype)
    at_once = max(1, CHUNK // (width * 8))
    position, stop = start, start + out.numel()
    while position < stop:
        row = position // width
        last = min(-(-stop // width), row + at_once)
        part = rows(row, last).reshape(-1)[position - row * width : stop - row * width]
        flat[position - start : position - start + part.numel()].copy_(part)
        position += part.numel()
    if not out.is_contiguous():
        out.copy_(flat.view(out.shape))


class TorchWeights(WeightSource):
    """Files of `torch.save`: a dict of tensors, memory-mapped and read on demand."""

    def __init__(self, paths: dict[str, Path]) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        for path in paths.values():
            self._tensors |= _state_dict(path)
        self.kinds = {name: (tuple(t.shape), dtype_name(t.dtype)) for name, t in self._tensors.items()}

    @torch.no_grad()
    def fill(self, name: str, start: int, out: torch.Tensor) -> None:
        part = self._tensors[name].reshape(-1)[start : start + out.numel()]
        out.copy_(part.view(out.shape))


def _state_dict(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of one file; looks for a state dict under common keys too."""
    if path.is_symlink() or not path.is_file():
        raise CorruptFile(f"{path.name} is no regular file", where=str(path))
    try:
        content = _load(path)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError) as e:
        raise CorruptFile(
            f"{path.name} is no torch file of tensors",
            where=str(path),
            rule=f"{str(e).strip().splitlines()[0][:200]}",
            fix="save only model.state_dict(), or convert it to safetensors where you trust it",
        ) from None
    for key in ("state_dict", "model", "module"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    tensors = {k: v for k, v in content.items() if isinstance(v, torch.Tensor)} if isinstance(content, dict) else {}
    if not tensors:
        raise InputError(f"{path} has no state dict", rule="a dict of tensors by name")
    return tensors


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as e:
        if "mmap can only be used" not in str(e):
            raise
        return torch.load(path, map_location="cpu", weights_only=True)  # a file from before torch 1.6
