"""Reports: the `Run` value with its folder, HTML pages, SVG drawings, and text for the terminal."""

from __future__ import annotations

from .run import Run
from .step_records import StepRecord

__all__ = ["Run", "StepRecord"]
