"""Fit the constants of the cost model on published runs: shared ones near their priors, chips near the shared ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..costs.fitted.constants import MEMORY_CONSTANTS, PRIOR, PRIOR_WIDTH, TIME_CONSTANTS, Constants
from ..costs.fitted.constants_file import REFERENCE_MATMUL, DeviceConstants, FittedConstants
from ..costs.fitted.devices import SAME_CHIP
from ..costs.plan_columns import Array
from .datasheets import best_matmul_of, device_types
from .robust_fit import FitProblem, fit, jacobian_at
from .run_columns import RunColumns, predict_memory, predict_times

PER_CHIP = {
    "matmul": 0.20,
    "matmul_fp8": 0.20,
    "attention_forward": 0.12,
    "attention_backward": 0.12,
    "memory_bandwidth": 0.08,
    "link_bandwidth": 0.08,
    "layer_launch": 0.20,
    "network_bandwidth": 0.10,
}
"""Constants that each chip has of its own, and their width around the shared ones.

That of matmuls is about the spread of the best published ones: half to nine tenths of the peak.
"""
_REFIT_STEPS = 8


@dataclass(frozen=True, slots=True)
class LogConstants:
    """Logarithms of the shared constants followed by the factors of each chip; and of the constants of memory."""

    chips: tuple[str, ...]
    time: Array
    memory: Array


def fit_constants(runs: RunColumns) -> LogConstants:
    """Fit on all runs."""
    chips = tuple(sorted(set(runs.chips)))
    time, memory = (part.fit(np.ones(len(part.sources))) for part in _parts(runs, chips))
    return LogConstants(chips, time, memory)


def leave_one_out(runs: RunColumns, *, converge: bool = False) -> tuple[Array, Array]:
    """(seconds, bytes) of every run, predicted by a fit without its source.

    Each fit starts from the fit on all runs and takes a few steps with its Jacobian, so it stops near that fit. With
    `converge` it goes on with Jacobians of its own until nothing moves, which is a little worse (docs/validate.md).
    """
    chips = tuple(sorted(set(runs.chips)))
    seconds, sizes = np.empty(len(runs)), np.empty(len(runs))
    parts = _parts(runs, chips)
    whole = [part.fit(np.ones(len(part.sources))) for part in parts]
    jacobians = [part.jacobian(x) for part, x in zip(parts, whole, strict=True)]
    sources = np.array(runs.sources)
    for source in dict.fromkeys(runs.sources):
        own = np.flatnonzero(sources == source)
        logs = [
            part.fit((part.sources != source).astype(np.float64), start=x, jacobian=None if converge else j)
            for part, x, j in zip(parts, whole, jacobians, strict=True)
        ]
        seconds[own], sizes[own] = predict_with(runs.take(own), LogConstants(chips, *logs))
    return seconds, sizes


def predict_with(runs: RunColumns, fitted: LogConstants) -> tuple[Array, Array]:
    """(seconds, bytes) of runs under a fit; chips that it has not seen get the shared constants."""
    return (
        predict_times(runs, _time_constants(runs, fitted.chips, fitted.time)).total,
        predict_memory(runs, _memory_constants(fitted.memory)).total,
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """The fit of time, or of memory."""

    sources: npt.NDArray[np.str_]
    errors: Callable[[Array], Array]
    centre: Array
    width: Array

    def fit(self, kept: Array, start: Array | None = None, jacobian: Array | None = None) -> Array:
        """Fit the rows that are kept."""
        if not kept.any():
            return self.centre
        counts = Counter(self.sources[kept > 0].tolist())
        # rows of large sources count for less, so that no source decides alone
        weight = kept * np.array([max(1, counts[s]) ** -0.25 for s in self.sources.tolist()])
        problem = FitProblem(self.errors, self.centre, self.width, weight)
        if start is None:
            return fit(problem, self.centre)
        return fit(problem, start) if jacobian is None else fit(problem, start, jacobian=jacobian, steps=_REFIT_STEPS)

    def jacobian(self, x: Array) -> Array:
        """Derivatives of the errors at `x`."""
        return jacobian_at(self.errors, x, self.errors(x)) if len(self.sources) else np.empty((0, len(x)))


def _parts(runs: RunColumns, chips: tuple[str, ...]) -> tuple[_Part, _Part]:
    timed = runs.take(np.flatnonzero(np.isfinite(runs.seconds)))
    sized = runs.take(np.flatnonzero(np.isfinite(runs.memory)))
    return (
        _Part(
            np.array(timed.sources, dtype=np.str_),
            lambda x: _log_error(predict_times(timed, _time_constants(timed, chips, x)).total, timed.seconds),
            np.array([np.log(PRIOR[k]) for k in TIME_CONSTANTS] + [0.0] * (len(PER_CHIP) * len(chips))),
            np.array([PRIOR_WIDTH[k] for k in TIME_CONSTANTS] + [PER_CHIP[k] for k in PER_CHIP for _ in chips]),
        ),
        _Part(
            np.array(sized.sources, dtype=np.str_),
            lambda x: _log_error(predict_memory(sized, _memory_constants(x)).total, sized.memory),
            np.array([np.log(PRIOR[k]) for k in MEMORY_CONSTANTS]),
            np.array([PRIOR_WIDTH[k] for k in MEMORY_CONSTANTS]),
        ),
    )


def to_fitted_constants(runs: RunColumns, fitted: LogConstants, origin: str, error: float) -> FittedConstants:
    """The file form of a fit: shared constants, and one table for every device type with a data sheet.

    `error` is the P90 of the leave-one-source-out errors of times.
    """
    shared = dict(zip(TIME_CONSTANTS, np.exp(fitted.time[: len(TIME_CONSTANTS)]), strict=True))
    shared |= dict(zip(MEMORY_CONSTANTS, np.exp(fitted.memory), strict=True))
    rows = Counter(c for c, s in zip(runs.chips, runs.seconds, strict=True) if np.isfinite(s))
    devices = {}
    for kind in device_types():
        chip = SAME_CHIP.get(kind, kind)
        factors = _chip_factors(fitted, chip)
        own = {
            k: _round(shared[k] * f * (best_matmul_of(kind) / REFERENCE_MATMUL if k == "matmul" else 1.0))
            for k, f in factors.items()
        }
        origin_of_type = (
            "no published runs: shared constants, and the best published matmul"
            if not rows[chip]
            else (f"fitted on {rows[chip]} published runs" + (f" of {chip}, the same chip" if chip != kind else ""))
        )
        devices[kind] = DeviceConstants(origin=origin_of_type, rows=rows[chip], constants=own)
    rounded = {k: _round(v) for k, v in shared.items()}
    return FittedConstants(shared=rounded, device=devices, origin=origin, error=_round(max(error, 1e-3)))


def _time_constants(runs: RunColumns, chips: tuple[str, ...], x: Array) -> Constants:
    """Constants of every run from a vector of logarithms."""
    shared = dict(zip(TIME_CONSTANTS, x[: len(TIME_CONSTANTS)], strict=True))
    own = x[len(TIME_CONSTANTS) :].reshape(len(PER_CHIP), len(chips))
    place: npt.NDArray[np.intp] = np.array([chips.index(c) if c in chips else len(chips) for c in runs.chips])
    padded = np.concatenate([own, np.zeros((len(PER_CHIP), 1))], axis=1)
    columns = {k: np.full(len(runs), np.exp(v)) for k, v in shared.items()}
    for i, k in enumerate(PER_CHIP):
        columns[k] = columns[k] * np.exp(padded[i, place])
    columns["matmul"] = columns["matmul"] * runs.best / REFERENCE_MATMUL
    return Constants(**columns)


def _memory_constants(x: Array) -> Constants:
    return Constants(**dict(zip(MEMORY_CONSTANTS, (float(v) for v in np.exp(x)), strict=True)))


def _chip_factors(fitted: LogConstants, chip: str) -> dict[str, float]:
    if chip not in fitted.chips:
        return dict.fromkeys(PER_CHIP, 1.0)
    own = fitted.time[len(TIME_CONSTANTS) :].reshape(len(PER_CHIP), len(fitted.chips))
    return {k: float(np.exp(own[i, fitted.chips.index(chip)])) for i, k in enumerate(PER_CHIP)}


def _log_error(predicted: Array, measured: Array) -> Array:
    return np.asarray(np.log(predicted / measured), dtype=np.float64)


def _round(value: float) -> float:
    """Round to four digits, the precision of the fit."""
    return float(f"{value:.4g}")
