"""Measured collectives: the values, what they say about "auto", and the picture of time over size."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..core.units import format_bytes, format_rate, format_seconds
from .markup import Html, join, tag
from .style import POLICY, SCRIPT, STYLE

_COLOURS = 10
_HEIGHT, _FOOT = 260, 26
_EXTRA = """
.line { fill: none; stroke-width: 1.6px; stroke-linejoin: round; } .line.priced { stroke-dasharray: 5 4; opacity: .6; }
.a0 { --k: var(--backward); } .a1 { --k: var(--communication); } .a2 { --k: var(--optimizer); }
.a3 { --k: var(--activations); } .a4 { --k: var(--forward); } .a5 { --k: var(--data); } .a6 { --k: var(--recompute); }
.a7 { --k: var(--overhead); } .a8 { --k: var(--poor); } .a9 { --k: var(--fair); } .auto { --k: var(--ink); }
.line { stroke: var(--k); } circle.point { fill: var(--k); }
.legend .key { border-top-color: var(--k); }
"""


@dataclass(frozen=True, slots=True)
class Result:
    """One measured case."""

    collective: str
    """Or `latency`, `bandwidth`."""
    transport: str
    algorithm: str
    ranks: int
    bytes: int
    """Of the whole buffer; of one message for latency and bandwidth."""
    seconds: float
    """Median over the repeats of the slowest rank's time."""
    predicted_seconds: float | None
    """By the price of its schedule on the links measured in the same run; None for what has no schedule."""
    segments: int = 1
    spread: float = 0.0
    """Half of the interquartile range over the median."""
    chosen: str = ""
    """Of `auto`: what it ran."""

    @property
    def label(self) -> str:
        """`ring`, or `ring*4` in four segments."""
        return self.algorithm if self.segments == 1 else f"{self.algorithm}*{self.segments}"

    @property
    def algorithmic(self) -> float:
        """Bytes of the buffer per second."""
        return self.bytes / self.seconds if self.seconds else 0.0

    @property
    def bus(self) -> float:
        """Bytes per second that a link must carry at least: comparable over collectives and numbers of ranks."""
        p = self.ranks
        share = {"all_reduce": 2 * (p - 1) / p}.get(self.collective)
        if share is None:
            shared = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
            share = (p - 1) / p if self.collective in shared else 1.0
        return self.algorithmic * share

    def plain(self) -> dict[str, object]:
        """For a JSON document."""
        return {
            "collective": self.collective,
            "transport": self.transport,
            "algorithm": self.algorithm,
            "segments": self.segments,
            "ranks": self.ranks,
            "bytes": self.bytes,
            "seconds": self.seconds,
            "predicted_seconds": self.predicted_seconds,
            "algbw": self.algorithmic,
            "busbw": self.bus,
            "spread": self.spread,
            **({"chosen": self.chosen} if self.chosen else {}),
        }


@dataclass(frozen=True, slots=True)
class Verdict:
    """The best way of one collective of one size, and how far "auto" was from it."""

    best: Result
    auto: Result | None
    ran: Result | None
    """What auto chose, as it was measured by its own name; auto itself where it was not."""

    @property
    def ratio(self) -> float | None:
        """Time of what auto chose over the best one's: 1 where it chose the best."""
        return None if self.ran is None else self.ran.seconds / self.best.seconds


Group = tuple[str, str]
"""(transport, collective)."""


def groups(results: Iterable[Result]) -> dict[Group, dict[int, list[Result]]]:
    """By transport and collective, then by size, the fastest first."""
    found: dict[Group, dict[int, list[Result]]] = {}
    for r in results:
        found.setdefault((r.transport, r.collective), {}).setdefault(r.bytes, []).append(r)
    return {
        key: {size: sorted(sizes[size], key=lambda r: r.seconds) for size in sorted(sizes)}
        for key, sizes in found.items()
    }


def verdicts(results: Iterable[Result]) -> list[Verdict]:
    """One for each collective and size of which more than auto was measured."""
    found = []
    for sizes in groups(results).values():
        for rows in sizes.values():
            named = [r for r in rows if r.algorithm != "auto"]
            if named:
                auto = next((r for r in rows if r.algorithm == "auto"), None)
                ran = next((r for r in named if auto is not None and r.label == auto.chosen), auto)
                found.append(Verdict(named[0], auto, ran))
    return found


def summary(results: Sequence[Result]) -> str:
    """How near auto was to the best, over all cases, in a sentence."""
    judged = [v for v in verdicts(results) if v.ratio is not None]
    if not judged:
        return ""
    near = sum(v.ratio <= 1.1 for v in judged if v.ratio is not None)
    worst = max(judged, key=lambda v: v.ratio or 0.0)
    assert worst.auto is not None and worst.ratio is not None
    return (
        f"auto was within 10% of the best in {near} of {len(judged)} cases; at worst {worst.ratio:.2f} times the best: "
        f"{worst.best.collective} of {format_bytes(worst.best.bytes)} over {worst.best.transport}, "
        f"{worst.auto.chosen or 'auto'} against {worst.best.label}"
    )


def page(results: Sequence[Result], *, title: str, notes: Sequence[str] = ()) -> Html:
    """One self-contained HTML page: time over size, a line for each algorithm, what was predicted dashed."""
    drawn = groups(results)
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("link", rel="icon", href="data:,"),
        tag("style", Html(STYLE + _EXTRA)),
    )
    sections = [
        tag("section", tag("h2", f"{collective} over {transport}"), _chart(sizes, collective))
        for (transport, collective), sizes in drawn.items()
    ]
    body = tag(
        "body",
        tag(
            "header",
            tag("h1", tag("b", "drumline bench")),
            tag("p", title, class_="verdict"),
            *(tag("p", note, class_="note") for note in notes),
        ),
        tag("main", *sections),
        tag("div", id="tip", role="status", hidden=True),
        tag("script", Html(SCRIPT)),
    )
    return join(Html("<!doctype html>\n"), tag("html", head, body, lang="en"), Html("\n"))


def _chart(sizes: dict[int, list[Result]], collective: str) -> Html:
    rows = [r for found in sizes.values() for r in found]
    labels = sorted({r.label for r in rows}, key=lambda x: (x == "auto", x))
    times = [t for r in rows for t in (r.seconds, r.predicted_seconds) if t]
    low, high = math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)))
    high = max(high, low + 1)
    first, last = math.log2(max(min(sizes), 1)), math.log2(max(max(sizes), 1))

    def px(size: int) -> float:
        return 50.0 if last == first else 2 + 96 * (math.log2(max(size, 1)) - first) / (last - first)

    def py(seconds: float) -> float:
        return 6 + (_HEIGHT - _FOOT - 12) * (1 - (math.log10(seconds) - low) / (high - low))

    drawn = [
        tag("line", x1=0, x2="100%", y1=f"{py(10.0**k):.1f}", y2=f"{py(10.0**k):.1f}", class_="grid")
        for k in range(low, high + 1)
    ]
    curves: list[Html] = []
    for label in labels:
        mine = [r for r in rows if r.label == label]
        kind = _kind(label, labels)
        curves.append(_polyline([(px(r.bytes), py(r.seconds)) for r in mine], f"line {kind}"))
        priced = [(px(r.bytes), py(r.predicted_seconds)) for r in mine if r.predicted_seconds]
        curves.append(_polyline(priced, f"line priced {kind}"))
        drawn += [
            tag(
                "circle",
                tag("title", _tip(r)),
                cx=f"{px(r.bytes):.2f}%",
                cy=f"{py(r.seconds):.1f}",
                r=3,
                class_=f"point {kind}",
            )
            for r in mine
        ]
    stretched = tag(
        "svg", *curves, viewBox=f"0 0 100 {_HEIGHT}", preserveAspectRatio="none", width="100%", height=_HEIGHT
    )
    axis = [
        tag(
            "text",
            format_bytes(size),
            x=f"{px(size):.2f}%",
            y=_HEIGHT - 8,
            text_anchor="start" if px(size) < 5 else "end" if px(size) > 95 else "middle",
        )
        for size in _marks(list(sizes))
    ]
    said = f"{collective}: from {format_bytes(min(sizes))} to {format_bytes(max(sizes))}, {', '.join(labels)}."
    points = [[round(px(size), 3), "\n".join(_tip(r) for r in found[:6])] for size, found in sizes.items()]
    plot = tag(
        "svg",
        tag("title", f"Time of {collective} over size"),
        tag("desc", said),
        *drawn[: high - low + 1],
        stretched,
        *drawn[high - low + 1 :],
        *axis,
        tag("line", x1=0, x2=0, y1=6, y2=_HEIGHT - _FOOT, class_="cursor"),
        width="100%",
        height=_HEIGHT,
        role="img",
        data_points=json.dumps(points),
    )
    left = tag(
        "svg",
        *(
            tag("text", format_seconds(10.0**k), x=52, y=f"{py(10.0**k) + 4:.1f}", text_anchor="end")
            for k in range(low, high + 1)
        ),
        width=60,
        height=_HEIGHT,
        aria_hidden="true",
    )
    legend = tag(
        "ul",
        *(tag("li", tag("span", class_=f"key {_kind(label, labels)}"), label) for label in labels),
        class_="legend",
    )
    said = "Solid: measured, the slowest rank's median. Dashed: predicted from the links."
    return tag("figure", tag("div", left, tag("div", plot), class_="pair"), legend, tag("figcaption", said))


def _kind(label: str, labels: Sequence[str]) -> str:
    return "auto" if label == "auto" else f"a{list(labels).index(label) % _COLOURS}"


def _polyline(points: list[tuple[float, float]], kind: str) -> Html:
    text = " ".join(f"{x:.2f},{y:.2f}" for x, y in sorted(points))
    return tag("polyline", points=text, vector_effect="non-scaling-stroke", class_=kind)


def _marks(sizes: list[int]) -> list[int]:
    """At most about five, evenly chosen."""
    step = max(1, math.ceil(len(sizes) / 5))
    return sizes[::step]


def _tip(r: Result) -> str:
    name = f"auto ({r.chosen})" if r.chosen else r.label
    said = f", predicted {format_seconds(r.predicted_seconds)}" if r.predicted_seconds is not None else ""
    return f"{format_bytes(r.bytes)} {name}: {format_seconds(r.seconds)}{said}, bus {format_rate(r.bus)}"
