"""Says when a run waited for its data: a sentence for the screen and the page."""

from __future__ import annotations

from ..core.units import format_seconds
from ..costs.input_pipeline import BOUND
from .run import Run


def input_sentence(run: Run) -> str:
    """`Input bounds the step: ...`, if it does; else nothing."""
    share, e = run.data_share, run.estimate
    if share <= BOUND:
        return ""
    wait = share / (1 - share) * run.step_seconds if share < 1 else 0.0
    predicted = f", predicted {format_seconds(e.data_wait_seconds)}" if e.input_text else ""
    return (
        f"Input bounds the step: {100 * share:.0f}% of the time is spent waiting for data "
        f"({format_seconds(wait)} a step{predicted}). See `workers` of the Job, and drumline pack."
    )
