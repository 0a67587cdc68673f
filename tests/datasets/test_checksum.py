"""The checksum of packed samples: the same alone and among others, and different after any small damage."""

from __future__ import annotations

import numpy as np
import pytest

from drumline.datasets.packed.checksum import checksum, checksums


@pytest.mark.parametrize("lengths", [[512] * 7, [8, 1024, 0, 16], [3, 8, 13], [2**19 + 8] * 2, []])
def test_alone_and_among_others(lengths: list[int]) -> None:
    data = np.random.default_rng(0).integers(0, 256, sum(lengths), dtype=np.uint8)
    ends = np.cumsum(lengths, dtype=np.int64)
    alone = [checksum(data[end - n : end]) for n, end in zip(lengths, ends, strict=True)]
    assert checksums(data, np.array(lengths, dtype=np.uint64)).tolist() == alone


def test_damage_changes_it() -> None:
    numbers = np.random.default_rng(1)
    data = numbers.integers(0, 256, 4096, dtype=np.uint8)
    before = checksum(data)
    for bit in range(8 * 4096):
        data[bit // 8] ^= 1 << (bit % 8)
        assert checksum(data) != before
        data[bit // 8] ^= 1 << (bit % 8)
    for bit in range(8):  # the same bit of every eighth byte, of two words, words swapped, zeros
        for step in (8, 16, 2048):
            damaged = data.copy()
            damaged[7::step] ^= 1 << bit
            assert checksum(damaged) != before
    words = data.view(np.uint64)
    for a, b in numbers.integers(0, 512, (200, 2)):
        swapped = words.copy()
        swapped[[a, b]] = swapped[[b, a]]
        assert a == b or checksum(swapped.view(np.uint8)) != before
    assert checksum(np.zeros(4096, dtype=np.uint8)) != before


def test_its_value_is_fixed() -> None:
    """Packs of today must read tomorrow."""
    assert checksum(np.arange(20, dtype=np.uint8)) == 0x300B783B8977F280
