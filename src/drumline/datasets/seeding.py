"""Seeds of everything that loads data: functions of the job's seed and of numbers such as the step."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

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


def random_state() -> tuple[object, ...]:
    """The state of these generators: another one after any draw."""
    _, key, *rest = np.random.get_state(legacy=True)  # the key changes when all numbers of it are drawn
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), key[0], *rest


def mix_seed(*numbers: int) -> int:
    """Mix a list of numbers into one seed."""
    seed = 0
    for n in numbers:
        seed = (seed * 6364136223846793005 + n + 1442695040888963407) % 2**63
    return seed
