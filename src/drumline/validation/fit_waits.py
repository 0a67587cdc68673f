"""Fit the waits of hosts that stand still for their messages, with each model left out of the fit that predicts it."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import numpy.typing as npt

from ..costs.fitted.constants_file import FittedConstants
from ..costs.fitted.host_waits import WaitConstants
from ..costs.plan_columns import Array
from .robust_fit import FitProblem, fit
from .run_columns import RunColumns, constants_of, predict_times

NAMES = tuple(f.name for f in fields(WaitConstants))
WIDTH = 1.5
"""Standard deviation of the logarithm of each wait around its prior: the priors are orders of magnitude."""


def fit_waits(runs: RunColumns, fitted: FittedConstants) -> WaitConstants | None:
    """Fit on the runs whose hosts wait; all other constants stay. None without such runs."""
    own = runs.take(np.flatnonzero((runs.layouts.host_waits > 0) & np.isfinite(runs.seconds)))
    if not len(own):
        return None
    constants = constants_of(own, fitted)

    def errors(x: Array) -> Array:
        return np.asarray(np.log(predict_times(own, constants, waits_of(x)).total / own.seconds), dtype=np.float64)

    centre = np.log([getattr(WaitConstants(), name) for name in NAMES])
    problem = FitProblem(errors, centre, np.full(len(NAMES), WIDTH), np.ones(len(own)))
    best = waits_of(fit(problem, centre))
    return WaitConstants(**{name: float(f"{getattr(best, name):.4g}") for name in NAMES})


def waits_of(x: Array) -> WaitConstants:
    """The constants from their logarithms."""
    return WaitConstants(**{name: float(value) for name, value in zip(NAMES, np.exp(x), strict=True)})


def leave_models_out(runs: RunColumns, fitted: FittedConstants, *, sizes_too: bool = False) -> Array:
    """Seconds of every run, its waits fitted on other models; with `sizes_too`, on other numbers of ranks as well."""
    models, ranks = _models(runs), runs.layouts.ranks
    seconds = np.empty(len(runs))
    for model in np.unique(models):
        for count in np.unique(ranks[models == model]) if sizes_too else (0.0,):
            left_out = (models == model) & ((ranks == count) | (count == 0.0))
            others = (models != model) & (ranks != count)
            own = runs.take(np.flatnonzero(left_out))
            waits = fit_waits(runs.take(np.flatnonzero(others)), fitted) if own.layouts.host_waits.any() else None
            seconds[left_out] = predict_times(own, constants_of(own, fitted), waits).total
    return seconds


def _models(runs: RunColumns) -> npt.NDArray[np.intp]:
    """A number for the shape of each run's model."""
    m = runs.models
    shapes = np.stack([m.layers, m.hidden, m.heads, m.kv_heads, m.ffn, m.vocabulary], axis=1)
    return np.asarray(np.unique(shapes, axis=0, return_inverse=True)[1].reshape(-1), dtype=np.intp)
