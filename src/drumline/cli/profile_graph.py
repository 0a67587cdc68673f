"""`drumline profile --graph`: the data flow of a model, and where a plan cuts it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..core.errors import InputError
from .common import measuring, print_json, warn

if TYPE_CHECKING:
    from ..clusters import Cluster
    from ..models import Profile
    from ..reports.graph_view import GraphView


@dataclass(frozen=True, slots=True)
class GraphOptions:
    """Options of the graph; None where not given."""

    depth: int | None
    layer: str | None
    plan: str | None
    cluster: str | None
    page: str | None

    def refuse_without_graph(self) -> None:
        """Refuse them where no graph is asked for."""
        for name in ("depth", "layer", "plan", "cluster", "page"):
            if getattr(self, name) is not None:
                raise InputError(f"--{name} without --graph", rule=f"--{name} is an option of the graph", fix="--graph")


def show_graph(target: str, options: GraphOptions, samples: int | None, output: str | None, *, as_json: bool) -> None:
    """Print the graph, or its JSON document; write its page and the profile if asked to."""
    from ..core import files
    from ..loop.profile import profile as trace
    from ..reports.console import console
    from ..reports.graph_text import graph_document

    if options.depth is not None and options.layer is not None:
        raise InputError("--depth and --layer", rule="a layer is shown operator by operator", fix="leave out --depth")
    if options.plan is not None and samples is not None:
        raise InputError("--samples and --plan", rule="a plan decides the samples of a micro-batch: change micro or dp")
    model = trace(target, data_flow=True)
    view, cluster = _view(target, model, options, samples, as_json=as_json)
    if output:
        model.save(output)
    if options.page:
        from ..reports.graph_page import graph_page

        files.write_text(options.page, graph_page(view, cluster))
    if as_json:
        print_json({"graph": graph_document(view, cluster)} | ({"page": options.page} if options.page else {}))
        return
    out = console()
    for line in _lines(view, cluster, out.width):
        out.print(line)
    for path in filter(None, (output, options.page)):
        out.print(f"written to {path}")


def _view(
    target: str, model: Profile, options: GraphOptions, samples: int | None, *, as_json: bool
) -> tuple[GraphView, Cluster | None]:
    from ..costs.fusion import fused_chains
    from ..costs.graph_cuts import graph_cuts
    from ..loop.inputs import load_cluster, load_plan
    from ..plans import check
    from ..reports.graph_view import graph_view

    if (flow := model.data_flow) is None:
        made = "written without --graph" if model.origin == "traced" else "made by formula, not traced"
        raise InputError(
            f"{target} has no data flow: it was {made}",
            rule="the graph comes from a trace of a job",
            fix="give a job (path.py), or write the profile again with --graph -o",
        )
    chosen = load_plan(options.plan) if options.plan else None
    if chosen is not None:
        check(chosen)
    cluster: Cluster | None = None
    if options.cluster or chosen is not None:
        with measuring(quiet=as_json) as progress:
            cluster, _ = load_cluster(options.cluster, notify=warn, progress=progress)
    else:
        cluster = _measured_here()
    cuts = graph_cuts(model, flow, chosen, cluster) if chosen is not None and cluster is not None else None
    n = cuts.samples if cuts and samples is None else samples or model.batch_size
    depth = 1 if options.depth is None else options.depth
    chains = fused_chains(flow)
    return graph_view(model, flow, chains, n=n, depth=depth, layer=options.layer, cuts=cuts), cluster


def _measured_here() -> Cluster | None:
    """This machine, if it was measured before."""
    from ..clusters import Cluster
    from ..loop.measure import machine_file

    path = machine_file(None)
    return Cluster.load(path) if path.exists() else None


def _lines(view: GraphView, cluster: Cluster | None, width: int) -> list[str]:
    from ..reports.console import wrap
    from ..reports.graph_text import chain_lines, graph_lines, graph_totals

    n = view.samples
    what = f", the operators of {view.layer or '(model)'}" if view.layer else ""
    under = f", a micro-batch of {view.cuts.plan}" if view.cuts else ""
    head = f"{view.profile.name}: data flow of the forward, {n:g} sample{'s' if n != 1 else ''}{under}{what}"
    lines = [*wrap(head, width), "", *graph_lines(view, width=width), ""]
    for text in graph_totals(view, cluster):
        lines += wrap(text, width, indent=2)
    for text in chain_lines(view):
        lines += wrap(text, width, indent=4)
    for note in (*(view.cuts.notes if view.cuts else ()), *view.profile.notes):
        lines += wrap(f"note: {note}", width, indent=2)
    return lines
