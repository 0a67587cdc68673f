"""Learning-rate schedules and the gradient noise scale."""

from . import rates

__all__ = ["rates"]
