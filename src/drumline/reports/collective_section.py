"""Collectives measured against the model: those of the recorded step, and the tables that `measure` made."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..clusters.measured import CollectiveTable
from ..clusters.spec import Cluster
from ..core.timeline import Timeline
from ..core.units import format_bytes, format_percent, format_seconds
from ..costs.collectives import CLOSED_FORMS, DEFAULTS
from .markup import Content, Html, join, table, tag
from .page_style import data_table
from .svg_charts import plain_bytes
from .svg_scatter import ChartAxis, ScatterPoint, ScatterSeries, scatter_chart

_KINDS = ("reduce_scatter", "all_reduce", "all_gather", "all_to_all", "broadcast", "send", "recv")
_COLOURS = ("k-backward", "k-communication", "k-optimizer", "k-activations")


@dataclass(frozen=True, slots=True)
class CollectiveTotal:
    """All calls of one collective in one step, the mean over ranks."""

    collective: str
    calls: float = 0.0
    seconds: float = 0.0
    bytes: float = 0.0


def collective_totals(timeline: Timeline) -> dict[str, CollectiveTotal]:
    """Calls, seconds and bytes of a step by collective, the mean over ranks; messages of other names are left out."""
    totals: dict[str, CollectiveTotal] = {}
    ranks = len(timeline.ranks) or 1
    for s in timeline.spans:
        name = re.sub(r"[^a-z]+", "_", s.name.lower())
        kind = next((k for k in _KINDS if k in name), None) if s.lane == "communication" else None
        if kind is not None:
            old = totals.get(kind, CollectiveTotal(kind))
            totals[kind] = CollectiveTotal(
                kind,
                old.calls + 1 / ranks,
                old.seconds + (s.end - s.start) / ranks,
                old.bytes + s.bytes / ranks,
            )
    return totals


def collective_section(cluster: Cluster, predicted: Timeline | None, measured: Timeline | None) -> Html | None:
    """Both comparisons, as far as there is something to compare; None if there is not."""
    parts = [x for x in (_of_step(predicted, measured), _of_links(cluster)) if x]
    return join(*parts) if parts else None


def _of_step(predicted: Timeline | None, measured: Timeline | None) -> Html | None:
    """The recorded step, collective by collective."""
    before = collective_totals(predicted) if predicted else {}
    after = collective_totals(measured) if measured else {}
    if not before or not after:
        return None
    rows: list[list[Content]] = []
    for kind in [k for k in _KINDS if k in before or k in after]:
        p, m = before.get(kind, CollectiveTotal(kind)), after.get(kind, CollectiveTotal(kind))
        error = format_percent((p.seconds - m.seconds) / m.seconds) if m.seconds and p.seconds else "-"
        rows.append(
            [
                kind,
                f"{p.calls:.3g}",
                f"{m.calls:.3g}",
                format_bytes(p.bytes or m.bytes) if p.bytes or m.bytes else "-",
                format_seconds(p.seconds) if p.calls else "-",
                format_seconds(m.seconds) if m.calls else "-",
                error,
            ]
        )
    heads = (
        ("in a step, mean over ranks", "tight"),
        ("predicted calls", "num"),
        ("measured", "num"),
        ("bytes", "num"),
        ("predicted time", "num"),
        ("measured", "num"),
        ("error", "num"),
    )
    note = (
        "A message is measured from the moment its rank is ready, so waiting for later ranks is included; it is not "
        "predicted here. Messages of the engine itself (loss, gradient norm) are measured and not predicted."
    )
    return join(
        tag("h3", "Messages of the recorded step"),
        table(heads, rows, caption="Messages of the recorded step"),
        tag("p", note, class_="note"),
    )


def _of_links(cluster: Cluster) -> Html | None:
    """The measured tables of the cluster over the closed form on its link."""
    tables = [t for t in cluster.collective if t.collective in DEFAULTS and t.ranks > 1][: len(_COLOURS)]
    inside = [t for t in tables if t.ranks <= cluster.node.devices]
    if not inside:
        return None
    series = []
    for t, colour in zip(inside, _COLOURS, strict=False):
        name = f"{t.collective}, {t.ranks} ranks"
        points = [
            ScatterPoint(m, s, f"{name}\n{format_bytes(m)}: {format_seconds(s)} over {t.transport}")
            for m, s in zip(t.bytes, t.seconds, strict=True)
        ]
        model = [ScatterPoint(m, s) for m, s in zip(t.bytes, _modelled(t, cluster), strict=True)]
        series.append(ScatterSeries(name, points, colour))
        series.append(ScatterSeries("", model, colour, line=True, dots=False))
    chart = scatter_chart(
        "Measured collectives over their closed form",
        series,
        x=ChartAxis("bytes of the buffer", plain_bytes, base=2),
        y=ChartAxis("time", format_seconds, base=10),
    )
    link = cluster.node.link
    lead = (
        "Dots were measured by `drumline measure`; lines are the closed form of the ring with alpha "
        f"{format_seconds(link.alpha)} and {link.bandwidth / 1e9:.3g} GB/s. Predictions use the measured tables."
    )
    return join(
        tag("h3", "Collectives of this machine"),
        tag("p", lead, class_="lead"),
        chart,
        data_table(_link_table(inside, cluster)),
    )


def _modelled(t: CollectiveTable, cluster: Cluster) -> list[float]:
    form = CLOSED_FORMS[t.collective, DEFAULTS[t.collective]]
    return [form(t.ranks, m, cluster.node.link) for m in t.bytes]


def _link_table(tables: Sequence[CollectiveTable], cluster: Cluster) -> Html:
    rows: list[list[Content]] = [
        [
            t.collective,
            t.ranks,
            t.transport,
            format_bytes(m),
            format_seconds(s),
            format_seconds(model),
            format_percent((model - s) / s),
        ]
        for t in tables
        for m, s, model in zip(t.bytes, t.seconds, _modelled(t, cluster), strict=True)
    ]
    heads = (
        ("collective", "tight"),
        ("ranks", "num"),
        ("transport", ""),
        ("bytes", "num"),
        ("measured", "num"),
        ("closed form", "num"),
        ("difference", "num"),
    )
    return table(heads, rows, caption="Measured collectives and their closed form")
