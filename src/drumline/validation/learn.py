"""Profiles from published runs: shared constants near their priors, chips near the shared ones, robustly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..costs.fitted.chips import SAME_CHIP
from ..costs.fitted.constants import MEMORY, NAMES, PRIOR, WIDTH, Constants
from ..costs.fitted.inputs import Array
from ..costs.fitted.profiles import REFERENCE, Device, Profiles
from .arrays import Runs
from .fitting import Problem, fit, slopes_at
from .predict import memory, times
from .sheets import best_of, types

OWN = {
    "products": 0.10,
    "products8": 0.10,
    "attention": 0.12,
    "attention_back": 0.12,
    "stream": 0.08,
    "link": 0.08,
    "layer": 0.20,
    "network": 0.10,
}
"""The constants that a chip has of its own, and how far they may be from the shared ones."""
_AGAIN_STEPS = 8


@dataclass(frozen=True, slots=True)
class Fitted:
    """Logarithms: of the shared constants, then of each chip's own factors; and of those of memory."""

    chips: tuple[str, ...]
    time: Array
    memory: Array


def learn(runs: Runs) -> Fitted:
    """Fit on all runs given."""
    chips = tuple(sorted(set(runs.chips)))
    parts = _parts(runs, chips)
    time, taken = (part.fit(np.ones(len(part.sources))) for part in parts)
    return Fitted(chips, time, taken)


def leave_one_out(runs: Runs) -> tuple[Array, Array]:
    """(seconds, bytes) of every run, each predicted by a fit that has seen nothing of its source.

    Each fit starts from the one on all runs and uses its slopes; what it finds differs little."""
    chips = tuple(sorted(set(runs.chips)))
    seconds, taken = np.empty(len(runs)), np.empty(len(runs))
    parts = _parts(runs, chips)
    whole = [part.fit(np.ones(len(part.sources))) for part in parts]
    slopes = [part.slopes(x) for part, x in zip(parts, whole, strict=True)]
    sources = np.array(runs.sources)
    for source in dict.fromkeys(runs.sources):
        own = np.flatnonzero(sources == source)
        found = [
            part.fit((part.sources != source).astype(np.float64), start=x, slopes=s)
            for part, x, s in zip(parts, whole, slopes, strict=True)
        ]
        seconds[own], taken[own] = predict_with(runs.take(own), Fitted(chips, *found))
    return seconds, taken


def predict_with(runs: Runs, fitted: Fitted) -> tuple[Array, Array]:
    """(seconds, bytes) of runs under a fit; a chip that it has not seen takes part with its prior."""
    return (
        times(runs, _unpack(runs, fitted.chips, fitted.time)).total,
        memory(runs, _of_memory(fitted.memory)).total,
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """Time, or memory: its rows, and what is fitted to them."""

    sources: npt.NDArray[np.str_]
    errors: Callable[[Array], Array]
    centre: Array
    width: Array

    def fit(self, kept: Array, start: Array | None = None, slopes: Array | None = None) -> Array:
        """The parameters for the rows that are kept."""
        if not kept.any():
            return self.centre
        counts = Counter(self.sources[kept > 0].tolist())
        # a source with many rows counts for less than their number, so that none decides alone
        weight = kept * np.array([max(1, counts[s]) ** -0.25 for s in self.sources.tolist()])
        problem = Problem(self.errors, self.centre, self.width, weight)
        if start is None:
            return fit(problem, self.centre)
        return fit(problem, start, slopes=slopes, steps=_AGAIN_STEPS)

    def slopes(self, x: Array) -> Array:
        """How the rows' errors change with the parameters."""
        return slopes_at(self.errors, x, self.errors(x)) if len(self.sources) else np.empty((0, len(x)))


def _parts(runs: Runs, chips: tuple[str, ...]) -> tuple[_Part, _Part]:
    timed = runs.take(np.flatnonzero(np.isfinite(runs.seconds)))
    weighed = runs.take(np.flatnonzero(np.isfinite(runs.memory)))
    return (
        _Part(
            np.array(timed.sources, dtype=np.str_),
            lambda x: _log_error(times(timed, _unpack(timed, chips, x)).total, timed.seconds),
            np.array([np.log(PRIOR[k]) for k in NAMES] + [0.0] * (len(OWN) * len(chips))),
            np.array([WIDTH[k] for k in NAMES] + [OWN[k] for k in OWN for _ in chips]),
        ),
        _Part(
            np.array(weighed.sources, dtype=np.str_),
            lambda x: _log_error(memory(weighed, _of_memory(x)).total, weighed.memory),
            np.array([np.log(PRIOR[k]) for k in MEMORY]),
            np.array([WIDTH[k] for k in MEMORY]),
        ),
    )


def profiles_of(runs: Runs, fitted: Fitted, origin: str, error: float) -> Profiles:
    """A fit as profiles: what is shared, and one table for every device type that has a data sheet.

    `error` is what nine of ten times are predicted to within, each without its source.
    """
    shared = dict(zip(NAMES, np.exp(fitted.time[: len(NAMES)]), strict=True))
    shared |= dict(zip(MEMORY, np.exp(fitted.memory), strict=True))
    rows = Counter(c for c, s in zip(runs.chips, runs.seconds, strict=True) if np.isfinite(s))
    devices = {}
    for kind in types():
        chip = SAME_CHIP.get(kind, kind)
        factors = _own_of(fitted, chip)
        own = {
            k: _round(shared[k] * f * (best_of(kind) / REFERENCE if k == "products" else 1.0))
            for k, f in factors.items()
        }
        said = (
            "not seen: what devices share, and the best published product"
            if not rows[chip]
            else (f"fitted on {rows[chip]} published runs" + (f" of {chip}, the same chip" if chip != kind else ""))
        )
        devices[kind] = Device(origin=said, rows=rows[chip], constants=own)
    rounded = {k: _round(v) for k, v in shared.items()}
    return Profiles(shared=rounded, device=devices, origin=origin, error=_round(max(error, 1e-3)))


def _unpack(runs: Runs, chips: tuple[str, ...], x: Array) -> Constants:
    """The constants of every run from a vector of logarithms."""
    shared = dict(zip(NAMES, x[: len(NAMES)], strict=True))
    own = x[len(NAMES) :].reshape(len(OWN), len(chips))
    place: npt.NDArray[np.intp] = np.array([chips.index(c) if c in chips else len(chips) for c in runs.chips])
    padded = np.concatenate([own, np.zeros((len(OWN), 1))], axis=1)
    columns = {k: np.full(len(runs), np.exp(v)) for k, v in shared.items()}
    for i, k in enumerate(OWN):
        columns[k] = columns[k] * np.exp(padded[i, place])
    columns["products"] = columns["products"] * runs.best / REFERENCE
    return Constants(**columns)


def _of_memory(x: Array) -> Constants:
    return Constants(**dict(zip(MEMORY, (float(v) for v in np.exp(x)), strict=True)))


def _own_of(fitted: Fitted, chip: str) -> dict[str, float]:
    if chip not in fitted.chips:
        return dict.fromkeys(OWN, 1.0)
    own = fitted.time[len(NAMES) :].reshape(len(OWN), len(fitted.chips))
    return {k: float(np.exp(own[i, fitted.chips.index(chip)])) for i, k in enumerate(OWN)}


def _log_error(predicted: Array, measured: Array) -> Array:
    return np.asarray(np.log(predicted / measured), dtype=np.float64)


def _round(value: float) -> float:
    """Four digits: the fit knows no more."""
    return float(f"{value:.4g}")
