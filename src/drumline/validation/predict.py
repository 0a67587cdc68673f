"""Step time and memory of published runs, from the profiles of their devices."""

from __future__ import annotations

import numpy as np

from ..costs.fitted.constants import MEMORY, NAMES, Constants
from ..costs.fitted.inputs import Array
from ..costs.fitted.memory import StepMemory, step_memory
from ..costs.fitted.profiles import Profiles
from ..costs.fitted.step import StepTimes, step_times
from .arrays import Runs


def constants_of(runs: Runs, profiles: Profiles) -> Constants:
    """The constants of every run's device."""
    known = {chip: profiles.of(chip, float(best)) for chip, best in zip(runs.chips, runs.best, strict=True)}
    columns = {name: np.array([known[chip][name] for chip in runs.chips]) for name in (*NAMES, *MEMORY)}
    return Constants(**columns)


def times(runs: Runs, constants: Constants) -> StepTimes:
    """Seconds of every run's step, by part."""
    return step_times(runs.models, runs.layouts, runs.machines, constants)


def memory(runs: Runs, constants: Constants) -> StepMemory:
    """Bytes of every run by part, counted as its source counted them."""
    return step_memory(runs.models, runs.layouts, constants, counted=runs.kind, context=runs.context, first=runs.first)


def predict(runs: Runs, profiles: Profiles) -> tuple[Array, Array]:
    """(seconds, bytes) of every run."""
    constants = constants_of(runs, profiles)
    return times(runs, constants).total, memory(runs, constants).total
