"""One self-contained HTML page about a run: predicted and measured numbers, timelines, and why this plan."""

from __future__ import annotations

import math
import shlex
from datetime import datetime
from pathlib import Path

from ..core import files
from ..core.units import format_bytes, format_count, format_seconds
from .markup import Content, Html, cut, join, names, tag
from .page_sections import cluster_section, model_section, plan_section
from .page_style import html_document
from .prediction_error import MEMORY_PARTS, level, memory_table, ordered, time_table, time_unit, verdict
from .run import Run
from .svg_charts import line_chart, memory_bars
from .svg_timeline import PATTERN, timelines

PAGE = "report.html"
"""The name of the page in a run folder."""


def write_page(run: Run, path: str | Path) -> Path:
    """Write the page to a file, or into a folder under its usual name; returns the file."""
    path = Path(path)
    path = path / PAGE if path.is_dir() else path
    files.write_text(path, page(run))
    return path


def page(run: Run) -> Html:
    """The whole document."""
    sections = (
        ("Numbers", "Predicted and measured", _numbers(run)),
        ("Timeline", "One step, rank by rank", _timeline(run)),
        ("Memory", "Memory of the fullest rank", _memory(run)),
        ("Steps", "Loss and step time", _history(run)),
        ("Plan", "The plan, and why it won" if run.answer else "The plan", plan_section(run)),
        ("Model", "The model", model_section(run.profile)),
        ("Cluster", "The cluster", cluster_section(run.cluster)),
    )
    main = tag(
        "main",
        *(
            tag(
                "section",
                tag("h2", title, id=f"title-{key.lower()}"),
                inside,
                id=key.lower(),
                aria_labelledby=f"title-{key.lower()}",
            )
            for key, title, inside in sections
        ),
    )
    header = _headline(run, [key for key, _, _ in sections])
    return html_document(f"{run.name}: {run.plan}", PATTERN, header, main, _footer(run))


# ---- headline


def _headline(run: Run, sections: list[str]) -> Html:
    facts: list[tuple[str, Html]] = [
        ("Plan", join(names(str(run.plan), 200), f" on {_ranks(run.ranks)} ({run.device})")),
        ("Job", join(tag("code", cut(run.job, 80)), " ", tag("span", f"sha256 {run.digest[:12]}", class_="lead"))),
        ("Started", tag("time", _date(run.started), datetime=run.started)),
        ("Machine", cut(run.machine, 160)),
        ("Command", tag("code", cut(shlex.join(run.command), 400))),
    ]
    if run.failure:
        facts.insert(0, ("Failed", tag("strong", f"{_stopped_after(run)}: {cut(run.failure, 600)}")))
    if run.faults:
        facts.insert(1, (f"Survived {len(run.faults)}", tag("ul", *(tag("li", cut(f, 200)) for f in run.faults[:20]))))
    return tag(
        "header",
        tag("h1", tag("b", cut(run.name, 60)), " · ", cut(run.profile.name, 40), f" · batch of {run.batch_size}"),
        tag("p", verdict(run).replace(" ms", "\u00a0ms"), class_="verdict"),
        tag("dl", *((tag("dt", key), tag("dd", value)) for key, value in facts), class_="facts"),
        tag("nav", *(tag("a", key, href=f"#{key.lower()}") for key in sections), aria_label="Sections"),
    )


def _stopped_after(run: Run) -> str:
    return f"after step {run.steps[-1].step + 1}" if run.steps else "before the first step"


def _ranks(n: int) -> str:
    return "1 rank" if n == 1 else f"{n} ranks"


def _date(text: str) -> str:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return text
    return f"{moment.day} {moment:%B %Y, %H:%M} {moment.tzname() or ''}".rstrip()


# ---- numbers


def _numbers(run: Run) -> Html:
    e = run.estimate
    bound = ""
    if e.error and run.time_error is not None:
        bound = f"{'within' if abs(run.time_error) <= e.error else 'outside'} the stated error of ±{100 * e.error:.0f}%"
    work = 0.0
    if run.step_seconds:
        work = run.profile.flops().at(run.batch_size) / run.step_seconds
    used = f"{100 * (run.peak_bytes or e.memory_bytes) / e.memory_limit:.1f}% of the limit" if e.memory_limit else ""
    cards = tag(
        "div",
        _card(
            "Step time",
            format_seconds(run.step_seconds) if run.step_seconds else _NONE,
            ["predicted ", format_seconds(e.step_seconds), " ", level(run.time_error, "too fast", "too slow")],
            bound,
        ),
        _card(
            "Peak memory of a rank",
            format_bytes(run.peak_bytes) if run.peak_bytes else _NONE,
            ["predicted ", format_bytes(e.memory_bytes), " ", level(run.memory_error, "too low", "too high")],
            used,
        ),
        _card(
            "Throughput",
            _rate(run.batch_size, run.step_seconds) or _NONE,
            f"predicted {_rate(run.batch_size, e.step_seconds) or 'nothing'}",
            f"{format_count(work, 'FLOP/s')} over {_ranks(run.ranks)}" if work else "",
        ),
        *_bubble(run),
        class_="cards",
    )
    origin = f"The prediction comes from {e.origin}." if e.origin else ""
    corrected = f"It is {e.correction}; {format_seconds(e.raw_seconds)} without." if e.raw_seconds else ""
    lines = [x for x in (origin, corrected, *e.notes) if x]
    notes = tag("p", " ".join(lines), class_="note") if lines else None
    return join(cards, time_table(run), notes, _not_split(run))


def _bubble(run: Run) -> list[Html]:
    """The share of a pipeline's time in which ranks wait, measured and predicted."""
    shares = {k: f"{100 * v:.1f}%" for k, v in run.division.bubble.items()} if run.division else {}
    if "measured" not in shares:
        return []
    order = f"{shares['order']} if messages took no time" if "order" in shares else ""
    return [_card("Pipeline bubble", shares["measured"], f"predicted {shares.get('predicted', _NONE)}", order)]


def _not_split(run: Run) -> Html | None:
    """The operators and parameters that the plan could not split."""
    lines = run.division.lines() if run.division else []
    return tag("p", ". ".join(lines) + ".", class_="note") if lines else None


_NONE = "not measured"


def _rate(samples: int, seconds: float) -> str:
    return f"{format_count(samples / seconds)} samples/s" if seconds else ""


def _card(title: str, big: str, *lines: Content) -> Html:
    text = [tag("p", x) for x in lines if x]
    return tag("div", tag("h3", title), tag("div", big, class_="big"), text, class_="card")


# ---- timeline, memory, history


def _timeline(run: Run) -> Html:
    lead = "Predicted above, measured below, on the same time scale. Hatched is idle."
    if run.measured is None:
        lead = "No step was recorded in this run: this is the prediction only. Hatched is idle."
    return join(tag("p", lead, class_="lead"), timelines(run.predicted, run.measured))


def _memory(run: Run) -> Html:
    e = run.estimate
    bars = [("Predicted", ordered(e.memory_parts, MEMORY_PARTS), e.memory_bytes)]
    if run.peak_bytes:
        bars.append(("Measured", ordered(run.memory_parts, MEMORY_PARTS) or {"other": run.peak_bytes}, run.peak_bytes))
    most = max(total for _, _, total in bars)
    host = (
        tag(
            "p",
            f"Predicted host memory: {format_bytes(e.host_bytes)} of {format_bytes(e.host_limit)} per rank.",
            class_="note",
        )
        if e.host_bytes
        else None
    )
    if most <= 0:
        return tag("p", "Memory was neither predicted nor measured.", class_="lead")
    share = f"The limit of {format_bytes(e.memory_limit)} is "
    if e.memory_limit > 1.6 * most:
        lead = f"{share}{e.memory_limit / most:.1f} times the larger bar, too far right to draw: it fits."
    elif e.memory_limit >= most:
        lead = f"{share}{format_bytes(e.memory_limit - most)} above the larger bar: it fits."
    else:
        lead = f"{share}{format_bytes(most - e.memory_limit)} below the larger bar: it does not fit."
    return join(
        tag("p", lead, class_="lead"), tag("figure", memory_bars(bars, e.memory_limit)), memory_table(run), host
    )


def _history(run: Run) -> Html:
    if not run.steps:
        return tag("p", "No step was taken.", class_="lead")
    loss = [(s.step, s.loss, f"step {s.step}\nloss {s.loss:.5g}, gradient norm {s.grad_norm:.4g}") for s in run.steps]
    time = [(s.step, s.seconds, f"step {s.step}\n{format_seconds(s.seconds)}, {s.samples} samples") for s in run.steps]
    levels = [(run.estimate.step_seconds, "guess")]
    if run.step_seconds:
        levels.append((run.step_seconds, "middle"))
    unit, scale = time_unit(run.step_seconds or run.estimate.step_seconds or 1.0)
    longest = max(run.steps, key=lambda s: s.seconds)
    legend = tag(
        "ul",
        tag("li", tag("span", class_="key guess"), "predicted"),
        tag("li", tag("span", class_="key"), "measured median after warm-up") if run.step_seconds else None,
        tag("li", f"longest: step {longest.step}, {format_seconds(longest.seconds)}"),
        class_="legend",
    )
    charts = tag(
        "div",
        tag(
            "figure",
            tag("h3", "Loss ", tag("small", _from_to(run))),
            line_chart("Loss over the steps", loss, form=lambda v: f"{v:.4g}"),
        ),
        tag(
            "figure",
            tag("h3", "Step time ", tag("small", f"in {unit}")),
            line_chart("Step time over the steps", time, form=lambda v: f"{v / scale:.4g}", levels=levels, zero=True),
            legend,
        ),
        class_="charts",
    )
    broken = next((s for s in run.steps if not math.isfinite(s.loss)), None)
    warning = tag("p", f"The loss is not finite from step {broken.step} on: {broken.loss}.") if broken else None
    metrics = (
        tag("dl", *((tag("dt", cut(k)), tag("dd", f"{v:.6g}")) for k, v in run.evaluation.items()), class_="facts")
        if run.evaluation
        else None
    )
    return join(warning, charts, tag("h3", "Evaluation") if metrics else None, metrics)


def _from_to(run: Run) -> str:
    first, last = run.steps[0], run.steps[-1]
    return f"{first.loss:.4g}" if first is last else f"from {first.loss:.4g} to {last.loss:.4g}"


def _footer(run: Run) -> Html:
    versions = ", ".join(f"{k} {v}" for k, v in sorted(run.versions.items()))
    return tag("footer", tag("p", f"Drumline report. {versions}."))
