"""Validation against published runs: read, predict, score, fit."""

from .read_runs import read_runs
from .result import RunsValidation, validate

__all__ = ["RunsValidation", "read_runs", "validate"]
