"""One self-contained HTML page about the data flow of a model: the graph, a plan's cuts, fusion, operators by node."""

from __future__ import annotations

from ..clusters import Cluster
from ..core.units import format_bytes, format_count, format_seconds
from .graph_text import chain_name, fusion_text, message_rows, source_name
from .graph_view import GraphNode, GraphView
from .markup import Content, Html, cut, join, names, table, tag
from .page_style import STYLE, html_document
from .svg_graph import GRAPH_STYLE, graph_drawing, node_title

MOST_OPERATORS = 1500
"""Operators in the tables, to keep the page small."""
MOST_CHAINS = 30
MOST_MESSAGES = 200
MOST_SOURCES = 24
"""Inputs of a node that are named."""


def graph_page(view: GraphView, cluster: Cluster | None) -> Html:
    """The whole document."""
    sections = [("Graph", "The graph", _graph(view))]
    if view.cuts is not None:
        sections.append(("Plan", "Where the plan cuts it", _plan(view)))
    sections.append(("Fusion", "What fusion would save", _fusion(view, cluster)))
    sections.append(("Operators", "Operators, node by node", _operators(view)))
    main = tag(
        "main",
        *(
            tag("section", tag("h2", title, id=f"title-{key.lower()}"), inside, id=key.lower())
            for key, title, inside in sections
        ),
    )
    keys = [key for key, _, _ in sections]
    return html_document(
        f"{view.profile.name}: data flow", _header(view, keys), main, _footer(view), style=STYLE + GRAPH_STYLE
    )


def _header(view: GraphView, keys: list[str]) -> Html:
    depth, n = view.tasks.depth, view.samples
    samples = f"{n:g} sample{'s' if n != 1 else ''}"
    count = len(view.flow.operators)
    verdict = f"{count} operators, {view.longest_chain} of them on the longest chain"
    cards = [
        ("Work of the forward", format_count(view.work, "FLOP"), "operations"),
        ("Depth", format_count(depth), "unit operations on the longest chain"),
        ("Average parallelism", format_count(view.work / depth) if depth else "-", "work / depth"),
        ("Fusion would save", format_bytes(view.fused_bytes), f"and {view.fused_kernels} kernels"),
    ]
    shown = tag(
        "div",
        *(
            tag("div", tag("h3", title), tag("div", big, class_="big"), tag("p", text), class_="card")
            for title, big, text in cards
        ),
        class_="cards",
    )
    what: list[Content] = [tag("b", cut(view.profile.name, 60)), f" · data flow of the forward · {samples}"]
    if view.layer:
        what.append(join(" · layer ", tag("code", cut(view.layer, 60))))
    plan = tag("p", "Under ", names(str(view.cuts.plan)), ", one micro-batch.", class_="lead") if view.cuts else None
    nav = tag("nav", *(tag("a", key, href=f"#{key.lower()}") for key in keys), aria_label="Sections")
    return tag("header", tag("h1", *what), tag("p", verdict, class_="verdict"), plan, shown, nav)


def _graph(view: GraphView) -> Html:
    drawing, remarks = graph_drawing(view)
    lead = (
        "From top to bottom in the order of execution. Arrows are values that one node writes and the next reads; "
        "those that pass other nodes are drawn at the left. The bar below a node is its share of the work."
    )
    return join(
        tag("p", lead, class_="lead"),
        tag("figure", drawing),
        tag("p", " ".join(remarks), class_="note") if remarks else None,
    )


def _plan(view: GraphView) -> Html:
    assert view.cuts is not None
    cuts = view.cuts
    transfers = table(
        (("from", "tight"), ("to", "tight"), ("values", "num"), ("bytes", "num")),
        [[f"stage {t.src}", f"stage {t.dst}", t.values, format_bytes(t.bytes)] for t in cuts.transfers],
        caption="Values that stages send in the forward of a micro-batch",
        class_="narrow",
    )
    rows: list[list[Content]] = [
        [tag("code", cut(node_title(node), 44)), axis, phase, collective, count, format_bytes(size)]
        for node in view.nodes
        for axis, phase, collective, count, size in message_rows(view, node)
    ]
    heads = (
        ("layer", "plan"),
        ("axis", "tight"),
        ("phase", "tight"),
        ("message", "tight"),
        ("count", "num"),
        ("bytes", "num"),
    )
    inside = table(heads, rows[:MOST_MESSAGES], caption="Messages inside of layers")
    more = [f"{len(rows) - MOST_MESSAGES} more messages are left out"] if len(rows) > MOST_MESSAGES else []
    return join(
        tag("h3", "Between stages"),
        transfers if cuts.transfers else tag("p", "One stage: nothing is sent between stages."),
        tag("h3", "Inside of layers"),
        inside if rows else tag("p", "No layer is split over ranks."),
        tag("p", ". ".join([*cuts.notes, *more]) + ".", class_="note") if cuts.notes or more else None,
    )


def _fusion(view: GraphView, cluster: Cluster | None) -> Html:
    text = fusion_text(view, cluster).removeprefix("fusion: ")
    lead = tag("p", text[0].upper() + text[1:] + ".")
    if not view.chains:
        return lead
    sums: dict[str, tuple[int, float]] = {}
    for chain in view.chains:
        name = chain_name(view, chain.operators)
        count, size = sums.get(name, (0, 0.0))
        sums[name] = count + 1, size + chain.bytes.at(view.samples)
    ordered = sorted(sums.items(), key=lambda row: -row[1][1])
    heads = [("chain", "plan"), ("count", "num"), ("bytes", "num")]
    rows: list[list[Content]] = [
        [tag("code", name), k, format_bytes(size)] for name, (k, size) in ordered[:MOST_CHAINS]
    ]
    if cluster is not None:
        heads.append(("time", "num"))
        for row, (_, (_, size)) in zip(rows, ordered, strict=False):
            row.append(format_seconds(size / cluster.device.bandwidth))
    note = (
        "A value inside of a chain stays in registers: it is not written and not read again. A value that the backward "
        "needs, or that an operator outside of the chain reads, is still written."
    )
    more = f" {len(ordered) - MOST_CHAINS} other kinds of chains are left out." if len(ordered) > MOST_CHAINS else ""
    return join(lead, table(heads, rows, caption="Elementwise chains"), tag("p", note + more, class_="note"))


def _operators(view: GraphView) -> Html:
    drawn: list[Html] = []
    rows = left_out = 0
    for k, node in enumerate(view.nodes):
        if rows + len(node.operators) > MOST_OPERATORS and rows:
            left_out += 1
            continue
        rows += len(node.operators)
        drawn.append(_details(view, node, k))
    note = f"{left_out} nodes are left out; `--layer NAME` shows one." if left_out else ""
    return join(*drawn, tag("p", note, class_="note") if note else None)


def _details(view: GraphView, node: GraphNode, k: int) -> Html:
    heads = (("operator", "tight"), ("module", "plan"), ("work", "num"), ("depth", "num"), ("moved", "num"))
    n, flow = view.samples, view.flow
    rows: list[list[Content]] = [
        [
            tag("code", cut(flow.operators[i].name, 34)),
            cut(flow.operators[i].module, 44),
            format_count(flow.operators[i].flops.at(n), "FLOP"),
            f"{flow.operators[i].depth:g}",
            format_bytes(flow.operators[i].bytes.at(n)),
        ]
        for i in node.operators
    ]
    named = [f"{format_bytes(e.bytes)} from {source_name(view, e)}" for e in node.edges]
    rest = [f"{len(named) - MOST_SOURCES} other nodes"] if len(named) > MOST_SOURCES else []
    inputs = ", ".join([*named[:MOST_SOURCES], *rest]) or "nothing"
    more = f" Of the first of {node.repeats} equal ones." if node.repeats > 1 else ""
    tied = f" Also reads {', '.join(node.tied[:8])}, which an earlier layer reads." if node.tied else ""
    count = len(node.operators)
    return tag(
        "details",
        tag("summary", f"{node_title(node)}: {count} operator{'s' if count != 1 else ''}"),
        tag("p", f"Reads {inputs}.{tied}{more}", class_="note"),
        table(heads, rows, caption=f"Operators of node {k + 1}"),
    )


def _footer(view: GraphView) -> Html:
    from .. import __version__

    return tag("footer", tag("p", f"Drumline {__version__}. The data flow was traced; nothing was computed."))
