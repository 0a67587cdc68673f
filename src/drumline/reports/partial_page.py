"""The page of a run folder that is broken or half-written: what is there, and a line for each thing that is not."""

from __future__ import annotations

from pathlib import Path

from ..core import files
from ..core.units import format_bytes, format_seconds
from ..costs.estimate import Estimate
from .collective_section import collective_section
from .fault_section import fault_section
from .history_section import history_section
from .markup import Content, Html, cut, join, names, swatch, table, tag
from .page import PAGE, page, problem_list, timeline_section
from .page_sections import cluster_section, model_section, plan_section
from .page_style import html_document, navigation, section
from .partial_run import PartialRun
from .prediction_error import MEMORY_PARTS, ordered
from .step_parts import PARTS
from .svg_charts import memory_bars
from .svg_timeline import PATTERN
from .waiting_sections import waiting_parts


def write_partial_page(partial: PartialRun, path: str | Path) -> Path:
    """Write the page to a file, or into a folder under its usual name; returns the file."""
    path = Path(path)
    path = path / PAGE if path.is_dir() else path
    files.write_text(path, partial_page(partial))
    return path


def partial_page(partial: PartialRun) -> Html:
    """The page of the run if enough of it is there, else a section for each part that is."""
    run = partial.run
    if run is not None:
        return page(run, partial.problems)
    p = partial
    has_timeline = p.predicted is not None or p.measured is not None
    facts = p.facts
    sections: list[tuple[str, str, Html | None]] = [
        ("Steps", "Loss and step time", _history(p) if p.steps else None),
        (
            "Faults",
            "What happened to the run",
            fault_section(facts.get("faults", ()), facts.get("failure", ""), p.steps),
        ),
        *waiting_parts(p.steps),
        ("Timeline", "One step, rank by rank", timeline_section(p.predicted, p.measured) if has_timeline else None),
        ("Numbers", "Predicted", _prediction(p.estimate) if p.estimate else None),
        (
            "Collectives",
            "Collectives, measured and by the model",
            collective_section(p.cluster, p.predicted, p.measured) if p.cluster else None,
        ),
        ("Plan", "The plan", plan_section(p.plan, p.answer) if p.plan else None),
        ("Model", "The model", model_section(p.profile) if p.profile else None),
        ("Cluster", "The cluster", cluster_section(p.cluster) if p.cluster else None),
    ]
    shown = [(key, title, inside) for key, title, inside in sections if inside is not None]
    main = tag("main", *(section(*x) for x in shown))
    header = _header(p, [key for key, _, _ in shown])
    return html_document(p.name, PATTERN, header, main, tag("footer", tag("p", "Drumline report.")))


def _header(p: PartialRun, sections: list[str]) -> Html:
    rows: list[tuple[str, Content]] = [("Incomplete", problem_list(p.problems))]
    if p.plan is not None:
        rows.append(("Plan", names(str(p.plan), 200)))
    rows += [(key.capitalize(), cut(str(p.facts[key]), 160)) for key in ("job", "started", "machine") if key in p.facts]
    if p.facts.get("failure"):
        rows.insert(0, ("Failed", tag("strong", cut(str(p.facts["failure"]), 600))))
    return tag(
        "header",
        tag("h1", tag("b", cut(p.name, 60)), " · an incomplete run"),
        tag("p", _verdict(p), class_="verdict"),
        tag("dl", *((tag("dt", key), tag("dd", value)) for key, value in rows), class_="facts"),
        navigation(sections),
    )


def _verdict(p: PartialRun) -> str:
    """One sentence about what is there."""
    if not p.steps:
        return "No step can be read."
    last = p.steps[-1]
    steps = "1 step" if len(p.steps) == 1 else f"{len(p.steps)} steps"
    return f"{steps} can be read; the last took {format_seconds(last.seconds)} and has a loss of {last.loss:.4g}."


def _history(p: PartialRun) -> Html:
    return history_section(
        p.steps,
        predicted_seconds=p.estimate.step_seconds if p.estimate else 0.0,
        step_seconds=p.facts.get("step_seconds", 0.0),
        evaluation=p.facts.get("evaluation"),
    )


def _prediction(e: Estimate) -> Html:
    """The predicted parts of the step and of the memory."""
    rows: list[list[Content]] = [
        [join(swatch(k), k), format_seconds(v)] for k, v in ordered(e.parts, (*PARTS, "bubble", "waiting")).items()
    ]
    heads = (("part", "tight"), ("predicted", "num"))
    total: list[Content] = ["step", format_seconds(e.step_seconds)]
    parts = ordered(e.memory_parts, MEMORY_PARTS)
    bars = memory_bars([("Predicted", parts, e.memory_bytes)], e.memory_limit) if e.memory_bytes > 0 else None
    sizes: list[list[Content]] = [[join(swatch(k), k), format_bytes(v)] for k, v in parts.items()]
    return join(
        table(heads, rows, caption="The predicted step by part", total=total, class_="narrow"),
        tag("h3", "Memory"),
        tag("figure", bars) if bars else None,
        table(heads, sizes, caption="The predicted memory by part", class_="narrow"),
    )
