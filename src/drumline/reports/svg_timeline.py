"""Timelines as SVG: one row per lane of a rank, in percent of the width, so that they fit any screen."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..core.timeline import Span, Timeline
from ..core.units import format_bytes, format_seconds
from .drawn_blocks import MOST_RANKS, MOST_SPANS, Block, chosen_ranks, select_blocks
from .markup import Content, Html, join, swatch, table, tag
from .page_style import COLOURS, DRAWING
from .step_parts import idle_share, parts_of, phase_of, short_name

MOST_BYTES = 640_000
"""Size of all timelines of a page, which has at most 1 MB. Where they have more, more spans are drawn as one."""
_LABELLED_SPANS = 1000
"""Up to this many spans, more is written about each."""

_LANES = ("compute", "communication", "data", "link")
_SHORT = {"communication": "comm."}
_HEIGHT = 20
_GAP = 3
_AXIS = 20
_NAMES = 96
"""Width of the lane names, in pixels."""
_FILE_WIDTH = 900
"""Width of a drawing in a file of its own."""


def timelines(*each: Timeline) -> Html:
    """One timeline, or the predicted one above the measured one, on the same time scale."""
    both = [_from_zero(t) for t in each]
    scale = max((t.seconds for t in both), default=0.0) * 1.005
    if scale <= 0:
        return tag("p", "Nothing was recorded on either timeline.", class_="note")
    tools = tag(
        "div",
        *(
            tag("button", sign, type="button", data_zoom=factor, aria_label=label)
            for sign, factor, label in (
                ("\u2212", 0.5, "Zoom out"),
                ("+", 2, "Zoom in"),
                ("Fit", 0, "Show the whole step"),
            )
        ),
        class_="tools",
        hidden=True,
    )
    other = {t.origin: t for t in both}
    kinds = [k for k in _KINDS if any(phase_of(s.lane, s.name) == k for t in both for s in t.spans)]
    legend = tag(
        "ul", *(tag("li", swatch(k), _KINDS[k]) for k in kinds), tag("li", swatch("idle"), "idle"), class_="legend"
    )
    budget = MOST_BYTES // len(both)
    drawings = [_drawing(t, scale, [o.seconds for o in other.values() if o is not t], budget) for t in both]
    hint = "Zoom with + and - while a timeline has the focus, or with Ctrl and the wheel; 0 shows the whole step."
    keys = tag("p", hint, class_="note tools", hidden=True)
    notes = ["The dashed line marks the end of the other timeline."] if len(both) == 2 else []
    notes += [note for d in drawings for note in d.notes]
    remarks = tag("p", " ".join(notes), class_="note") if notes else None
    return join(tag("div", legend, tools, class_="row"), [d.picture for d in drawings], keys, remarks)


def parts_table(timelines: Sequence[Timeline]) -> Html:
    """The parts of each timeline, and how long each lane of a rank is busy: the numbers of the drawing."""
    rows: list[list[Content]] = []
    for t in timelines:
        rows += [[f"{t.origin}: {part}", "all", format_seconds(v)] for part, v in parts_of(t).items()]
        shown, busy = chosen_ranks(t.ranks, MOST_RANKS), dict[tuple[int, str], float]()
        for s in t.spans:
            if s.rank in shown:
                busy[s.rank, s.lane] = busy.get((s.rank, s.lane), 0.0) + s.end - s.start
        rows += [[f"{t.origin}: {lane} busy", rank, format_seconds(busy[rank, lane])] for rank, lane in sorted(busy)]
    heads = (("", "tight"), ("rank", "num"), ("time", "num"))
    return table(heads, rows, caption="The parts of the timelines", class_="narrow")


def standalone_timeline(timeline: Timeline, title: str) -> Html:
    """One timeline as an SVG file: title, lanes, legend. Its colours follow the reader's light or dark theme."""
    timeline = _from_zero(timeline)
    scale = timeline.seconds * 1.005 or 1.0
    blocks = select_blocks(timeline, scale, MOST_SPANS)
    names, rows, height = _rows(timeline, blocks, scale)
    plot = tag("svg", _axis(scale, height), *rows, x=_NAMES, width=_FILE_WIDTH - _NAMES, height=height)
    kinds = [k for k in _KINDS if any(phase_of(s.lane, s.name) == k for s in timeline.spans)]
    legend, x = [], _NAMES
    for k in kinds:
        legend.append(tag("rect", x=x, y=2, width=10, height=10, class_=f"s k-{k}"))
        legend.append(tag("text", _KINDS[k], x=x + 15, y=11))
        x += 30 + 7 * len(_KINDS[k])
    summary = f"{title}: {_summary(timeline)}"
    heading = summary.removesuffix(_folded(timeline))  # next to the ranks, where there is room for it
    return tag(
        "svg",
        tag("title", summary),
        tag("style", Html(COLOURS + DRAWING)),
        PATTERN,
        tag("rect", x=-12, y=-8, width="100%", height="100%", class_="paper"),
        tag("text", heading, x=0, y=14, class_="strong"),
        tag("svg", *names, plot, y=26, width=_FILE_WIDTH, height=height),
        tag("svg", *legend, y=height + 36, width=_FILE_WIDTH, height=16),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"-12 -8 {_FILE_WIDTH + 24} {height + 68}",
        width=_FILE_WIDTH + 24,
    )


_KINDS = {
    "forward": "forward",
    "backward": "backward",
    "recompute": "recomputation",
    "optimizer": "optimizer",
    "communication": "communication",
    "data": "data",
    "overhead": "other work",
}


@dataclass(frozen=True, slots=True)
class _Detail:
    """How much is written about each span."""

    zoom: int
    """Names are in their span if they fit when zoomed in this many times."""
    letters: int
    """Of the name in the tooltip."""


@dataclass(frozen=True, slots=True)
class _Drawing:
    """One timeline as it is drawn, and what was left out of it."""

    picture: Html
    notes: tuple[str, ...]


def _drawing(timeline: Timeline, scale: float, ends: list[float], budget: int) -> _Drawing:
    """All ranks and spans if they are few; else fewer, until it is small enough."""
    most = MOST_SPANS
    while True:
        blocks = select_blocks(timeline, scale, most)
        picture = _picture(timeline, blocks, scale, ends)
        if len(picture) <= budget or most <= 200:
            break
        most = int(most * 0.7)
    own = {b.rank for b in blocks}
    ranks, drawn = len(timeline.ranks), len(own)
    notes = [f"{drawn} of {ranks} {timeline.origin} ranks are drawn, evenly spread."] if drawn < ranks else []
    if sum(s.rank in own for s in timeline.spans) > sum(len(b.parts) for b in blocks):
        notes.append(f"Of {len(timeline.spans)} {timeline.origin} spans, short neighbours are drawn as one.")
    if any(b.mixed for b in blocks):
        notes.append("Where kinds of work alternate quickly, their heights are their shares of the time.")
    return _Drawing(picture, (*notes, *map(_sentence, timeline.notes)))


def _sentence(note: str) -> str:
    return note[:1].upper() + note[1:] + ("" if note.endswith(".") else ".")


def _picture(timeline: Timeline, blocks: Sequence[Block], scale: float, ends: list[float]) -> Html:
    names, rows, height = _rows(timeline, blocks, scale)
    summary = _summary(timeline)
    title = timeline.origin.capitalize()
    marks = [tag("line", x1=_x(e, scale), x2=_x(e, scale), y1=_AXIS - 4, y2=height, class_="end") for e in ends]
    plot = tag(
        "svg",
        tag("title", f"{title} timeline of one step"),
        tag("desc", summary),
        _axis(scale, height),
        *rows,
        *marks,
        width="100%",
        height=height,
        role="img",
    )
    left = tag("svg", *names, width=_NAMES, height=height, aria_hidden="true")
    label = f"{title} timeline; scrolls sideways when zoomed"
    pan = tag("div", plot, class_="pan", tabindex="0", role="region", aria_label=label)
    return tag("figure", tag("h3", title, " ", tag("small", summary)), tag("div", left, pan, class_="pair"))


def _summary(timeline: Timeline) -> str:
    computes = any(s.lane == "compute" for s in timeline.spans)
    idle = f", compute idle {100 * idle_share(timeline):.1f}%" if computes else ""
    return f"{format_seconds(timeline.seconds)}{idle}{_folded(timeline)}"


def _folded(timeline: Timeline) -> str:
    """For how many ranks a drawn one stands; nothing if all are drawn."""
    count = _equal_count(timeline)
    if count:
        return f", each rank drawn x {count} ranks"
    return f", for {timeline.all_ranks} ranks" if timeline.rank_counts else ""


def _equal_count(timeline: Timeline) -> int:
    """The number of ranks that every drawn rank stands for; 0 if it differs, or is one."""
    counts = {timeline.rank_counts.get(rank, 1) for rank in timeline.ranks}
    return max(counts) if len(counts) == 1 and max(counts) > 1 else 0


def _rows(timeline: Timeline, blocks: Sequence[Block], scale: float) -> tuple[list[Html], list[Html], int]:
    """The lane names, the lanes, and their total height."""
    by_lane: dict[tuple[int, str], list[Block]] = {}
    for b in blocks:
        by_lane.setdefault((b.rank, b.lane), []).append(b)
    detail = _Detail(16, 120) if len(blocks) <= _LABELLED_SPANS else _Detail(4, 48)
    count = _equal_count(timeline)
    names = [tag("text", f"rank x {count}" if count else "rank", x=0, y=10)]
    rows: list[Html] = []
    y, last = _AXIS, -1
    for rank, lane in sorted(by_lane, key=lambda key: (key[0], _LANES.index(key[1]) if key[1] in _LANES else 9)):
        if rank != last:
            y += 2 * _GAP if rows else 0
            names.append(tag("text", tag("title", timeline.rank_label(rank)), rank, x=0, y=y + 14, class_="strong"))
        last = rank
        levels = _stacked(by_lane[rank, lane])
        height = _HEIGHT if len(levels) == 1 else 13 * len(levels)
        names.append(tag("text", _SHORT.get(lane, lane), x=_NAMES - 8, y=y + 14, text_anchor="end"))
        rows.append(_lane(levels, y, height, scale, detail))
        y += height + _GAP
    return names, rows, y


def _lane(levels: list[list[Block]], y: int, height: int, scale: float, detail: _Detail) -> Html:
    drawn = [
        tag("rect", x=0, y=y, width="100%", height=height, class_="lane"),
        tag("rect", x=0, y=y, width="100%", height=height, class_="hatch"),
    ]
    tall = height / len(levels)
    for level, blocks in enumerate(levels):
        drawn += [_block(b, y + level * tall, tall, scale, detail) for b in blocks]
    return tag("g", *drawn)


def _block(b: Block, y: float, height: float, scale: float, detail: _Detail) -> Html:
    """One span in the whole height of its lane, or several kinds of work on top of each other."""
    drawn = []
    for span, share in b.parts:
        drawn.append(_span(span, y, share * height, scale, detail, share if b.mixed else None))
        y += share * height
    return join(drawn)


def _span(s: Span, y: float, height: float, scale: float, detail: _Detail, busy: float | None) -> Html:
    """A span; `busy` is the share of its time that it takes if it alternates with others."""
    kind = phase_of(s.lane, s.name)
    share = (s.end - s.start) / scale
    box = {
        "x": _x(s.start, scale),
        "y": f"{round(y, 2):g}",
        "width": f"{max(100 * share, 0.03):.3f}%",
        "height": f"{round(height, 2):g}",
    }
    size = f", {format_bytes(s.bytes)}" if s.bytes else ""
    part = f"{100 * busy:.0f}% of " if busy is not None else ""
    when = f"{part}{format_seconds(s.end - s.start)} from {format_seconds(s.start)}, rank {s.rank}"
    tip = f"{_shortened(s.name, detail.letters)}\n{when}{size}"
    room = " room" if share > 0.004 else ""
    rect = tag("rect", tag("title", tip), class_=f"s k-{kind}{room}", **box)
    name = short_name(s.name)
    # Omit a name that would not fit even when zoomed in.
    if height < 12 or share * detail.zoom * 900 < 6 * len(name[:40]):
        return rect
    text = tag("text", name[:40], x=3, y=f"{height / 2 + 4:g}", class_=f"in k-{kind}")
    return join(rect, tag("svg", text, **box))


def _shortened(name: str, letters: int) -> str:
    """A long name without its middle: its end distinguishes it from others."""
    if len(name) <= letters:
        return name
    return f"{name[: letters // 3]}…{name[len(name) - (letters - 1 - letters // 3) :]}"


def _axis(scale: float, height: int) -> Html:
    step = nice_step(scale, 6)
    minor = step / 10
    drawn = []
    for i in range(int(scale / minor) + 1):
        t, major = i * minor, i % 10 == 0
        at, kind = _x(t, scale), None if major else "minor"
        anchor = "start" if i == 0 else "middle"
        drawn.append(tag("line", x1=at, x2=at, y1=_AXIS - 5, y2=height, class_="grid" if major else "grid minor"))
        if t <= 0.96 * scale:
            drawn.append(tag("text", _tick(t, step if major else minor), x=at, y=10, text_anchor=anchor, class_=kind))
    return tag("g", *drawn)


def nice_step(scale: float, ticks: int) -> float:
    """1, 2 or 5 times a power of ten, with about `ticks` of them in `scale`."""
    rough = scale / ticks
    power = 10.0 ** math.floor(math.log10(rough))
    return power * next(k for k in (1, 2, 5, 10) if k * power >= rough * 0.999)


def _tick(t: float, step: float) -> str:
    if t == 0:
        return "0"
    unit, size = next(((u, k) for u, k in (("s", 1.0), ("ms", 1e-3)) if t >= k), ("us", 1e-6))
    digits = max(0, -math.floor(math.log10(step / size) + 1e-9))
    return f"{t / size:.{digits}f} {unit}"


def _x(t: float, scale: float) -> str:
    return f"{100 * t / scale:.3f}%"


def _from_zero(timeline: Timeline) -> Timeline:
    start = min((s.start for s in timeline.spans), default=0.0)
    if not start:
        return timeline
    spans = tuple(dataclasses.replace(s, start=s.start - start, end=s.end - start) for s in timeline.spans)
    return dataclasses.replace(timeline, spans=spans)


def _stacked(blocks: Iterable[Block]) -> list[list[Block]]:
    """At most three rows without overlaps; blocks that still overlap are drawn over the last row."""
    rows: list[list[Block]] = []
    for s in sorted(blocks, key=lambda s: (s.start, -s.end)):
        slack = 1e-3 * (s.end - s.start)  # adjacent measured spans overlap by rounding
        row = next((r for r in rows if r[-1].end <= s.start + slack), None)
        if row is None and len(rows) < 3:
            rows.append(row := [])
        (rows[-1] if row is None else row).append(s)
    return rows


PATTERN = tag(
    "svg",
    tag(
        "pattern",
        tag("path", d="M-1 1l2-2M0 6l6-6M5 7l2-2"),
        id="idle",
        width="6",
        height="6",
        patternUnits="userSpaceOnUse",
    ),
    width="0",
    height="0",
    aria_hidden="true",
    class_="unseen",
)
"""The hatching of idle time; once per page."""
