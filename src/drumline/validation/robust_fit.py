"""Robust fit with priors: log constants, log errors, damped Gauss-Newton steps on a Huber loss.

Written out because leave-one-source-out validation reuses the Jacobian of the full fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..costs.plan_columns import Array

HUBER = 0.05
"""Smaller errors count by their square, larger ones by their size."""
NOISE = 0.06
"""Error of a row that weighs as much as a parameter one width from its prior."""


@dataclass(frozen=True, slots=True)
class FitProblem:
    """Log errors of all rows as a function of the parameters, with priors and weights."""

    errors: Callable[[Array], Array]
    centre: Array
    """Prior of each parameter."""
    width: Array
    """Standard deviation of the prior."""
    weight: Array
    """Weight of each row; 0 leaves it out."""


def loss(problem: FitProblem, x: Array) -> float:
    """Huber loss of the errors plus the distance from the priors."""
    size = np.abs(problem.errors(x)) / NOISE
    edge = HUBER / NOISE
    huber = np.where(size < edge, 0.5 * size * size, edge * (size - 0.5 * edge))
    return float(np.sum(problem.weight * huber) + 0.5 * np.sum(((x - problem.centre) / problem.width) ** 2))


def fit(
    problem: FitProblem, start: Array, *, jacobian: Array | None = None, steps: int = 40, tolerance: float = 1e-5
) -> Array:
    """Minimise the loss from `start`; a given Jacobian is used throughout."""
    x, best = start.copy(), loss(problem, start)
    damping = 1e-2
    prior = 1.0 / problem.width**2
    for _ in range(steps):
        r = problem.errors(x)
        slopes = jacobian_at(problem.errors, x, r) if jacobian is None else jacobian
        w = problem.weight / NOISE**2 * np.minimum(1.0, HUBER / np.maximum(np.abs(r), 1e-12))
        matrix = (slopes.T * w) @ slopes + np.diag(prior)
        gradient = slopes.T @ (w * r) + prior * (x - problem.centre)
        for _ in range(8):
            new = x - np.linalg.solve(matrix + damping * np.diag(np.diag(matrix)), gradient)
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


def jacobian_at(errors: Callable[[Array], Array], x: Array, at: Array, by: float = 1e-4) -> Array:
    """Derivative of every error by every parameter, by finite differences."""
    columns = []
    for i in range(len(x)):
        moved = x.copy()
        moved[i] += by
        columns.append((errors(moved) - at) / by)
    return np.stack(columns, axis=1)
