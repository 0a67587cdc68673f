"""Learning rates and batch sizes: schedules, scaling rules, the gradient noise scale."""

from . import rates

__all__ = ["rates"]
