"""The vectorised closed form: step time and peak memory of many layouts of transformers at once, with numpy."""

from .chips import constants_for, machines_for
from .constants import Constants
from .fitted import FittedSteps, fitted_for
from .inputs import Layouts, Machines, Models, recomputed
from .memory import StepMemory, step_memory
from .step import StepTimes, step_times

__all__ = [
    "Constants",
    "FittedSteps",
    "Layouts",
    "Machines",
    "Models",
    "StepMemory",
    "StepTimes",
    "constants_for",
    "fitted_for",
    "machines_for",
    "recomputed",
    "step_memory",
    "step_times",
]
