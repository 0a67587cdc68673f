"""The tables at the end of the page: the plan and its alternatives, the model by layer, the cluster."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from ..clusters import Cluster, Link
from ..core.units import format_bytes, format_count, format_rate, format_seconds
from ..models.profile import COMPUTE_KINDS, Layer, Profile
from ..planner.answer import Answer
from ..plans.plan import Plan
from .markup import Content, Html, cut, join, names, table, tag
from .page_style import data_table

MOST_CANDIDATES = 30
MOST_LAYERS = 100
TIMES = "\u00d7"

MEANING = {
    "dp": "data-parallel replicas: each computes its share of the batch",
    "shard": "replicas that share one sharded copy",
    "zero": "what is sharded: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters",
    "tp": "tensor-parallel ranks: each has a slice of every large matrix",
    "cp": "context-parallel ranks: each has a part of the sequence",
    "ep": "expert-parallel ranks",
    "pp": "pipeline stages",
    "virtual": "pipeline stages per rank",
    "split": "layers that begin a stage",
    "schedule": "the order of forwards and backwards in the pipeline",
    "micro": "micro-batches per step",
    "tile": "spatial tiles of an image",
    "halo": "whether tiles exchange border rows with their neighbours",
    "recompute": "activations recomputed in the backward instead of stored",
    "offload": "states kept in host memory",
    "chunk": "pieces in which the largest layers are computed",
    "precision": "the compute type",
    "sync": "how replicas synchronize",
    "allreduce": "the all-reduce algorithm for gradients",
    "backend": "the transport",
    "compress": "gradient compression",
    "bucket": "bytes of gradients per message",
    "compile": "whether blocks are compiled",
}
"""The meaning of each key of a plan, in a line."""


def plan_section(plan: Plan, answer: Answer | None, why: str = "") -> Html:
    """The plan's limits (`why`), its keys, and the candidates that it was chosen from, or compared with."""
    chosen = answer is not None and _same(str(answer.best.plan), plan)
    about = join(tag("h3", "What limits this plan"), tag("p", why)) if why and not chosen else None
    return join(about, plan_keys(plan), _answer(plan, answer))


def plan_keys(plan: Plan) -> Html:
    """The plan in words: how it arranges ranks, whether it is exact, and its keys."""
    set_here = plan.table()
    rows: list[list[Content]] = [
        [
            tag("code", k),
            tag("code", cut(_word(v), 60)),
            MEANING.get(k, "") + (f": {format_bytes(v)}" if k == "bucket" else ""),
        ]
        for k, v in set_here.items()
    ]
    rest = [f"{f.name}={_word(getattr(Plan(), f.name))}" for f in dataclasses.fields(Plan) if f.name not in set_here]
    keys = table((("key", "tight"), ("value", "tight"), ("meaning", "wide")), rows, caption="The keys of the plan")
    exact = (
        "exact: it computes what one device would, up to rounding"
        if plan.exact
        else "approximate: its result differs from that of one device by more than rounding"
    )
    layout = f"arranges the ranks as {plan.mesh}" if plan.ranks > 1 else "runs on one rank"
    lead = tag("p", names(str(plan)), f" {layout}. It is {exact}.")
    defaults = tag("p", "At their defaults: ", tag("code", ", ".join(rest)), ".", class_="note")
    return join(lead, keys, defaults)


def _answer(plan: Plan, answer: Answer | None) -> Html:
    if answer is None:
        return tag("p", "The plan was given, not searched for: no candidates to compare it with.", class_="note")
    chosen = _same(str(answer.best.plan), plan)
    own = next((c for c in answer.candidates if _same(str(c.plan), plan)), None)
    margin = f"This run's plan was given. The best candidate is {answer.best.plan}. Next to it, the given plan: "
    return join(
        tag("p", f"{margin}{own.reason if own else 'not among the candidates'}.") if not chosen else None,
        tag("h3", "Why this plan" if chosen else f"Why {answer.best.plan} is the best candidate"),
        tag("p", answer.explanation) if answer.explanation else None,
        candidate_table(answer, plan, whose="This run's plan", rest_in="answer.json"),
    )


def candidate_table(answer: Answer, plan: Plan, *, whose: str, rest_in: str = "") -> Html:
    """The best candidates, and `plan` among them, with their reasons. `whose` names the plan that is highlighted,
    `rest_in` the file that has the others."""
    candidates = answer.candidates
    chosen = next((i for i, c in enumerate(candidates) if _same(str(c.plan), plan)), -1)
    shown = list(enumerate(candidates))[:MOST_CANDIDATES]
    if chosen >= MOST_CANDIDATES:
        shown.append((chosen, candidates[chosen]))
    longest = max((c.step_seconds for _, c in shown), default=0.0)
    rows: list[list[Content]] = []
    for i, c in shown:
        rows.append(
            [
                i + 1,
                names(str(c.plan)),
                format_seconds(c.step_seconds),
                _bar(c.step_seconds, longest),
                format_bytes(c.memory_bytes),
                tag("span", "✓ fits", class_="good") if c.fits else tag("span", "✗ too large", class_="poor"),
                cut(c.reason, 160),
            ]
        )
    heads = (
        ("", "num"),
        ("plan", "plan"),
        ("step", "num"),
        ("", "extra"),
        ("memory", "num right"),
        ("", "tight fit"),
        ("reason", "wide"),
    )
    marked = next((k for k, (i, _) in enumerate(shown) if i == chosen), -1)
    rest = len(candidates) - len(shown)
    fit = sum(c.fits for c in candidates)
    note = f"{len(candidates)} candidates in {format_seconds(answer.seconds)}; {fit} of them fit."
    where = f"are in {rest_in}" if rest_in else "are not listed"
    note += f" {rest} more {where}." if rest else ""
    note += f" {whose} is highlighted." if marked >= 0 else f" {whose} is not among them."
    return join(
        table(heads, rows, caption="Candidates, best first", marked=marked, class_="stack"),
        tag("p", note, class_="note"),
    )


def _same(text: str, plan: Plan) -> bool:
    return text.replace(" ", "") == str(plan)


def _word(value: object) -> str:
    if isinstance(value, list | tuple):
        return "+".join(map(str, value)) if value and isinstance(value[0], str) else "x".join(map(str, value)) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _bar(value: float, most: float) -> Html:
    share = f"{100 * value / most:.1f}%" if most > 0 else "0%"
    return tag(
        "svg",
        tag("rect", x=0, y=2, width=share, height=8, class_="bar"),
        width=72,
        height=12,
        class_="inline",
        aria_hidden="true",
    )


# ---- model


def model_section(profile: Profile) -> Html:
    """The layers in execution order; equal neighbours are one row."""
    groups = list(_folded(profile))
    work = profile.flops().at(1)
    rows: list[list[Content]] = []
    for layer, called, n in groups[:MOST_LAYERS]:
        flops = n * layer.flops().at(1)
        rows.append(
            [
                join(tag("code", cut(called, 44)), f" {TIMES} {n}" if n > 1 else None),
                cut(layer.kind, 28),
                f"{n * (layer.parameters + layer.frozen):,}",
                format_count(flops, "FLOP") if flops else "-",
                _bar(flops, work),
                format_bytes(n * layer.saved.at(1)),
            ]
        )
    saved = sum(x.saved.at(1) * x.repeats for x in profile.layers)
    total: list[Content] = [
        "all",
        "",
        f"{profile.parameters:,}",
        format_count(work, "FLOP") if work else "-",
        "",
        format_bytes(saved),
    ]
    heads = (
        ("layer", "plan"),
        ("kind", "extra"),
        ("parameters", "num"),
        ("work", "num"),
        ("", "extra"),
        ("saved", "num"),
    )
    frozen = profile.parameters - profile.trained
    lead = (
        f"{profile.name}: {_count(profile.parameters)} parameters"
        f"{f', {_count(frozen)} of them frozen' if frozen else ''}, trained by {profile.optimizer} with "
        f"{profile.state_per_parameter:g} bytes of state each. {_SOURCE.get(profile.origin, '')}"
    )
    note = "For one sample. Work is forward and backward; saved is what the forward keeps for the backward."
    if len(groups) > MOST_LAYERS:
        note += f" {len(groups) - MOST_LAYERS} more rows are in profile.json."
    return join(
        tag("p", lead, class_="lead"),
        table(heads, rows, caption="The model by layer", total=total),
        tag("p", " ".join((note, *profile.notes)), class_="note"),
    )


def _count(n: int) -> str:
    return f"{n}" if n < 1000 else format_count(n)


_SOURCE = {"traced": "Traced on fake tensors.", "formula": "From formulas."}


def _folded(profile: Profile) -> Iterator[tuple[Layer, str, int]]:
    """(layer, names, count), neighbours that differ only in name as one."""
    run: list[Layer] = []

    def closed() -> tuple[Layer, str, int]:
        n = sum(x.repeats for x in run)
        first, last = run[0].name or "(the model itself)", run[-1].name
        if n > 1:
            tail = re.sub(r"(\d+)(?!.*\d)", lambda m: str(int(m[1]) + run[-1].repeats - 1), last)
            first = f"{first} … {tail}" if tail != first else first
        return run[0], first, n

    for layer in profile.layers:
        if run and _nameless(layer) != _nameless(run[0]):
            yield closed()
            run = []
        run.append(layer)
    if run:
        yield closed()


def _nameless(layer: Layer) -> Layer:
    return dataclasses.replace(layer, name="", repeats=1)


# ---- cluster


def _link_rows(cluster: Cluster, where: str, link: Link, key: str) -> list[list[Content]]:
    rows: list[list[Content]] = [
        [f"{where}: alpha", format_seconds(link.alpha), cluster.origin_of(f"{key}.alpha")],
        [f"{where}: bandwidth", format_rate(link.bandwidth), cluster.origin_of(f"{key}.bandwidth")],
    ]
    if link.logp:
        rows.append([f"{where}: LogP", str(link.logp), cluster.origin_of(f"{key}.logp")])
    return rows


def cluster_section(cluster: Cluster) -> Html:
    """Every number of the cluster with its origin; measured curves and tables as ranges, folded."""
    d = cluster.device
    rows: list[list[Content]] = [
        ["memory per rank", format_bytes(d.memory), cluster.origin_of("device.memory")],
        ["memory bandwidth", format_rate(d.bandwidth), cluster.origin_of("device.bandwidth")],
    ]
    rows += [[f"peak {k}", format_count(v, "FLOP/s"), cluster.origin_of(f"device.peak.{k}")] for k, v in d.peak.items()]
    rows += [
        ["launch of an operator", format_seconds(d.launch), cluster.origin_of("device.launch")],
        ["used by the framework", format_bytes(d.context), cluster.origin_of("device.context")],
        *_link_rows(cluster, "link in a node", cluster.node.link, "node.link"),
    ]
    if cluster.network:
        rows += _link_rows(cluster, "link between nodes", cluster.network.link, "network.link")
    rows += [
        ["communication hidden by computation", f"{100 * cluster.overlap:.0f}%", cluster.origin_of("overlap")],
        ["spread of measurements", f"{100 * cluster.measurement_spread:.1f}%", cluster.origin_of("measurement_spread")],
    ]
    nodes = cluster.network.nodes if cluster.network else 1
    lead = (
        f"{cluster.name}: {cluster.devices} {TIMES} {d.name} in {nodes} {'node' if nodes == 1 else 'nodes'} "
        f"of {cluster.node.devices}."
    )
    numbers, measured = _numbers_table(rows, "The numbers of the cluster"), _measured_rows(cluster)
    if not measured:
        return join(tag("p", lead, class_="lead"), numbers)
    title = f"{len(measured)} measured curves and tables"
    return join(tag("p", lead, class_="lead"), numbers, data_table(_numbers_table(measured, title), title=title))


def _numbers_table(rows: list[list[Content]], caption: str) -> Html:
    heads = (("", "plan"), ("value", "num"), ("origin", "wide"))
    cells = [[row[0], row[1], cut(str(row[2]), 80)] for row in rows]
    return table(heads, cells, caption=caption, class_="stack two")


def _measured_rows(cluster: Cluster) -> list[list[Content]]:
    """Curves of kernels and tables of collectives, each as a range."""
    rows: list[list[Content]] = []
    for c in cluster.device.curve:
        unit = "FLOP/s" if c.kernel in COMPUTE_KINDS else "B/s"
        name = f"{c.kernel}, {c.dtype}: {len(c.sizes)} sizes"
        rows.append([name, _range(c.rates, unit), cluster.origin_of("device.curve")])
    for t in cluster.collective:
        sizes = f"{format_bytes(t.bytes[0])} to {format_bytes(t.bytes[-1])}"
        seconds = f"{format_seconds(t.seconds[0])} to {format_seconds(t.seconds[-1])}"
        name = f"{t.collective} of {t.ranks} ranks over {t.transport}: {sizes}"
        rows.append([name, seconds, cluster.origin_of("collective")])
    return rows


def _range(rates: tuple[float, ...], unit: str) -> str:
    low, high = format_count(min(rates), unit), format_count(max(rates), unit)
    return low if low == high else f"{low} to {high}"
