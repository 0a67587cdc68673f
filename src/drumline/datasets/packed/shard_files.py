"""Writing one shard: a tar file that WebDataset reads, or a file of tokens. The same source gives the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from .checksum import checksum
from .durable import DurableFile
from .layout import TOKEN_BLOCK, PackedShard, row_dtype
from .source import PackSource
from .text_source import TextSource

Tick = Callable[[], None]
"""Called after each sample."""
_BLOCK = 512
_END = bytes(2 * _BLOCK)
_AFTER_SIZE = b"%011o\0" % 0 + b" " * 8 + b"0" + bytes(100) + b"ustar\x0000" + bytes(64) + b"0000000\0" * 2 + bytes(167)
_MODE = b"0000644\0" + b"0000000\0" * 2
_FIXED_SUM = sum(_MODE) + sum(_AFTER_SIZE)
_CHECKSUM = slice(148, 156)


def tar_header(name: str, size: int) -> bytes:
    """The header of one regular file in the ustar format, without owner and time."""
    raw, octal = name.encode("ascii"), b"%011o\0" % size
    assert len(raw) <= 100 and len(octal) == 12
    header = bytearray(raw.ljust(100, b"\0") + _MODE + octal + _AFTER_SIZE)
    header[_CHECKSUM] = b"%06o\0 " % (_FIXED_SUM + sum(raw) + sum(octal))
    return bytes(header)


def write_tar(
    source: PackSource, number: int, first: int, last: int, path: Path, tick: Tick
) -> tuple[PackedShard, np.ndarray]:
    """Write samples `first` to `last` (excluded); returns the shard and its rows of the index."""
    rows = np.zeros(last - first, dtype=row_dtype(len(source.columns)))
    with DurableFile(path) as f:
        for k in range(last - first):
            parts, at, length = [], [], 0
            members = source.members(first + k)
            for code, data in members:
                parts += [tar_header(f"{first + k:09d}.{source.endings[code]}", len(data)), data]
                at.append(length + _BLOCK)
                padding = -len(data) % _BLOCK
                parts.append(bytes(padding))
                length += _BLOCK + len(data) + padding
            region = b"".join(parts)
            sizes, codes = [len(data) for _, data in members], [code for code, _ in members]
            rows[k] = (number, f.position, length, checksum(np.frombuffer(region, dtype=np.uint8)), at, sizes, codes)
            f.write(region)
            tick()
        f.write(_END)
    return PackedShard(path.name, f.position, f.digest.hexdigest(), last - first), rows


def write_tokens(
    source: TextSource, number: int, first: int, last: int, path: Path, tick: Tick
) -> tuple[PackedShard, np.ndarray]:
    """Write the tokens of pieces `first` to `last` (excluded); returns the shard and a row for each block of bytes."""
    block = bytearray()
    sums: list[int] = []
    with DurableFile(path) as f:
        for i in range(first, last):
            data = source.members(i)[0][1]
            f.write(data)
            block += data
            whole = len(block) // TOKEN_BLOCK * TOKEN_BLOCK
            sums += [_sum(block[at : at + TOKEN_BLOCK]) for at in range(0, whole, TOKEN_BLOCK)]
            del block[:whole]
            tick()
        if block:
            sums.append(_sum(block))
    rows = np.zeros(len(sums), dtype=row_dtype(0))
    lengths = [min(TOKEN_BLOCK, f.position - k * TOKEN_BLOCK) for k in range(len(sums))]
    rows["shard"], rows["start"] = number, np.arange(len(rows)) * TOKEN_BLOCK
    rows["length"], rows["checksum"] = lengths, sums
    width = source.tokenizer.dtype.itemsize
    return PackedShard(path.name, f.position, f.digest.hexdigest(), f.position // width), rows


def _sum(block: bytearray) -> int:
    return checksum(np.frombuffer(bytes(block), dtype=np.uint8))
