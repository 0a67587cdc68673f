"""One self-contained HTML page about a search: the answer, its reasons, the strategy space, what would change."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..core import files
from ..core.units import format_bytes, format_count, format_seconds
from ..costs.estimate import Estimate, Throughput, mfu_text
from ..costs.typical_rates import with_typical_rates
from ..planner.bottlenecks import DEPENDS_ON, bottlenecks
from ..planner.explain import explain_plan, reason
from ..planner.objectives import OBJECTIVES
from .markup import Content, Html, cut, join, names, swatch, table, tag
from .page_sections import candidate_table, cluster_section, model_section, plan_keys
from .page_style import data_table, html_document, navigation, section
from .plan_charts import pareto_section, scaling_section, space_section
from .plan_report import PlanReport
from .prediction_error import MEMORY_PARTS, ordered
from .roofline_section import roofline_section
from .step_parts import PARTS
from .svg_bars import BarRow, bar_rows
from .svg_charts import memory_bars
from .svg_timeline import PATTERN

PLAN_PAGE = "plan.html"
"""The name of the page in a folder."""
_PARTS = (*PARTS, "bubble", "waiting")


def write_plan_page(report: PlanReport, path: str | Path) -> Path:
    """Write the page to a file, or into a folder under its usual name; returns the file."""
    path = Path(path)
    path = path / PLAN_PAGE if path.is_dir() else path
    files.write_text(path, plan_page(report))
    return path


def plan_page(report: PlanReport) -> Html:
    """The whole document."""
    sections: list[tuple[str, str, Html | None]] = [
        ("Answer", "The best plan", _answer(report)),
        ("Why", "Why this one, and why the alternatives lose", _why(report)),
        ("Space", "The strategy space", space_section(report)),
        ("Pareto", "Time against memory", pareto_section(report)),
        ("Scaling", "More and fewer devices", scaling_section(report)),
        ("Memory", "Memory of the fullest device", _memory(report)),
        ("Roofline", "The operators under the roofline", _roofline(report)),
        ("Candidates", "The candidates", candidate_table(report.answer, report.best, whose="The best plan")),
        ("Model", "The model", model_section(report.profile) if report.profile else None),
        ("Cluster", "The cluster", cluster_section(report.cluster) if report.cluster else None),
    ]
    shown = [(key, title, inside) for key, title, inside in sections if inside is not None]
    main = tag("main", *(section(*x) for x in shown))
    name = report.profile.name if report.profile else "plan"
    footer = tag("footer", tag("p", "Drumline plan. Nothing was run: every number is predicted."))
    return html_document(f"{name}: {report.best}", PATTERN, _header(report, [key for key, _, _ in shown]), main, footer)


def _header(report: PlanReport, sections: list[str]) -> Html:
    answer, best, p, c = report.answer, report.answer.best, report.profile, report.cluster
    title: list[Content] = [tag("b", cut(p.name, 60) if p else "Plan")]
    title += [f" · batch of {p.batch_size}"] if p else []
    title += [" · ", f"{c.devices} \u00d7 ", cut(c.device.name, 40)] if c else []
    facts: list[tuple[str, Content]] = [("Plan", names(str(best.plan), 200))]
    if c:
        facts.append(("Cluster", join(cut(c.name, 60), f": {best.plan.ranks} of {c.devices} devices in use")))
    facts.append(("Objective", OBJECTIVES[answer.objective]))
    facts.append(("Search", f"{answer.scored or len(answer.candidates):,} plans in {format_seconds(answer.seconds)}"))
    if answer.scored_by:
        facts.append(("Scored by", answer.scored_by))
    if answer.interrupted:
        facts.insert(0, ("Interrupted", tag("strong", "the search was stopped: a better plan may be missing")))
    return tag(
        "header",
        tag("h1", *title),
        tag("p", f"{format_seconds(best.step_seconds)} a step: {best.reason}.", class_="verdict"),
        tag("p", answer.idle) if answer.idle else None,
        tag("dl", *((tag("dt", key), tag("dd", value)) for key, value in facts), class_="facts"),
        navigation(sections),
    )


# ---- the answer


def _answer(report: PlanReport) -> Html:
    best, e, p = report.answer.best, report.estimate, report.profile
    cards = [_card("Step time", format_seconds(best.step_seconds), f"±{100 * e.error:.0f}%" if e and e.error else "")]
    limit = f"{100 * e.memory_bytes / e.memory_limit:.0f}%: {e.memory_text}" if e else ""
    cards.append(_card("Memory of a device", format_bytes(best.memory_bytes), limit))
    if p:
        rate = f"{format_count(p.batch_size / best.step_seconds)} samples/s"
        t = Throughput.of(p, best.plan, report.cluster, best.step_seconds) if report.cluster else None
        tokens = f"{format_count(t.tokens_per_second)} tokens/s, " if t and t.tokens_per_second else ""
        cards.append(_card("Throughput of all devices", rate, f"{tokens}{p.batch_size} samples a step"))
    if p and e and report.cluster:
        limits = bottlenecks(p, best.plan, e, report.cluster)
        flops = format_count(t.flops_per_device, "FLOP/s") if t and t.flops_per_device else ""
        bound = f"{f'{flops} per device; ' if flops else ''}bound by {DEPENDS_ON[limits.first]}"
        cards.append(_card("MFU", mfu_text(t.mfu if t else None).removeprefix("MFU "), bound))
    parts = _parts(report.compared) if e else None
    return join(tag("div", *cards, class_="cards"), parts, _given(report), tag("h3", "Its keys"), plan_keys(best.plan))


def _given(report: PlanReport) -> Html | None:
    """The limits of the user's own plan, compared with the best."""
    e = report.estimates.get(str(report.given))
    if report.given is None or e is None or report.profile is None or report.cluster is None:
        return None
    text = explain_plan(report.profile, report.given, e, report.cluster)
    best = report.estimate
    margin = (
        reason(e, best, report.given, report.answer.objective) if best and e.plan != best.plan else "it is the best"
    )
    return join(tag("h3", "Your plan"), tag("p", text) if text else None, tag("p", f"Next to the best plan: {margin}."))


def _card(title: str, big: str, line: str) -> Html:
    return tag("div", tag("h3", title), tag("div", big, class_="big"), tag("p", line) if line else None, class_="card")


def _parts(known: Sequence[tuple[str, Estimate]]) -> Html:
    """The step by part, of one plan or of two."""
    best = known[0][1]
    bars = [
        BarRow(part, seconds, f"{format_seconds(seconds)}, {100 * seconds / best.step_seconds:.0f}%")
        for part, seconds in ordered(best.parts, _PARTS).items()
    ]
    keys = list(ordered({k: 1.0 for _, e in known for k, v in e.parts.items() if v}, _PARTS))
    rows: list[list[Content]] = [
        [join(swatch(k), k), *(format_seconds(e.parts.get(k, 0.0)) for _, e in known)] for k in keys
    ]
    heads = [("part", "tight"), *((name.lower(), "num") for name, _ in known)]
    total: list[Content] = ["step", *(format_seconds(e.step_seconds) for _, e in known)]
    numbers = table(heads, rows, caption="The step by part", total=total, class_="narrow")
    note = "Communication is the part that computation does not hide."
    if best.raw_seconds:
        note += f" The step is {best.correction}; {format_seconds(best.raw_seconds)} without."
    return join(
        tag("h3", "The step by part"),
        tag("figure", bar_rows("The step by part", bars, kind="backward", left=96)),
        tag("p", " ".join((note, *best.notes)), class_="note"),
        data_table(numbers) if len(known) == 1 else numbers,
    )


# ---- reasons


def _why(report: PlanReport) -> Html:
    answer = report.answer
    rows: list[list[Content]] = []
    for f in answer.families:
        changes = [tag("li", "becomes the fastest ", cut(change, 160)) for change in f.wins_if]
        best = [names(f.plan), format_seconds(f.step_seconds), format_bytes(f.memory_bytes)] if f.plan else [""] * 3
        rows.append([f.name, *best, join(cut(f.reason, 160), tag("ul", *changes) if changes else None)])
    heads = (
        ("family", "tight"),
        ("its best plan", "plan"),
        ("step", "num"),
        ("memory", "num right"),
        ("why it loses, and what would change that", "wide"),
    )
    caption = "The best plan of each family"
    families = join(tag("h3", caption), table(heads, rows, caption=caption, class_="stack"))
    return join(
        *(tag("p", part) for part in _paragraphs(answer.explanation)),
        families if rows else None,
    )


def _paragraphs(text: str, most: int = 420) -> list[str]:
    """A long explanation in paragraphs, cut after sentences."""
    parts = [""]
    for sentence in text.replace(". ", ".\0").split("\0"):
        if parts[-1] and len(parts[-1]) + len(sentence) > most:
            parts.append("")
        parts[-1] = f"{parts[-1]} {sentence}".strip()
    return parts


# ---- memory and roofline


def _memory(report: PlanReport) -> Html | None:
    e = report.estimate
    if e is None:
        return None
    both = report.compared
    bars = [(name, ordered(x.memory_parts, MEMORY_PARTS), x.memory_bytes) for name, x in both]
    keys = list(ordered({k: 1.0 for _, x in both for k, v in x.memory_parts.items() if v}, MEMORY_PARTS))
    rows: list[list[Content]] = [
        [join(swatch(k), k), *(format_bytes(x.memory_parts.get(k, 0.0)) for _, x in both)] for k in keys
    ]
    total: list[Content] = ["peak", *(format_bytes(x.memory_bytes) for _, x in both)]
    heads = [("part", "tight"), *((name.lower(), "num") for name, _ in both)]
    host = f"Host memory: {format_bytes(e.host_bytes)} of {format_bytes(e.host_limit)} {e.host_owner}."
    lead = f"At the moment of its peak, of what a device has for tensors: {e.memory_text}."
    return join(
        tag("p", f"{lead} {host}" if e.host_bytes else lead, class_="lead"),
        tag("figure", memory_bars(bars, e.memory_limit)),
        data_table(table(heads, rows, caption="Memory by part", total=total, class_="narrow")),
    )


def _roofline(report: PlanReport) -> Html | None:
    if report.profile is None or report.cluster is None:
        return None
    return roofline_section(
        report.profile, report.best, with_typical_rates(report.cluster).device, report.profile.batch_size
    )
