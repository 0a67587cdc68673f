"""A 64-bit checksum of many short byte ranges at once: it finds damage, not malice, for which shards have SHA-256.

A range is little-endian words x_i of 8 bytes. Each is folded, y_i = x_i ^ (x_i >> 32), and the checksum is the sum of
w_i * y_i modulo 2^64, with fixed odd weights w_i. Folding and odd weights make any change within one word a different
sum; changes in several words cancel with a probability of about 2^-33 or less. A CRC would need a call for each range.
"""

from __future__ import annotations

import functools

import numpy as np

_PIECE = 2**16
"""Words of a long range that are summed at once."""
_CACHED = 2**18
"""Bytes that are summed at once, so that they stay in the cache of a core."""
_STEP = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
_HALF = np.uint64(32)


def checksums(data: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The checksums of ranges that lie one after the other in an array of bytes."""
    if not len(lengths):
        return np.empty(0, dtype=np.uint64)
    length = int(lengths[0])
    if length % 8 == 0 and length <= 8 * _PIECE and (lengths == length).all():
        table = data.view("<u8").reshape(len(lengths), length // 8)
        weights = _weights()[: length // 8]
        sums = np.empty(len(lengths), dtype=np.uint64)
        at_once = max(1, _CACHED // max(1, length))
        scratch = np.empty((min(at_once, len(lengths)), length // 8), dtype=np.uint64)
        for k in range(0, len(lengths), at_once):
            words = table[k : k + at_once]
            folded = np.right_shift(words, _HALF, out=scratch[: len(words)])
            folded ^= words
            np.einsum("ij,j->i", folded, weights, out=sums[k : k + at_once])  # faster than matmul on whole numbers
        return sums
    ends = np.cumsum(lengths, dtype=np.int64).tolist()
    starts = [0, *ends[:-1]]
    return np.array([checksum(data[a:b]) for a, b in zip(starts, ends, strict=True)], dtype=np.uint64)


def checksum(data: np.ndarray) -> int:
    """The checksum of one array of bytes; missing bytes of the last word are zeros."""
    if rest := len(data) % 8:
        data = np.concatenate([data, np.zeros(8 - rest, dtype=np.uint8)])
    words = np.frombuffer(data, dtype="<u8")
    total = 0
    for first in range(0, len(words), _PIECE):
        piece = words[first : first + _PIECE]
        part = int((piece ^ (piece >> _HALF)) @ _weights()[: len(piece)])
        total = (total * _STEP + part) & _MASK
    return total


@functools.cache
def _weights() -> np.ndarray:
    """Fixed odd numbers that look random (splitmix64)."""
    z = np.arange(1, _PIECE + 1, dtype=np.uint64) * np.uint64(_STEP)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)
