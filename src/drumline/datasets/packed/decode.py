"""Bytes of members to values, by their endings, one sample or a whole batch at once. Nothing is unpickled."""

from __future__ import annotations

import ast
import functools
import io
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ...core.errors import InputError, JobError

IMAGES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "ppm")
TEXTS = ("txt", "text", "md", "html", "csv")
_MAGIC = b"\x93NUMPY"


def decode_member(data: bytes, ending: str) -> Any:
    """The value of one member."""
    kind = ending.rpartition(".")[2]
    decoder = _DECODERS.get(kind)
    if decoder is None:
        raise JobError(
            f"there is no decoder for .{kind}",
            rule=f"known endings: {', '.join(sorted(_DECODERS))}",
            fix="PackedDataset(path, decode=f), where f gets the bytes of a sample by their endings",
        )
    return decoder(data)


def _array(data: bytes) -> torch.Tensor:
    try:
        array = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError, OSError) as e:
        raise JobError("a .npy member cannot be read", rule=f"numbers in numpy's format: {e}") from None
    return torch.from_numpy(array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("=")))


def _image(data: bytes) -> torch.Tensor:
    try:
        from PIL import Image
    except ImportError:
        fix = "pip install 'drumline[data]', or PackedDataset(path, decode=...) with a decoder of your own"
        raise InputError("images are decoded by Pillow, which is not installed", fix=fix) from None
    with Image.open(io.BytesIO(data)) as image:
        pixels = np.array(image.convert("RGB"))
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


def _whole_number(data: bytes) -> int:
    return int(data)


def _text(data: bytes) -> str:
    return data.decode()


_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "npy": _array,
    "cls": _whole_number,
    "json": json.loads,
    "bin": bytes,
    **dict.fromkeys(IMAGES, _image),
    **dict.fromkeys(TEXTS, _text),
}


def decode_column(rows: np.ndarray, order: np.ndarray, ending: str) -> torch.Tensor | None:
    """The values of one column of a batch: a row of bytes for each sample, taken in `order`.

    None where they differ in shape, or are nothing that can be decoded together.
    """
    kind = ending.rpartition(".")[2]
    if kind == "cls" and 0 < rows.shape[1] < 18:
        digits = rows.astype(np.int64) - ord("0")
        if ((digits < 0) | (digits > 9)).any():
            return None
        powers = 10 ** np.arange(rows.shape[1] - 1, -1, -1, dtype=np.int64)
        return torch.from_numpy((digits @ powers)[order])
    if kind != "npy":
        return None
    header = _header_of(rows[0])
    if header is None:
        return None
    length, dtype, shape = header
    if not (rows[:, :length] == rows[0, :length]).all():
        return None
    size = rows.shape[1] - length
    if not size:
        return torch.empty((len(order), *shape), dtype=torch.from_numpy(np.empty(0, dtype)).dtype)
    body = rows[:, length:].view(f"V{size}")[order, 0]  # a sample is one element: copied whole, not byte by byte
    return torch.from_numpy(body.view(dtype).reshape(len(order), *shape))


def _header_of(row: np.ndarray) -> tuple[int, np.dtype[Any], tuple[int, ...]] | None:
    """(bytes of the header, type, shape) of an array in C order; None for others."""
    start = row[:12].tobytes()
    if start[:6] != _MAGIC or start[6:8] != b"\x01\x00":
        return None
    length = 10 + int.from_bytes(start[8:10], "little")
    header = _parsed(row[10:length].tobytes())
    if header is None or length + header[0].itemsize * int(np.prod(header[1], dtype=np.int64)) != len(row):
        return None
    return length, *header


@functools.lru_cache(maxsize=256)
def _parsed(header: bytes) -> tuple[np.dtype[Any], tuple[int, ...]] | None:
    try:
        table = ast.literal_eval(header.decode("latin-1").strip())
        dtype, shape = np.dtype(table["descr"]), tuple(map(int, table["shape"]))
        usable = dtype.kind in "biufc" and dtype.isnative and not (table["fortran_order"] and len(shape) > 1)
        torch.from_numpy(np.empty(0, dtype))  # types that torch lacks
    except (ValueError, SyntaxError, TypeError, KeyError):
        return None
    return (dtype, shape) if usable else None
