"""Loss and step time over the steps of a run, with the table behind them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ..core.units import format_seconds
from .markup import Html, cut, join, tag
from .page_style import data_table
from .prediction_error import time_unit
from .step_records import StepRecord
from .svg_charts import LOSS_OUTLIER, line_chart
from .waiting_sections import steps_table, time_charts


def history_section(
    steps: Sequence[StepRecord],
    *,
    predicted_seconds: float = 0.0,
    step_seconds: float = 0.0,
    evaluation: Mapping[str, float] | None = None,
) -> Html:
    """The charts. `step_seconds` is the median after warm-up; 0 where a time is not known."""
    if not steps:
        return tag("p", "No step was taken.", class_="lead")
    loss = [(s.step, s.loss, f"step {s.step}\nloss {s.loss:.5g}, gradient norm {s.grad_norm:.4g}") for s in steps]
    time = [(s.step, s.seconds, f"step {s.step}\n{format_seconds(s.seconds)}, {s.samples} samples") for s in steps]
    levels = [(v, kind) for v, kind in ((predicted_seconds, "guess"), (step_seconds, "middle")) if v]
    longest = max(steps, key=lambda s: s.seconds)
    unit, scale = time_unit(step_seconds or predicted_seconds or longest.seconds or 1.0)
    legend = tag(
        "ul",
        tag("li", tag("span", class_="key guess"), "predicted") if predicted_seconds else None,
        tag("li", tag("span", class_="key"), "measured median after warm-up") if step_seconds else None,
        tag("li", f"longest: step {longest.step}, {format_seconds(longest.seconds)}"),
        class_="legend",
    )
    charts = tag(
        "div",
        tag(
            "figure",
            tag("h3", "Loss ", tag("small", _from_to(steps))),
            line_chart("Loss over the steps", loss, form=lambda v: f"{v:.4g}", outlier=LOSS_OUTLIER),
        ),
        tag(
            "figure",
            tag("h3", "Step time ", tag("small", f"in {unit}")),
            line_chart("Step time over the steps", time, form=lambda v: f"{v / scale:.4g}", levels=levels, zero=True),
            legend,
        ),
        *time_charts(steps),
        class_="charts",
    )
    broken = next((s for s in steps if not math.isfinite(s.loss)), None)
    warning = tag("p", f"The loss is not finite from step {broken.step} on: {broken.loss}.") if broken else None
    metrics = (
        tag("dl", *((tag("dt", cut(k)), tag("dd", f"{v:.6g}")) for k, v in evaluation.items()), class_="facts")
        if evaluation
        else None
    )
    return join(warning, charts, data_table(steps_table(steps)), tag("h3", "Evaluation") if metrics else None, metrics)


def _from_to(steps: Sequence[StepRecord]) -> str:
    first, last = steps[0], steps[-1]
    return f"{first.loss:.4g}" if first is last else f"from {first.loss:.4g} to {last.loss:.4g}"
