"""A data-flow graph as SVG: nodes below each other in the order in which they run, skip connections next to them."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..core.units import format_bytes, format_count
from .graph_text import chosen, message_texts, source_name
from .graph_view import GraphNode, GraphView, boundaries
from .markup import Html, tag
from .page_sections import TIMES

MOST_BOXES = 160
"""Nodes that are drawn; of more, the first and the last."""
MOST_LANES = 14
"""Nodes with skip connections next to each other; the rest is in the table only."""

_LANE = 9
_LINE = 16
_GAP = 18
_CUT = 42
_PAD = 8
_INPUTS = 3
"""Inputs of a node that are listed in its box."""

GRAPH_STYLE = """
.box { fill: var(--panel); stroke: var(--rule); } .work { fill: var(--forward); opacity: .55; }
.flow { fill: none; stroke: var(--soft); stroke-width: 1.4px; } .skip { fill: none; stroke: var(--communication);
  stroke-width: 1.6px; } .tip { fill: var(--soft); } .skip-tip { fill: var(--communication); }
.cutline { stroke: var(--poor); stroke-width: 1.5px; stroke-dasharray: 6 4; } svg text.cutname { fill: var(--poor);
  font-weight: 600; } svg text.comm { fill: var(--fair); } svg text.mono { fill: var(--ink); font-weight: 600; }
"""
"""Rules of the drawing."""


@dataclass(slots=True)
class _Layout:
    """Places of the nodes, from the top."""

    tops: dict[int, int] = field(default_factory=dict)
    heights: dict[int, int] = field(default_factory=dict)
    drawn: list[Html] = field(default_factory=list)
    height: int = 4

    def middle(self, k: int) -> float:
        return self.tops[k] + self.heights[k] / 2


def graph_drawing(view: GraphView) -> tuple[Html, list[str]]:
    """The drawing, and remarks on what it leaves out."""
    shown = chosen(len(view.nodes), MOST_BOXES)
    layout = _boxes(view, shown)
    lanes, left_out = _lanes(view, layout)
    remarks = []
    if len(shown) < len(view.nodes):
        remarks.append(f"{len(view.nodes) - len(shown)} of {len(view.nodes)} nodes are left out in the middle.")
    if left_out:
        remarks.append(f"{left_out} skip connections are not drawn; the table below has them.")
    width = _LANE * (lanes[1] + 1) + 4 if lanes[1] else 2
    left = tag("svg", *lanes[0], width=width, height=layout.height, aria_hidden="true")
    title = f"Data flow of {view.profile.name}"
    plot = tag(
        "svg", tag("title", title), *layout.drawn, width="100%", height=layout.height, role="img", aria_label=title
    )
    return tag("div", left, tag("div", plot), class_="pair"), remarks


def _boxes(view: GraphView, shown: list[int]) -> _Layout:
    layout, starts, before = _Layout(), boundaries(view), -1
    most = max((node.work for node in view.nodes), default=0.0) or 1.0
    for k in shown:
        if k != before + 1:
            text = f"… {k - before - 1} nodes left out …"
            layout.drawn.append(tag("text", text, x=_PAD, y=layout.height + _LINE))
            layout.height += _LINE + _GAP
        if k in starts:
            _cut(view, layout, starts[k])
        _box(view, layout, k, most)
        before = k
    return layout


def _cut(view: GraphView, layout: _Layout, stage: int) -> None:
    """The boundary before a stage, with what it receives."""
    assert view.cuts is not None
    y = layout.height + 8
    received = [
        f"{format_bytes(t.bytes)} from stage {t.src}" + (" (skip)" if t.skips else "")
        for t in view.cuts.transfers
        if t.dst == stage
    ]
    layout.drawn.append(tag("line", x1=0, x2="100%", y1=y, y2=y, class_="cutline"))
    for i, text in enumerate([f"stage {stage} receives", *received], 1):
        layout.drawn.append(tag("text", text, x=52, y=y + _LINE * i, class_="cutname"))
    layout.height += _CUT + _LINE * len(received)


def _box(view: GraphView, layout: _Layout, k: int, most: float) -> None:
    node = view.nodes[k]
    inputs = [f"← {format_bytes(e.bytes)} {_short(source_name(view, e))}" for e in node.edges]
    if len(inputs) > _INPUTS:
        inputs = [*inputs[: _INPUTS - 1], f"← and {len(inputs) - _INPUTS + 1} more"]
    amounts = f"{format_count(node.work, 'FLOP')}, depth {format_count(node.depth)}"
    lines = [(amounts, ""), *((text, "") for text in inputs)]
    lines += [(f"tied: {_short(name)}", "") for name in node.tied[:2]]
    lines += [(text, "comm") for text in message_texts(view, node)]
    top, height = layout.height, _LINE * (len(lines) + 1) + 2 * _PAD - 4
    times = f" {TIMES}{node.repeats}" if node.repeats > 1 else ""
    kind = f"  {node.kind}" if node.kind and node.kind != node.label else ""
    tip = f"{node.label}{times}\n{node.kind}\n{len(node.operators) * node.repeats} operators, {amounts}"
    layout.drawn += [
        tag("rect", tag("title", tip), x=1, y=top, width="99%", height=height, rx=4, class_="s box"),
        tag("rect", x=1, y=top + height - 3, width=f"{98 * node.work / most:.2f}%", height=3, class_="work"),
        tag(
            "text",
            tag("tspan", f"{_short(node.label, 44)}{times}", class_="strong"),
            tag("tspan", _short(kind, 28)),
            x=_PAD,
            y=top + _PAD + 10,
        ),
        *(
            tag("text", text, x=_PAD, y=top + _PAD + 10 + _LINE * i, class_=name or None)
            for i, (text, name) in enumerate(lines, 1)
        ),
    ]
    if any(e.source == k - 1 for e in node.edges) and k - 1 in layout.tops:
        above = layout.tops[k - 1] + layout.heights[k - 1]
        layout.drawn.append(tag("path", d=f"M40 {above}V{top - 5}", class_="flow"))
        layout.drawn.append(tag("path", d=f"M36 {top - 7}L40 {top - 1}L44 {top - 7}Z", class_="tip"))
    layout.tops[k], layout.heights[k] = top, height
    layout.height += height + _GAP


def _lanes(view: GraphView, layout: _Layout) -> tuple[tuple[list[Html], int], int]:
    """(The skip connections, a lane for each node that they begin at; the lanes), and how many found no room."""
    targets: dict[int, list[tuple[int, float]]] = {}
    for k, node in enumerate(view.nodes):
        for e in node.edges:
            if e.skips and k in layout.tops and e.source in layout.tops:
                targets.setdefault(e.source, []).append((k, e.bytes))
    ends: list[float] = []
    placed: list[tuple[int, int]] = []
    left_out = 0
    for source, own in sorted(targets.items()):
        start, end = layout.middle(source), layout.middle(max(k for k, _ in own))
        lane = next((i for i, last in enumerate(ends) if last <= start), len(ends))
        if lane >= MOST_LANES:
            left_out += len(own)
            continue
        ends[lane : lane + 1] = [end]
        placed.append((lane, source))
    right = _LANE * (len(ends) + 1) + 4
    drawn: list[Html] = []
    for lane, source in placed:
        x = right - _LANE * (lane + 1) - 4
        drawn += _lane(view, layout, source, targets[source], x, right)
    return (drawn, len(ends)), left_out


def _lane(
    view: GraphView, layout: _Layout, source: int, targets: list[tuple[int, float]], x: int, right: int
) -> list[Html]:
    """One line from a node past others, with an arrow to each node that reads from it."""
    start, last = layout.middle(source) + 4, layout.middle(max(k for k, _ in targets)) - 4
    tip = "\n".join([f"from {view.nodes[source].label}", *(_reader(view, k, size) for k, size in targets[:12])])
    path = f"M{right} {start:g}H{x + 4}Q{x} {start:g} {x} {start + 4:g}V{last - 4:g}"
    drawn = []
    for k, _ in targets:
        end = layout.middle(k) - 4
        path += f"M{x} {end - 4:g}Q{x} {end:g} {x + 4} {end:g}H{right - 5}"
        drawn.append(
            tag("path", d=f"M{right - 6} {end - 4:g}L{right} {end:g}L{right - 6} {end + 4:g}Z", class_="skip-tip")
        )
    return [tag("path", tag("title", tip), d=path, class_="skip"), *drawn]


def _reader(view: GraphView, k: int, size: float) -> str:
    return f"to {view.nodes[k].label}: {format_bytes(size)}"


def _short(text: str, length: int = 36) -> str:
    """A name, cut in the middle."""
    if len(text) <= length:
        return text
    head = length // 2 - 1
    return f"{text[:head]}…{text[len(text) - (length - 1 - head) :]}"


def node_title(node: GraphNode) -> str:
    """The name of a node with its repeats."""
    return f"{node.label} {TIMES}{node.repeats}" if node.repeats > 1 else node.label
