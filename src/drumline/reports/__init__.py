"""What a person reads after a run: the `Run` value with its folder, and the page made of it."""

from __future__ import annotations

from .run import Run
from .steps import StepRecord

__all__ = ["Run", "StepRecord"]
