"""Terminal output of `drumline validate`; in a narrow terminal the numbers of a source are below its name."""

from __future__ import annotations

import textwrap
from collections import Counter

from rich.console import Console, RenderableType
from rich.table import Table as Grid
from rich.text import Text

from .errors import ErrorScore
from .result import MIN_LAYOUTS, MIN_SPREAD, RunsValidation, ScoreTable

NARROW = 90
_HEADS = ("rows", "mean", "median", "P90", "worst", "bias")


def print_validation(result: RunsValidation, out: Console) -> None:
    """Print a whole validation."""
    times = sum(r.seconds is not None for r in result.runs)
    memories = sum(r.memory is not None for r in result.runs)
    total = len(result.runs) + len(result.skipped)
    summary = f"{len(result.runs)} of {total} rows read: {times} times, {memories} memories"
    out.print(_folded(summary, out.width, indent="") + "\n")
    _scores("Step time, with the given constants", result.in_sample.times, result.in_sample.time, out)
    _scores("Memory, with the given constants", result.in_sample.memories, result.in_sample.memory, out)
    _ranking(result, out)
    if result.loso is not None:
        _left_out(result.loso, out)
        _ranking(result, out, "source")
    if result.lomo is not None:
        _scores("Step time, waits fitted without the model", result.lomo.times, result.lomo.time, out)
        _ranking(result, out, "model")
    if result.skipped:
        _skipped(result, out)
    origin = f"constants: {result.constants.origin or 'given'}; {result.duration:.1f} s"
    out.print(_folded(origin, out.width, indent=""))


def _left_out(table: ScoreTable, out: Console) -> None:
    _scores("Step time, each source left out", table.times, table.time, out)
    _scores("Memory, each source left out", table.memories, table.memory, out)


def _scores(title: str, sources: dict[str, ErrorScore], whole: ErrorScore | None, out: Console) -> None:
    if whole is None:
        return
    narrow = out.width < NARROW
    grid = Grid(box=None, pad_edge=False, padding=(0, 1 if narrow else 2, 0, 0), show_edge=False)
    heads = _HEADS[:5] if narrow else _HEADS
    if not narrow:
        grid.add_column("source", overflow="ellipsis", no_wrap=True)
    for name in heads:
        grid.add_column(name, justify="right", no_wrap=True)
    out.print(Text(title, style="bold"))
    for source, score in [*sources.items(), ("all", whole)]:
        style = "bold" if source == "all" else ""
        if not narrow:
            grid.add_row(_cut(source, out.width - 52), *_cells(score), style=style)
            continue
        out.print(Text(_cut(source, out.width), style=style))
        out.print(_line(score))
    if not narrow:
        out.print(grid)
    out.print("")


def _line(score: ErrorScore) -> RenderableType:
    return Text(
        f"  {score.rows} rows, median {_percent(score.median)},\n"
        f"  mean {_percent(score.mean)}, P90 {_percent(score.p90)}, bias {score.bias:+.1%}"
    )


def _cells(score: ErrorScore) -> list[str]:
    values = [_percent(x) for x in (score.mean, score.median, score.p90, score.worst)]
    return [str(score.rows), *values, f"{score.bias:+.1%}"]


def _percent(x: float) -> str:
    return f"{x:.1%}"


def _ranking(result: RunsValidation, out: Console, left_out: str = "") -> None:
    ranked = result.ranked(left_out)
    if not ranked:
        return
    rule = f"{MIN_LAYOUTS} or more, spread over {MIN_SPREAD:.0%}"
    out.print(Text("Ranking of layouts" + (f", its {left_out} left out" if left_out else ""), style="bold"))
    out.print(f"({rule})")
    for g in ranked:
        ranks = f"{g.rows} layouts, rank correlation {g.spearman:.2f}, regret {g.regret:.1%}"
        if out.width >= NARROW:
            out.print(f"{_cut(g.source, 36)}  {g.name}:  {ranks}")
        else:
            out.print(_cut(g.source, out.width))
            out.print(_folded(f"{g.name}: {ranks}", out.width))
    for source in (*dict.fromkeys(g.source for g in ranked), ""):
        own = [g for g in ranked if source in ("", g.source)]
        if len(own) == len(ranked) and source:
            continue
        mean, regret = (sum(getattr(g, key) for g in own) / len(own) for key in ("spearman", "regret"))
        whose = f"{_cut(source, min(36, out.width))}: " if source else ""
        line = f"{whose}mean rank correlation {mean:.2f}, mean regret {regret:.1%}"
        out.print(_folded(line, out.width, indent=""))
    out.print("")


def _skipped(result: RunsValidation, out: Console) -> None:
    out.print(Text(f"{len(result.skipped)} rows skipped", style="bold"))
    lines: dict[tuple[str, str], list[int]] = {}
    for s in result.skipped:
        lines.setdefault((s.source, s.reason), []).append(s.line)
    counts = Counter({key: len(own) for key, own in lines.items()})
    for (source, reason), _ in counts.most_common():
        own = lines[source, reason]
        where = f"line {own[0]}" if len(own) == 1 else f"lines {own[0]}-{own[-1]} ({len(own)})"
        if out.width >= NARROW:
            out.print(f"{where}: {reason}; {_cut(source, max(20, out.width - 40))}")
        else:
            out.print(_cut(source, out.width))
            out.print(_folded(f"{where}: {reason}", out.width))
    out.print("")


def _folded(text: str, width: int, *, indent: str = "  ") -> str:
    return textwrap.fill(text, max(20, width), initial_indent=indent, subsequent_indent=indent)


def _cut(text: str, length: int) -> str:
    """Shorten a name in its middle: many sources begin alike."""
    head = (length - 1) // 2
    return text if len(text) <= length else f"{text[:head]}\u2026{text[len(text) - (length - 1 - head) :]}"
