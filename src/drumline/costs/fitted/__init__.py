"""The cost model fitted on published runs: step time and memory of many transformer layouts at once, with numpy."""

from .constants import Constants
from .constants_file import FittedConstants, load_constants
from .devices import constants_for, machine_for
from .inputs import LayoutColumns, MachineColumns, ModelColumns, recompute_fractions
from .memory import StepMemory, step_memory
from .model import FittedCostModel, fitted_model
from .step import StepTimes, step_times

__all__ = [
    "Constants",
    "FittedConstants",
    "FittedCostModel",
    "LayoutColumns",
    "MachineColumns",
    "ModelColumns",
    "StepMemory",
    "StepTimes",
    "constants_for",
    "fitted_model",
    "load_constants",
    "machine_for",
    "recompute_fractions",
    "step_memory",
    "step_times",
]
