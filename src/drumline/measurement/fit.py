"""Fits the alpha-beta model to measured messages, weighing each by its own size so that small ones count too."""

from __future__ import annotations


def alpha_beta(points: list[tuple[float, float]]) -> tuple[float, float, float]:
    """(alpha, beta, error): least squares of relative errors over (bytes, seconds); the mean relative error left."""
    # minimise the sum of ((alpha + beta m - t) / t)^2: linear in alpha and beta
    w = [1 / t**2 for _, t in points]
    s0 = sum(w)
    s1 = sum(wi * m for wi, (m, _) in zip(w, points, strict=True))
    s2 = sum(wi * m * m for wi, (m, _) in zip(w, points, strict=True))
    y0 = sum(wi * t for wi, (_, t) in zip(w, points, strict=True))
    y1 = sum(wi * t * m for wi, (m, t) in zip(w, points, strict=True))
    det = s0 * s2 - s1 * s1
    alpha = (y0 * s2 - y1 * s1) / det
    beta = (y1 * s0 - y0 * s1) / det
    largest = max(points)
    if beta <= 0:  # noise hid the slope: take the largest message as all bandwidth
        beta = largest[1] / largest[0]
    alpha = max(alpha, 0.0)
    error = sum(abs(alpha + beta * m - t) / t for m, t in points) / len(points)
    return alpha, beta, error
