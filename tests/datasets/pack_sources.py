"""What the tests of packing pack."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

STRANGE = ("two words.bin", "line\nbreak.bin", "grün.bin", "quote'\".bin", "no_ending", "two.dots.tar.gz", "-dash.bin")


def class_folders(root: Path, n: int = 60) -> Path:
    """Files of different sizes in class folders, with names that break careless programs."""
    numbers = random.Random(3)
    names = [*STRANGE, *(f"{i:03d}.bin" for i in range(n - len(STRANGE)))]
    for i, name in enumerate(names):
        folder = root / ("cat", "dog", "été")[i % 3]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(numbers.randbytes(numbers.choice((0, 1, 511, 512, 513, 2000))))
    return root


def array_file(path: Path, n: int = 100) -> Path:
    """Inputs and targets of one shape; sample i has the number i in both."""
    x = np.arange(n, dtype=np.float32)[:, None, None] + np.zeros((1, 3, 4), dtype=np.float32)
    np.savez(path, input=x, target=np.arange(n))
    return path


class Mixed:
    """A dataset of dicts of everything that can be packed."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, i: int) -> Any:
        if i >= 9:
            raise IndexError(i)
        return {"x": torch.full((2,), float(i)), "n": i, "words": f"text {i}", "raw": bytes([i]), "Flag": i % 2 == 0}
