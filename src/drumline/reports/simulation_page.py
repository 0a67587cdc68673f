"""One self-contained HTML page about a simulation: its timeline, critical path, memory over time and links."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ..core import files
from ..core.timeline import Timeline
from ..core.units import counted, format_bytes, format_count, format_seconds
from ..costs.estimate import Estimate
from ..costs.link_traffic import LinkLoad
from ..simulator.critical_path import PathPart, path_in_words
from ..simulator.memory_curve import StageMemory
from ..simulator.worker_replay import WorkerReplay
from .markup import Content, Html, cut, join, swatch, table, tag
from .page_style import STYLE, data_table, html_document, navigation, section
from .prediction_error import MEMORY_PARTS, ordered
from .shown_stages import MOST_STAGES, shown_stages
from .step_parts import PARTS
from .svg_bars import BarRow, bar_rows
from .svg_charts import memory_bars, plain_bytes
from .svg_lines import LINE_STYLE
from .svg_scatter import ChartAxis, ScatterPoint, ScatterSeries, scatter_chart
from .svg_timeline import PATTERN, parts_table, timelines

SIMULATION_PAGE = "simulation.html"
"""The name of the page in a folder."""
_PARTS = (*PARTS, "bubble", "waiting")
MOST_MOMENTS = 400
"""Points of a curve of memory; of more, the largest of each stretch."""
MOST_PATH = 40
"""Rows about the critical path, those that take longest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationReport:
    """A replay and all that its page shows."""

    title: str
    timeline: Timeline
    step_seconds: float
    parts: dict[str, float]
    estimate: Estimate | None = None
    planned_seconds: float | None = None
    """The step that `plan` predicts."""
    planned_by: str = ""
    schedule: str = ""
    """Of a collective, in words."""
    bubble: float | None = None
    activations: float | None = None
    """Of a pipeline: most micro-batches whose activations one rank stores at once."""
    workers: WorkerReplay | None = None
    memory: tuple[StageMemory, ...] = ()
    links: tuple[LinkLoad, ...] = ()
    path: tuple[PathPart, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    """More lines under the title: what, and its value."""
    notes: tuple[str, ...] = field(default=())


def write_simulation_page(report: SimulationReport, path: str | Path) -> Path:
    """Write the page to a file, or into a folder under its usual name; returns the file."""
    path = Path(path)
    path = path / SIMULATION_PAGE if path.is_dir() else path
    files.write_text(path, simulation_page(report))
    return path


def simulation_page(report: SimulationReport) -> Html:
    """The whole document."""
    sections: list[tuple[str, str, Html | None]] = [
        ("Parts", "Where the time goes", _parts(report)),
        ("Timeline", "Rank by rank", _timeline(report)),
        ("Path", "The critical path", _path(report.path, report.step_seconds)),
        ("Memory", "Memory over time", _memory(report)),
        ("Links", "How busy the links are", _links(report.links)),
        ("Workers", "Waiting and staleness", _workers(report.workers)),
    ]
    shown = [(key, title, inside) for key, title, inside in sections if inside is not None]
    main = tag("main", *(section(*x) for x in shown))
    footer = tag("footer", tag("p", "Drumline simulation. Nothing was run: every number is predicted."))
    header = _header(report, [key for key, _, _ in shown])
    return html_document(report.title, PATTERN, header, main, footer, style=STYLE + LINE_STYLE)


def _header(report: SimulationReport, sections: Iterable[str]) -> Html:
    e = report.estimate
    facts: list[tuple[str, Content]] = []
    if report.schedule:
        facts.append(("Schedule", report.schedule))
    if report.bubble is not None:
        facts.append(("Bubble", f"{100 * report.bubble:.1f}% of the time of all ranks"))
    if report.activations is not None:
        facts.append(("Stored", f"activations of at most {report.activations:g} micro-batches on a rank"))
    if e is not None:
        verdict = "" if e.fits else ": does not fit"
        size, limit = format_bytes(e.memory_bytes), format_bytes(e.memory_limit)
        facts.append(("Memory", f"{size} of {limit} on the fullest rank{verdict}"))
    if report.planned_seconds and abs(report.planned_seconds / report.step_seconds - 1) > 1e-3:
        by = f", by {report.planned_by}" if report.planned_by else ""
        facts.append(("Plan predicts", f"{format_seconds(report.planned_seconds)}{by}"))
    facts += report.facts
    if report.workers is not None and not any(key == "Throughput" for key, _ in report.facts):
        facts.append(("Throughput", f"{format_count(report.workers.samples_per_second, 'samples')}/s"))
    facts.append(("Timeline", f"{len(report.timeline.spans)} spans on {len(report.timeline.ranks)} ranks"))
    notes = [n for n in (*report.notes, *(e.notes if e else ())) if n not in report.timeline.notes]
    what = "step" if e is not None or report.workers is not None else "replay"
    return tag(
        "header",
        tag("h1", tag("b", cut(report.title, 120))),
        tag("p", f"The {what} takes {format_seconds(report.step_seconds)}.", class_="verdict"),
        tag("dl", *((tag("dt", key), tag("dd", value)) for key, value in facts), class_="facts"),
        tag("ul", *(tag("li", cut(note, 300)) for note in dict.fromkeys(notes)), class_="note") if notes else None,
        navigation(sections),
    )


def _parts(report: SimulationReport) -> Html | None:
    parts = ordered(report.parts, _PARTS)
    whole = sum(parts.values())
    if not whole or len(parts) < 2:
        return None
    bars = [BarRow(k, v, f"{format_seconds(v)}, {100 * v / whole:.0f}%") for k, v in parts.items()]
    rows: list[list[Content]] = [
        [join(swatch(k), k), format_seconds(v), f"{100 * v / whole:.1f}%"] for k, v in parts.items()
    ]
    heads = (("part", "tight"), ("time", "num"), ("of all", "num"))
    numbers = table(heads, rows, caption="The parts", total=["all", format_seconds(whole), "100%"], class_="narrow")
    return join(tag("figure", bar_rows("The parts", bars, kind="backward", left=96)), data_table(numbers))


def _timeline(report: SimulationReport) -> Html:
    lead = "Predicted. Hatched is idle."
    if report.workers is not None:
        lead = "A step in the middle of the replay. Hatched is idle."
    drawn = timelines(report.timeline)
    return join(tag("p", lead, class_="lead"), drawn, data_table(parts_table([report.timeline])))


# ---- the critical path


def _path(path: tuple[PathPart, ...], step_seconds: float) -> Html | None:
    """The critical path of the step: by kind of work, and its longest pieces."""
    if not path or not step_seconds:
        return None
    order = path_in_words(path)
    bars = [
        BarRow(name, seconds, f"{format_seconds(seconds)}, {100 * seconds / step_seconds:.0f}%")
        for name, seconds in order[:12]
    ]
    longest = sorted(range(len(path)), key=lambda i: -path[i].seconds)[:MOST_PATH]
    rows: list[list[Content]] = [
        [i + 1, cut(path[i].name, 60), path[i].rank if path[i].rank >= 0 else "-", format_seconds(path[i].seconds)]
        for i in sorted(longest)
    ]
    heads = (("place", "num"), ("part", "plan"), ("rank", "num"), ("time", "num"))
    lead = (
        f"The end waits for a chain of {len(path)} pieces of work: only a faster chain makes a faster step. The "
        f"largest part, {100 * order[0][1] / step_seconds:.0f}%, is {order[0][0]}."
    )
    return join(
        tag("p", lead, class_="lead"),
        tag("figure", bar_rows("The critical path by kind of work", bars, kind="communication", left=190, full=48)),
        data_table(table(heads, rows, caption="The longest pieces of the critical path")),
    )


# ---- memory


def _memory(report: SimulationReport) -> Html | None:
    if report.memory:
        return _curves(report)
    e = report.estimate
    if e is None:
        return None
    bars = [("Peak", ordered(e.memory_parts, MEMORY_PARTS), e.memory_bytes)]
    rows: list[list[Content]] = [[k, format_bytes(v)] for k, v in bars[0][1].items()]
    heads = (("part", "tight"), ("bytes", "num"))
    numbers = table(
        heads, rows, caption="Memory by part", total=["peak", format_bytes(e.memory_bytes)], class_="narrow"
    )
    return join(
        tag("p", f"The peak of the fullest rank, of {format_bytes(e.memory_limit)}.", class_="lead"),
        tag("figure", memory_bars(bars, e.memory_limit)),
        data_table(numbers),
    )


def _curves(report: SimulationReport) -> Html:
    """A line for each stage, and the limit."""
    curves = shown_stages(report.memory)
    series = [
        ScatterSeries(f"stage {c.stage}", _stairs(c), f"r{i % MOST_STAGES}", line=True, dots=False)
        for i, c in enumerate(curves)
    ]
    end = max((t for c in curves for t in c.times), default=0.0)
    most = max((b for c in report.memory for b in c.bytes), default=0.0)
    e = report.estimate
    lead = f"At most {format_bytes(most)} on a rank"
    if e is not None and e.memory_limit <= 1.6 * most:
        limit = [ScatterPoint(0.0, e.memory_limit), ScatterPoint(end, e.memory_limit)]
        series.append(ScatterSeries("limit", limit, "k-communication", line=True, dots=False, dashed=True))
    lead += f", of {format_bytes(e.memory_limit)}." if e is not None else "."
    if len(curves) < len(report.memory):
        lead += f" {len(curves)} of {len(report.memory)} stages are drawn, the fullest among them."
    chart = scatter_chart(
        "Memory over time",
        series,
        x=ChartAxis("time", lambda v: format_seconds(v) if v else "0"),
        y=ChartAxis("bytes", lambda v: plain_bytes(v) if v else "0", binary=True),
    )
    rows: list[list[Content]] = [
        [
            c.stage,
            format_bytes(max(c.bytes)),
            format_seconds(c.times[c.bytes.index(max(c.bytes))]),
            format_bytes(c.bytes[-1]),
        ]
        for c in report.memory
        if c.bytes
    ]
    heads = (("stage", "num"), ("peak", "num"), ("at", "num"), ("at the end", "num"))
    return join(
        tag("p", lead, class_="lead"), chart, data_table(table(heads, rows, caption="Memory by stage", class_="narrow"))
    )


def _stairs(c: StageMemory) -> list[ScatterPoint]:
    """The corners of a curve that jumps, until its end; the largest value of each stretch where there are too many."""
    moments = list(zip(c.times, c.bytes, strict=True))
    stretch = -(-len(moments) // MOST_MOMENTS)
    stretches = [moments[i : i + stretch] for i in range(0, len(moments), stretch or 1)]
    points: list[ScatterPoint] = []
    for own in stretches:
        (t, _), b = own[0], max(b for _, b in own)
        if points:
            points.append(ScatterPoint(t, points[-1].y))
        points.append(ScatterPoint(t, b))
    if moments and points[-1].x < moments[-1][0]:
        points.append(ScatterPoint(moments[-1][0], points[-1].y))
    return points


# ---- links and workers


def _links(links: tuple[LinkLoad, ...]) -> Html | None:
    if not links:
        return None
    bars = [BarRow(x.level, x.busy, f"{100 * x.busy:.1f}%, {format_bytes(x.bytes)}") for x in links]
    rows: list[list[Content]] = [[x.level, f"{100 * x.busy:.1f}%", format_bytes(x.bytes)] for x in links]
    heads = (("links", "tight"), ("busy", "num"), ("bytes", "num"))
    most = max(links, key=lambda x: x.busy)
    where = {"node": "the link inside a node", "network": "the link between nodes"}.get(most.level, most.level)
    lead = f"The busiest level is {where}: {100 * most.busy:.1f}% of the step."
    return join(
        tag("p", lead, class_="lead"),
        tag("figure", bar_rows("How busy the links are", bars, kind="communication", most=1.0, left=96)),
        data_table(table(heads, rows, caption="How busy the links are", class_="narrow")),
    )


def _workers(workers: WorkerReplay | None) -> Html | None:
    if workers is None:
        return None
    shown = list(enumerate(workers.waiting))[:32]
    bars = [BarRow(f"rank {w}", share, f"{100 * share:.1f}%") for w, share in shown]
    rows: list[list[Content]] = [[w, f"{100 * share:.1f}%"] for w, share in enumerate(workers.waiting[:1000])]
    lead = f"Over {counted(workers.updates, 'update')}; rank {workers.slowest} waits least: the others wait for it."
    if workers.mean_staleness:
        lead += f" Gradients are {workers.mean_staleness:.2f} updates old on average."
    heads = (("rank", "num"), ("waits", "num"))
    return join(
        tag("p", lead, class_="lead"),
        tag("figure", bar_rows("Waiting by rank", bars, kind="communication")),
        data_table(table(heads, rows, caption="Waiting by rank", class_="narrow")),
    )
