"""The drawings of a search: heat maps of the strategy space, the Pareto front, and the scaling curve."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.units import format_bytes, format_count, format_seconds
from ..planner.scaling_curve import ScalingPoint
from ..planner.strategy_map import StrategyCell, StrategyMap
from .markup import Content, Html, cut, join, names, table, tag
from .page_style import data_table
from .plan_report import PlanReport
from .svg_charts import plain_bytes
from .svg_heatmap import HeatCell, heat_legend, heat_map
from .svg_scatter import ChartAxis, ScatterPoint, ScatterSeries, scatter_chart

_MEANING = {
    "tp": "tensor-parallel ranks",
    "pp": "pipeline stages",
    "zero": "what is sharded",
    "micro": "micro-batches",
}
MOST_POINTS = 400
"""Candidates in the chart of time and memory, best first."""


# ---- the strategy space


def space_section(report: PlanReport) -> Html | None:
    """A heat map for every pair of keys, coloured by step time, hatched where memory does not suffice."""
    if not report.maps:
        return None
    lead = (
        "Each cell is the fastest plan with these values that fits, whatever its other keys are; the best has a frame."
    )
    fails = any(not c.fits for m in report.maps for c in m.cells)
    if fails:
        kept = f" with {format_bytes(size)} kept free" if (size := report.answer.reserve_bytes) else ""
        lead += f" In a hatched cell none fits{kept}: its number is the least memory that one of them needs."
    figures = [
        tag(
            "figure",
            tag("h3", tag("code", m.column_key), " and ", tag("code", m.row_key), " ", tag("small", _keys(m))),
            heat_map(
                f"Step time by {m.column_key} and {m.row_key}",
                [_heat(c, m, str(report.best)) for c in m.cells],
                columns=m.column_key,
                rows=m.row_key,
            ),
            data_table(_map_table(m)),
        )
        for m in report.maps
    ]
    note = "Rows are powers of two, and the value of the best plan."
    return join(
        tag("p", lead, class_="lead"),
        heat_legend("the best", "5 times as long and more", "no plan fits" if fails else ""),
        tag("div", *figures, class_="charts"),
        tag("p", note, class_="note"),
    )


def _keys(m: StrategyMap) -> str:
    return f"{_MEANING.get(m.column_key, m.column_key)}, {_MEANING.get(m.row_key, m.row_key)}"


def _heat(c: StrategyCell, m: StrategyMap, best: str) -> HeatCell:
    where = f"{m.column_key}={c.column}, {m.row_key}={c.row}"
    verdict = format_seconds(c.step_seconds) if c.fits else f"too large; {format_seconds(c.step_seconds)} if it fitted"
    return HeatCell(
        column=str(c.column),
        row=str(c.row),
        value=c.step_seconds,
        text=(format_seconds if c.fits else format_bytes)(c.step_seconds if c.fits else c.memory_bytes),
        tip=f"{where}: {verdict}\n{format_bytes(c.memory_bytes)} a device\n{c.plan}",
        fails=not c.fits,
        best=c.fits and c.plan == best,
    )


def _map_table(m: StrategyMap) -> Html:
    rows: list[list[Content]] = [
        [
            c.row,
            c.column,
            format_seconds(c.step_seconds),
            format_bytes(c.memory_bytes),
            "fits" if c.fits else "too large",
            names(c.plan),
        ]
        for c in m.cells
    ]
    heads = (
        (m.row_key, "num"),
        (m.column_key, "num"),
        ("step", "num"),
        ("memory", "num"),
        ("", "tight"),
        ("plan", "plan"),
    )
    return table(heads, rows, caption=f"The best plan by {m.row_key} and {m.column_key}")


# ---- time against memory


def pareto_section(report: PlanReport) -> Html | None:
    """Every candidate that fits, and the front: those that no other beats in both."""
    fitting = [c for c in report.answer.candidates if c.fits]
    if len(fitting) < 2:
        return None
    front = set(report.front)
    best = str(report.best)

    def points(on_front: bool) -> list[ScatterPoint]:
        return [
            ScatterPoint(
                c.memory_bytes,
                c.step_seconds,
                f"{c.plan}\n{format_seconds(c.step_seconds)}, {format_bytes(c.memory_bytes)}",
                4.5 if on_front else 3.0,
                chosen=str(c.plan) == best,
            )
            for c in fitting[:MOST_POINTS]
            if (str(c.plan) in front) is on_front
        ]

    winners = sorted(points(True), key=lambda p: p.x)
    series = [
        ScatterSeries("a plan that fits", points(False), "k-recompute"),
        ScatterSeries("the Pareto front", winners, "k-backward", line=True),
    ]
    e = report.estimate
    lead = "On the front, less memory costs time; every other plan is beaten in both. The ring marks the best plan."
    most = max(c.memory_bytes for c in fitting)
    if e is not None and e.memory_limit <= 1.6 * most:
        low, high = min(c.step_seconds for c in fitting), max(c.step_seconds for c in fitting)
        limit = [ScatterPoint(e.memory_limit, low), ScatterPoint(e.memory_limit, high)]
        name = "the limit of a device"
        series.append(ScatterSeries(name, limit, "k-communication", line=True, dots=False, dashed=True))
    elif e is not None:
        lead += f" The limit of {format_bytes(e.memory_limit)} is too far right to draw."
    chart = scatter_chart(
        "Step time against memory",
        series,
        x=ChartAxis("memory of the fullest device", lambda v: plain_bytes(v) if v else "0", binary=True),
        y=ChartAxis("step", _seconds, base=10),
    )
    return join(tag("p", lead, class_="lead"), chart, data_table(_front_table(report)) if front else None)


def _seconds(t: float) -> str:
    """A label of an axis: round numbers of seconds are no round numbers of minutes."""
    return f"{t:,.0f} s" if t >= 100 else format_seconds(t)


def _front_table(report: PlanReport) -> Html:
    by_plan = {str(c.plan): c for c in report.answer.candidates}
    rows: list[list[Content]] = [
        [format_seconds(by_plan[p].step_seconds), format_bytes(by_plan[p].memory_bytes), names(p)] for p in report.front
    ]
    heads = (("step", "num"), ("memory", "num"), ("plan", "plan"))
    return table(heads, rows, caption="The Pareto front of time and memory")


# ---- scaling


def scaling_section(report: PlanReport) -> Html | None:
    """Samples per second of the best plan for each number of devices, and the ideal line."""
    points = [p for p in report.scaling if p.plan]
    if len(points) < 2:
        return None
    base = points[0]
    ideal = [
        ScatterPoint(p.devices, base.samples_per_second * p.devices / base.devices) for p in (points[0], points[-1])
    ]
    dots = [
        ScatterPoint(
            p.devices,
            p.samples_per_second,
            f"{p.devices} devices: {format_count(p.samples_per_second)} samples/s\n"
            f"{100 * p.efficiency:.0f}% of ideal, {format_seconds(p.step_seconds)} a step\n{p.plan}",
            4.5,
        )
        for p in points
    ]
    chart = scatter_chart(
        "Throughput over devices",
        [
            ScatterSeries("ideal", ideal, "k-communication", line=True, dots=False, dashed=True),
            ScatterSeries("the best plan", dots, "k-backward", line=True),
        ],
        x=ChartAxis("devices", lambda v: f"{v:g}", base=2),
        y=ChartAxis("samples/s", format_count, base=10),
    )
    last = points[-1]
    lead = (
        f"The batch stays at {last.batch_size} samples. From {base.devices} to {last.devices} devices, a device keeps "
        f"{100 * last.efficiency:.0f}% of its throughput."
    )
    return join(tag("p", lead, class_="lead"), chart, data_table(_scaling_table(report.scaling)))


def _scaling_table(points: Sequence[ScalingPoint]) -> Html:
    rows: list[list[Content]] = [
        [
            p.devices,
            format_seconds(p.step_seconds) if p.plan else "-",
            format_count(p.samples_per_second) if p.plan else "-",
            f"{100 * p.efficiency:.0f}%" if p.plan else "-",
            names(p.plan) if p.plan else cut(p.lacks, 120),
        ]
        for p in points
    ]
    heads = (("devices", "num"), ("step", "num"), ("samples/s", "num"), ("efficiency", "num"), ("plan", "plan"))
    return table(heads, rows, caption="The best plan for each number of devices")
