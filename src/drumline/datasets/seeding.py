"""Seeds of everything that loads data: functions of the job's seed and of numbers such as the step."""

from __future__ import annotations

import operator
import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


@contextmanager
def seeded_random(*numbers: int) -> Iterator[None]:
    """Seed torch's, numpy's and Python's random numbers from `numbers`, around the loading of samples.

    So a batch is the same whichever process loads it, and however often. Afterwards the generators of torch and Python
    are restored; restoring numpy's would take ten times as long as all the rest, and the engine does not seed it.
    """
    seed = mix_seed(*numbers)
    states = torch.get_rng_state(), random.getstate()
    try:
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed % 2**32)  # datasets use the legacy interface
        random.seed(seed)
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])


class RandomStates:
    """The states of the same generators at one moment."""

    def __init__(self) -> None:
        self._torch, self._python, self._numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()

    def have_changed(self) -> bool:
        """Whether a random number was drawn since."""
        now = np.random.get_state()
        return (
            not torch.equal(torch.get_rng_state(), self._torch)
            or random.getstate() != self._python
            or any(not np.array_equal(a, b) for a, b in zip(now, self._numpy, strict=True))
        )

    def restore(self) -> None:
        """Return to that moment."""
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        np.random.set_state(self._numpy)


def key_number(key: Any) -> int:
    """A number for the key of a sample, which a sampler may have made of anything."""
    try:
        return operator.index(key)
    except TypeError:
        return zlib.crc32(repr(key).encode())


def mix_seed(*numbers: int) -> int:
    """Mix a list of numbers into one seed."""
    seed = 0
    for n in numbers:
        seed = (seed * 6364136223846793005 + n + 1442695040888963407) % 2**63
    return seed
