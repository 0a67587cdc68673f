"""A robust fit with priors: logarithms of constants, logarithms of errors, Gauss-Newton steps with a damping."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..costs.fitted.inputs import Array

TURN = 0.05
"""Errors below this count by their square, above it by their size."""
NOISE = 0.06
"""The error of a row that weighs as much as a parameter one width away from its centre."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What is fitted: the logarithm of predicted over measured, row by row, as a function of the parameters."""

    errors: Callable[[Array], Array]
    centre: Array
    """Where each parameter stands when no row says otherwise."""
    width: Array
    """How far it may go, as a standard deviation."""
    weight: Array
    """Of each row; 0 leaves it out."""


def loss(problem: Problem, x: Array) -> float:
    """What the fit makes small."""
    size = np.abs(problem.errors(x)) / NOISE
    turn = TURN / NOISE
    huber = np.where(size < turn, 0.5 * size * size, turn * (size - 0.5 * turn))
    return float(np.sum(problem.weight * huber) + 0.5 * np.sum(((x - problem.centre) / problem.width) ** 2))


def fit(
    problem: Problem, start: Array, *, slopes: Array | None = None, steps: int = 40, tolerance: float = 1e-5
) -> Array:
    """The parameters with the least loss near `start`; with the errors' slopes given, they are not computed anew."""
    x, best = start.copy(), loss(problem, start)
    damping = 1e-2
    prior = 1.0 / problem.width**2
    for _ in range(steps):
        r = problem.errors(x)
        jacobian = slopes_at(problem.errors, x, r) if slopes is None else slopes
        w = problem.weight / NOISE**2 * np.minimum(1.0, TURN / np.maximum(np.abs(r), 1e-12))
        matrix = (jacobian.T * w) @ jacobian + np.diag(prior)
        slope = jacobian.T @ (w * r) + prior * (x - problem.centre)
        for _ in range(8):
            new = x - np.linalg.solve(matrix + damping * np.diag(np.diag(matrix)), slope)
            value = loss(problem, new)
            if value < best:
                break
            damping *= 4.0
        else:
            break
        gain, x, best = best - value, new, value
        damping = max(1e-4, damping / 4.0)
        if gain < tolerance * best:
            break
    return x


def slopes_at(errors: Callable[[Array], Array], x: Array, at: Array, by: float = 1e-4) -> Array:
    """How every row's error changes with every parameter."""
    columns = []
    for i in range(len(x)):
        moved = x.copy()
        moved[i] += by
        columns.append((errors(moved) - at) / by)
    return np.stack(columns, axis=1)
