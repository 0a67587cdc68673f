"""One self-contained HTML page about a run: predicted and measured numbers, timelines, and why this plan."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from ..core import files
from ..core.timeline import Timeline
from ..core.units import format_bytes, format_count, format_seconds
from ..costs.estimate import mfu_text
from ..costs.typical_rates import with_typical_rates
from ..planner.explain import explain_plan
from .collective_section import collective_section
from .fault_section import fault_section
from .history_section import history_section
from .input_wait import input_sentence
from .markup import Content, Html, cut, join, names, tag
from .page_sections import cluster_section, model_section, plan_section
from .page_style import data_table, html_document, navigation, section
from .prediction_error import (
    MEMORY_PARTS,
    level,
    memory_in_words,
    memory_table,
    ordered,
    time_in_words,
    time_table,
    verdict,
)
from .roofline_section import roofline_section
from .run import Run
from .svg_charts import memory_bars
from .svg_timeline import PATTERN, parts_table, timelines
from .waiting_sections import waiting_parts

PageSection = tuple[str, str, Html | None]
"""Key, title, contents; a section without contents is left out."""
PAGE = "report.html"
"""The name of the page in a run folder."""


def write_page(run: Run, path: str | Path) -> Path:
    """Write the page to a file, or into a folder under its usual name; returns the file."""
    path = Path(path)
    path = path / PAGE if path.is_dir() else path
    files.write_text(path, page(run))
    return path


def page(run: Run, problems: Sequence[str] = ()) -> Html:
    """The whole document. `problems` say what is missing or damaged in the folder of the run."""
    history = history_section(
        run.steps,
        predicted_seconds=run.estimate.step_seconds,
        step_seconds=run.step_seconds,
        evaluation=run.evaluation,
    )
    sections: list[PageSection] = [
        ("Numbers", "Predicted and measured", _numbers(run)),
        ("Timeline", "One step, rank by rank", timeline_section(run.predicted, run.measured)),
        ("Memory", "Memory of the fullest rank", _memory(run)),
        ("Steps", "Loss and step time", history),
        ("Faults", "What happened to the run", fault_section(run.faults, run.failure, run.steps)),
        *waiting_parts(run.steps),
        ("Collectives", "Collectives, measured and by the model", _collectives(run)),
        ("Roofline", "The operators under the roofline", _roofline(run)),
        ("Plan", _plan_title(run), plan_section(run.plan, run.answer, _why(run))),
        ("Model", "The model", model_section(run.profile)),
        ("Cluster", "The cluster", cluster_section(run.cluster)),
    ]
    shown = [(key, title, inside) for key, title, inside in sections if inside is not None]
    header = _headline(run, [key for key, _, _ in shown], problems)
    main = tag("main", *(section(*x) for x in shown))
    return html_document(f"{run.name}: {run.plan}", PATTERN, header, main, _footer(run))


def _plan_title(run: Run) -> str:
    chosen = run.answer is not None and run.answer.best.plan == run.plan
    return "The plan, and why it won" if chosen else "The plan, and what limits it"


def _why(run: Run) -> str:
    return explain_plan(run.profile, run.plan, run.estimate, run.cluster)


def _collectives(run: Run) -> Html | None:
    return collective_section(run.cluster, run.predicted, run.measured)


def _roofline(run: Run) -> Html | None:
    return roofline_section(run.profile, run.plan, with_typical_rates(run.cluster).device, run.batch_size)


# ---- headline


def problem_list(problems: Sequence[str]) -> Html:
    """Missing or damaged parts, a line for each."""
    return tag("ul", *(tag("li", cut(problem, 300)) for problem in problems[:40]), class_="problems")


def _command(words: Sequence[str]) -> str:
    """A command as typed in a shell; a call of the library, which is one word, as it is."""
    return words[0] if len(words) == 1 else shlex.join(words)


def _headline(run: Run, sections: list[str], problems: Sequence[str]) -> Html:
    digest = f"sha256 {run.digest[:12]}" if run.digest else ""
    facts: list[tuple[str, Html]] = [
        ("Plan", join(names(str(run.plan), 200), f" on {_ranks(run.ranks)} ({run.device})")),
        ("Job", join(tag("code", cut(run.job, 80)), " ", tag("span", digest, class_="lead"))),
        ("Started", tag("time", _date(run.started), datetime=run.started) if run.started else Html("")),
        ("Machine", cut(run.machine, 160)),
        ("Command", tag("code", cut(_command(run.command), 400)) if run.command else Html("")),
    ]
    facts = [(key, value) for key, value in facts if value]
    if problems:
        facts.insert(0, ("Incomplete", problem_list(problems)))
    if run.failure:
        facts.insert(0, ("Failed", tag("strong", f"{_stopped_after(run)}: {cut(run.failure, 600)}")))
    if run.faults:
        survived = tag("ul", *(tag("li", cut(f, 200)) for f in run.faults[:20]))
        facts.insert(1, (f"Survived {len(run.faults)}", survived))
    return tag(
        "header",
        tag("h1", tag("b", cut(run.name, 60)), " · ", cut(run.profile.name, 40), f" · batch of {run.batch_size}"),
        tag("p", verdict(run).replace(" ms", "\u00a0ms"), class_="verdict"),
        tag("dl", *((tag("dt", key), tag("dd", value)) for key, value in facts), class_="facts"),
        navigation(sections),
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
    used = f"{100 * (run.peak_bytes or e.memory_bytes) / e.memory_limit:.1f}% of the limit" if e.memory_limit else ""
    cards = tag(
        "div",
        _card(
            "Step time",
            format_seconds(run.step_seconds) if run.step_seconds else _NONE,
            ["predicted ", format_seconds(e.step_seconds), " ", level(run.time_error, time_in_words)],
            bound,
        ),
        _card(
            "Peak memory of a rank",
            format_bytes(run.peak_bytes) if run.peak_bytes else _NONE,
            ["predicted ", format_bytes(e.memory_bytes), " ", level(run.memory_error, memory_in_words)],
            used,
        ),
        _card(
            "Throughput",
            _rate(run.batch_size, run.step_seconds) or _NONE,
            f"predicted {_rate(run.batch_size, e.step_seconds) or 'nothing'}",
            _each_device(run),
        ),
        *_bubble(run),
        class_="cards",
    )
    origin = f"The prediction comes from {e.origin}." if e.origin else ""
    corrected = f"It is {e.correction}; {format_seconds(e.raw_seconds)} without." if e.raw_seconds else ""
    lines = [_sentence(x) for x in (origin, corrected, *e.notes, e.input_text, input_sentence(run)) if x]
    notes = tag("p", " ".join(lines), class_="note") if lines else None
    return join(cards, time_table(run), notes, _not_split(run))


def _sentence(text: str) -> str:
    """A note as a sentence among others."""
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


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


def _each_device(run: Run) -> str:
    """`all ranks: 12.5 k tokens/s; per device: 3.20 GFLOP/s, MFU 41.2%`."""
    t = run.throughput
    if t is None:
        return ""
    tokens = f"{format_count(t.tokens_per_second)} tokens/s over {_ranks(t.devices)}; " if t.tokens_per_second else ""
    flops = f"{format_count(t.flops_per_device, 'FLOP/s')}, " if t.flops_per_device else ""
    return f"{tokens}per device {flops}{mfu_text(t.mfu)}"


def _card(title: str, big: str, *lines: Content) -> Html:
    text = [tag("p", x) for x in lines if x]
    return tag("div", tag("h3", title), tag("div", big, class_="big"), text, class_="card")


# ---- timeline, memory


def timeline_section(predicted: Timeline | None, measured: Timeline | None) -> Html:
    """One or both timelines, with the parts of a step behind them."""
    lead = "Predicted above, measured below, on the same time scale. Hatched is idle."
    if measured is None:
        lead = "No step was recorded in this run: this is the prediction only. Hatched is idle."
    elif predicted is None:
        lead = "Measured. Hatched is idle."
    both = [t for t in (predicted, measured) if t is not None]
    return join(tag("p", lead, class_="lead"), timelines(*both), data_table(parts_table(both)))


def _memory(run: Run) -> Html:
    e = run.estimate
    bars = [("Predicted", ordered(e.memory_parts, MEMORY_PARTS), e.memory_bytes)]
    if run.peak_bytes:
        bars.append(("Measured", ordered(run.memory_parts, MEMORY_PARTS) or {"other": run.peak_bytes}, run.peak_bytes))
    most = max(total for _, _, total in bars)
    host = (
        tag(
            "p",
            f"Predicted host memory: {format_bytes(e.host_bytes)} of {format_bytes(e.host_limit)} "
            f"{e.host_owner.replace('a rank', 'per rank')}.",
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


def _footer(run: Run) -> Html:
    versions = ", ".join(f"{k} {v}" for k, v in sorted(run.versions.items()))
    return tag("footer", tag("p", f"Drumline report. {versions}{'.' if versions else ''}"))
