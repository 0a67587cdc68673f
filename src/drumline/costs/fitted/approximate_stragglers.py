"""Slow ranks in many plans at once, for the search: about what the clock of each plan's schedule says."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..plan_columns import Array


def approximate_slowdown(stages: Sequence[float], everyone: float, micros: Array) -> Array:
    """About the factor on compute and bubble, for many numbers of micro-batches: the loops of 1F1B on equal stages.

    `stages` are the expected factors of the pipeline stages, `everyone` that of the slowest rank of all. A backward
    takes twice as long as a forward. Before stage s begins, and after its last backward, the earlier stages work; after
    its first forwards it waits for the later ones.
    """
    p, seconds = len(stages), np.zeros_like(micros)
    for s, own in enumerate(stages):
        ahead = np.minimum(micros, p - s)
        gap = np.maximum(0.0, 3.0 * sum(stages[s + 1 :]) - (ahead - 1.0) * own)
        seconds = np.maximum(seconds, 3.0 * sum(stages[:s]) + 3.0 * micros * own + gap)
    # where every stage varies, the slowest of them is another one in every step
    steady = 3.0 * (micros * everyone + sum(stages) - max(stages))
    jitter = everyone > max(stages) * (1 + 1e-9)
    return (np.maximum(seconds, steady) if jitter else seconds) / (3.0 * (micros + p - 1.0))
