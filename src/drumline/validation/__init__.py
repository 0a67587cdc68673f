"""Predictions against published runs: read, predict, score, fit."""

from .outcome import Outcome, validate
from .table import read_runs

__all__ = ["Outcome", "read_runs", "validate"]
