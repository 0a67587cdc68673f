"""How a notebook shows a value: a sentence, a table, and pictures as images that keep their own style.

All names are escaped, and the numbers are those of the value's own page.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from functools import singledispatch

from ..clusters import Cluster
from ..core.timeline import Timeline
from ..core.units import format_bytes, format_count, format_percent, format_rate, format_seconds
from ..costs import Estimate
from ..models import Profile
from ..planner import Answer
from ..plans import Plan
from .markup import Content, Html, cut, join, table, tag
from .page_style import COLOURS, DRAWING
from .run import Run
from .svg_charts import memory_bars
from .svg_timeline import standalone_timeline

MOST_ROWS = 12
"""Rows of a table; the rest is counted."""
_WIDTH = 600


@singledispatch
def as_html(value: object) -> Html:
    """The value as HTML; others as their text."""
    return tag("pre", str(value))


def summary(lead: Content, heads: Sequence[str], rows: Iterable[Sequence[Content]], *more: Content) -> Html:
    """A sentence, a table of at most `MOST_ROWS` rows, and what follows it."""
    all_rows = list(rows)
    left = len(all_rows) - MOST_ROWS
    body = table([(head, "") for head in heads], all_rows[:MOST_ROWS], caption="")
    return tag("div", tag("p", lead), body, tag("p", f"and {left} more") if left > 0 else None, *more)


def timeline_image(timeline: Timeline, title: str) -> Html | None:
    """The picture of a timeline; None if nothing is on it."""
    return _image(standalone_timeline(timeline, title), title) if timeline.spans else None


def _image(svg: Html, title: str) -> Html:
    """An SVG as an image of its own: scripts do not run in it, and styles stay inside."""
    data = base64.b64encode(svg.encode()).decode()
    return tag("img", src=f"data:image/svg+xml;base64,{data}", alt=title, style="max-width: 100%")


def _memory_image(e: Estimate) -> Html:
    bars = memory_bars([("peak", e.memory_parts, e.memory_bytes)], e.memory_limit)
    frame = tag(
        "svg",
        tag("style", Html(COLOURS + DRAWING)),
        tag("rect", width="100%", height="100%", class_="paper"),
        tag("svg", bars, x=8, y=8, width=_WIDTH - 16),
        xmlns="http://www.w3.org/2000/svg",
        width=_WIDTH,
        height=116,
    )
    return _image(frame, "peak memory by part")


def _seconds(parts: Mapping[str, float]) -> list[list[Content]]:
    whole = sum(parts.values())
    return [[k, format_seconds(v), f"{100 * v / whole:.0f}%" if whole else "-"] for k, v in parts.items()]


@as_html.register
def _cluster(c: Cluster) -> Html:
    links = [("link in a node", c.node.link), *([("link between nodes", c.network.link)] if c.network else [])]
    rows: list[list[Content]] = [
        ["memory per device", format_bytes(c.device.memory), cut(c.origin_of("device.memory"), 60)]
    ]
    for dtype, peak in c.device.peak.items():
        rows.append([f"peak {dtype}", format_count(peak, "FLOP/s"), cut(c.origin_of(f"device.peak.{dtype}"), 60)])
    rows += [[name, f"{format_seconds(x.alpha)} + {format_rate(x.bandwidth)}", ""] for name, x in links]
    return summary(f"{c.name}: {c.devices} devices ({c.device.name})", ("", "value", "origin"), rows)


@as_html.register
def _profile(p: Profile) -> Html:
    rows: list[list[Content]] = [
        [
            tag("code", cut(layer.name or p.name, 44)),
            layer.repeats,
            f"{layer.repeats * (layer.parameters + layer.frozen):,}",
            format_count(layer.repeats * layer.flops().at(1), "FLOP"),
            format_bytes(layer.repeats * layer.saved.at(1)),
        ]
        for layer in p.layers
    ]
    lead = f"{p.name}: {p.parameters:,} parameters, {p.optimizer}, batches of {p.batch_size}"
    return summary(lead, ("layer", "times", "parameters", "work per sample", "saved per sample"), rows)


@as_html.register
def _plan(p: Plan) -> Html:
    lead = join(
        tag("code", str(p)), f" on {p.ranks} rank{'s' * (p.ranks != 1)}, ", "exact" if p.exact else "approximate"
    )
    return summary(lead, ("key", "value"), [[k, cut(str(v), 60)] for k, v in p.table().items()])


@as_html.register
def _estimate(e: Estimate) -> Html:
    fits = "fits into" if e.memory_bytes <= e.memory_limit else "does not fit into"
    lead = f"{e.plan}: {format_seconds(e.step_seconds)} per step (within {100 * e.error:.0f}%); "
    lead += f"{format_bytes(e.memory_bytes)} {fits} {format_bytes(e.memory_limit)}"
    return summary(lead, ("part of the step", "time", ""), _seconds(e.parts), _memory_image(e))


@as_html.register
def _answer(a: Answer) -> Html:
    rows: list[list[Content]] = [
        [
            i,
            tag("code", cut(str(c.plan), 60)),
            format_seconds(c.step_seconds),
            format_bytes(c.memory_bytes),
            "fits" if c.fits else "too large",
            cut(c.reason, 100),
        ]
        for i, c in enumerate(a.candidates, 1)
    ]
    return summary(a.explanation, ("", "plan", "step", "memory", "", "reason"), rows)


@as_html.register
def _timeline(t: Timeline) -> Html:
    title = f"{t.origin} timeline: {format_seconds(t.seconds)}"
    return timeline_image(t, title) or tag("p", f"{t.origin} timeline: nothing was recorded")


@as_html.register
def _run(r: Run) -> Html:
    rows: list[list[Content]] = [
        ["steps", len(r.steps), ""],
        ["loss", *([f"{r.losses[0]:.4g} to {r.losses[-1]:.4g}", ""] if r.losses else ["-", ""])],
        ["step predicted", format_seconds(r.predicted_step_seconds), ""],
    ]
    if r.time_error is not None:
        error = f"prediction off by {format_percent(r.time_error)}"
        rows.append(["step measured", format_seconds(r.step_seconds or 0.0), error])
    shown = r.measured or r.predicted
    picture = timeline_image(shown, f"{shown.origin} step of {r.plan}")
    return summary(join(f"{r.name}: ", tag("code", str(r.plan)), f" on {r.ranks} ranks"), ("", "", ""), rows, picture)
