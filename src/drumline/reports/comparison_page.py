"""One self-contained HTML page about several runs side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ..core import files
from ..core.units import format_count, format_seconds
from .comparison import ComparedRun, Comparison
from .markup import Content, Html, cut, join, names, table, tag
from .page_style import STYLE, data_table, html_document, navigation, section
from .prediction_error import short_time_words
from .step_summaries import LossPoint, throughput
from .svg_bars import BarRow, bar_rows
from .svg_charts import SECONDS_AXIS, STEPS_AXIS
from .svg_lines import LINE_STYLE, LineSeries, key_line, lines_chart
from .waiting_sections import (
    MOST_BARS,
    staleness_bars,
    staleness_table,
    staleness_words,
    wait_bars,
    wait_table,
    waiting_words,
)

COMPARISON_PAGE = "comparison.html"
"""The name of the page in a folder."""
_TABLE_ROWS = 12
"""Rows of the table of losses."""
_REPEATED_LEGEND = 6
"""Runs whose legend is shown above each chart; of more, the tables have it."""
_NAME = 48
"""Letters of a run's name."""


def write_comparison(comparison: Comparison, path: str | Path) -> Path:
    """Write the page to a file, or into a folder under its usual name; returns the file."""
    path = Path(path)
    path = path / COMPARISON_PAGE if path.is_dir() else path
    files.write_text(path, comparison_page(comparison))
    return path


def comparison_page(comparison: Comparison) -> Html:
    """The whole document."""
    sections = [
        ("Runs", "The runs", _runs(comparison)),
        ("Loss", "Loss against steps and against seconds", _losses(comparison)),
        ("Speed", "Throughput and step time", _speed(comparison)),
        *_waiting(comparison),
        *_staleness(comparison),
    ]
    main = tag("main", *(section(*x) for x in sections))
    title = " and ".join(c.name for c in comparison.runs[:2])
    return html_document(
        title if len(comparison.runs) <= 2 else f"{len(comparison.runs)} runs",
        _header(comparison, [key for key, _, _ in sections]),
        main,
        tag("footer", tag("p", "Drumline report.")),
        style=STYLE + LINE_STYLE,
    )


def _header(comparison: Comparison, sections: Sequence[str]) -> Html:
    notes = [tag("li", cut(note, 300)) for note in comparison.notes]
    return tag(
        "header",
        tag("h1", tag("b", f"{len(comparison.runs)} runs"), " side by side"),
        tag("p", comparison.verdict().replace(" s,", "\u00a0s,").replace(" s:", "\u00a0s:"), class_="verdict"),
        tag("ul", *notes, class_="note") if notes else None,
        navigation(sections),
    )


# ---- the runs


def _runs(comparison: Comparison) -> Html:
    heads = [
        ("run", "plan"),
        ("plan", "plan"),
        ("ranks", "num"),
        ("steps", "num"),
        ("last loss", "num"),
        ("samples/s", "num"),
        ("step", "num"),
        ("predicted", "num"),
        ("waiting", "num"),
        ("staleness", "num"),
    ]
    rows: list[list[Content]] = [_row(i, c) for i, c in enumerate(comparison.runs)]
    note = (
        "Samples per second are over all ranks and the whole run, with its first steps and its checkpoints. Waiting is "
        "the mean over ranks. Staleness is mean and maximum, in updates."
    )
    return join(
        table(heads, rows, caption="The runs", class_="runs"), tag("p", note, class_="note"), _until(comparison)
    )


def _row(i: int, c: ComparedRun) -> list[Content]:
    run = c.run
    return [
        _named(i, c),
        names(str(run.plan)),
        run.ranks,
        len(run.steps),
        f"{c.losses[-1].loss:.4g}" if c.losses else "-",
        format_count(c.samples_per_second) if c.samples_per_second else "-",
        format_seconds(run.step_seconds) if run.step_seconds else "-",
        _predicted(c),
        f"{100 * c.waits.mean_share:.1f}%" if c.waits else "-",
        f"{c.staleness.mean:.2f}, {c.staleness.largest}" if c.staleness else "-",
    ]


def _predicted(c: ComparedRun) -> str:
    return format_seconds(c.run.estimate.step_seconds) + _error(c)


def _error(c: ComparedRun) -> str:
    return f" ({short_time_words(c.run.time_error)})" if c.run.time_error is not None else ""


def _named(i: int, c: ComparedRun) -> Html:
    return join(key_line(i), cut(c.name, _NAME))


def _until(comparison: Comparison) -> Html | None:
    """The steps and seconds of each run until the loss."""
    if comparison.loss is None:
        return None
    base = next((c.reached.seconds for c in comparison.runs if c.reached and c.reached.seconds), None)
    rows: list[list[Content]] = []
    for i, c in enumerate(comparison.runs):
        if c.reached is None:
            lowest = f"not reached; its lowest is {c.lowest:.4g}" if c.lowest is not None else "no finite loss"
            rows.append([_named(i, c), tag("span", lowest, class_="poor"), "", ""])
            continue
        seconds = c.reached.seconds
        relative = f"{seconds / base:.2f}" if seconds is not None and base else "-"
        rows.append([_named(i, c), c.reached.steps, _seconds(seconds), relative])
    why = "The loss was given." if comparison.given else "It is the lowest loss that all of these runs reached."
    heads = (("run", "plan"), ("steps", "num"), ("seconds", "num"), ("relative to the first", "num"))
    at = f"loss ≤ {comparison.loss:.4g}"
    return join(
        tag("h3", "Steps and seconds until ", at),
        table(heads, rows, caption=f"Steps and seconds until {at}", class_="runs"),
        tag("p", f"{why} {comparison.smoothing} Seconds count from the start of the first step.", class_="note"),
    )


def _seconds(seconds: float | None) -> str:
    return "not recorded" if seconds is None else f"{seconds:.4g}"


# ---- charts


def _losses(comparison: Comparison) -> Html:
    runs = list(enumerate(comparison.runs))
    by_step = [LineSeries(c.name, [(p.steps, p.loss) for p in c.losses], i) for i, c in runs]
    by_second = [
        LineSeries(c.name, [(p.seconds, p.loss) for p in c.losses if p.seconds is not None], i) for i, c in runs
    ]
    charts = tag(
        "div",
        _chart("Loss against steps", by_step, STEPS_AXIS, _four, level=comparison.loss),
        _chart("Loss against seconds", by_second, SECONDS_AXIS, _four, level=comparison.loss),
        class_="charts",
    )
    level = f" The dotted level is a loss of {comparison.loss:.4g}." if comparison.loss is not None else ""
    lead = tag("p", f"{comparison.smoothing}{level}", class_="lead")
    return join(lead, _legend(comparison), charts, data_table(_loss_table(comparison)))


def _four(value: float) -> str:
    return f"{value:.4g}"


def _chart(
    title: str,
    series: Sequence[LineSeries],
    axis: str,
    form: Callable[[float], str],
    *,
    level: float | None = None,
    zero: bool = False,
) -> Html:
    chart = lines_chart(title, series, axis=axis, form=form, level=level, zero=zero)
    return tag("figure", tag("h3", title), chart)


def _legend(comparison: Comparison) -> Html:
    items = (tag("li", _named(i, c), "  ", names(str(c.run.plan))) for i, c in enumerate(comparison.runs))
    return tag("ul", *items, class_="legend runs")


def _loss_table(comparison: Comparison) -> Html:
    """The losses of all runs at some steps."""
    last = max((c.losses[-1].steps for c in comparison.runs if c.losses), default=0)
    stride = max(1, -(-last // _TABLE_ROWS))
    marks = sorted({*range(stride, last + 1, stride), last} - {0})
    at = [{p.steps: p for p in c.losses} for c in comparison.runs]
    rows: list[list[Content]] = [
        [mark, *(_loss_cell(points.get(mark)) for points in at)] for mark in marks if any(mark in p for p in at)
    ]
    heads = (("steps", "num"), *((c.name[:_NAME], "num") for c in comparison.runs))
    return table(heads, rows, caption="Loss and seconds after some steps")


def _loss_cell(point: LossPoint | None) -> str:
    if point is None:
        return "-"
    after = f", {point.seconds:.4g} s" if point.seconds is not None else ""
    return f"{point.loss:.4g}{after}"


def _speed(comparison: Comparison) -> Html:
    runs = list(enumerate(comparison.runs))
    rates = [LineSeries(c.name, throughput(c.run.steps), i) for i, c in runs]
    timed = [s for s in rates if s.points]
    chart = (
        tag("div", _chart("Throughput in samples/s", timed, SECONDS_AXIS, format_count, zero=True), class_="charts")
        if timed
        else None
    )
    rows = [
        BarRow(
            c.name if len(c.name) <= 16 else f"{c.name[:7]}…{c.name[-8:]}",
            c.run.step_seconds,
            format_seconds(c.run.step_seconds) + _error(c),
            mark=c.run.estimate.step_seconds or None,
        )
        for _, c in runs
    ]
    bars = bar_rows("Step time, measured and predicted", rows, kind="backward", left=112, full=52)
    caption = "The bar is the measured median step, the line across it the prediction, with its error in brackets."
    return join(
        _legend(comparison) if chart and len(runs) <= _REPEATED_LEGEND else None,
        chart,
        tag("figure", tag("h3", "Step time"), bars, tag("figcaption", caption)),
        data_table(_speed_table(comparison)),
    )


def _speed_table(comparison: Comparison) -> Html:
    """Step times, and the throughput over the quarters of each run."""
    rows: list[list[Content]] = []
    for c in comparison.runs:
        rates = [rate for _, rate in throughput(c.run.steps)]
        quarters = [rates[i * len(rates) // 4 : (i + 1) * len(rates) // 4] for i in range(4)]
        rows.append(
            [
                cut(c.name, _NAME),
                format_seconds(c.run.step_seconds) if c.run.step_seconds else "-",
                _predicted(c),
                *(format_count(sum(part) / len(part)) if part else "-" for part in quarters),
            ]
        )
    heads = (("run", "plan"), ("step", "num"), ("predicted", "num"), *((f"quarter {i}", "num") for i in range(1, 5)))
    return table(heads, rows, caption="Step time, and samples per second over the quarters of a run")


def _waiting(comparison: Comparison) -> list[tuple[str, str, Html]]:
    measured = [(i, c) for i, c in enumerate(comparison.runs) if c.waits]
    if not measured:
        return []
    most = max(max(c.waits.shares) for _, c in measured if c.waits)
    figures = [
        tag(
            "figure",
            tag("h3", _named(i, c)),
            wait_bars(c.waits, most=most),
            tag("figcaption", " ".join(waiting_words(c.waits, c.run.steps))),
            data_table(wait_table(c.waits, most=MOST_BARS)),
        )
        for i, c in measured
        if c.waits
    ]
    lead = tag("p", "Of the time, by rank; all on one scale.", class_="lead")
    return [("Waiting", "How long ranks waited for each other", join(lead, tag("div", *figures, class_="many")))]


def _staleness(comparison: Comparison) -> list[tuple[str, str, Html]]:
    stale = [(i, c) for i, c in enumerate(comparison.runs) if c.staleness]
    if not stale:
        return []
    largest = max(c.staleness.largest for _, c in stale if c.staleness)
    figures = [
        tag(
            "figure",
            tag("h3", _named(i, c)),
            staleness_bars(c.staleness, largest=largest),
            tag("figcaption", staleness_words(c.staleness)),
            data_table(staleness_table(c.staleness)),
        )
        for i, c in stale
        if c.staleness
    ]
    lead = tag(
        "p", "Of all gradients, by the updates between their weights and those they were applied to.", class_="lead"
    )
    return [("Staleness", "How stale the gradients were", join(lead, tag("div", *figures, class_="many")))]
