"""Rewrite the tables of validate.md.

python docs/paste_validate.py published_runs.csv
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from drumline.validation import RunsValidation, validate
from drumline.validation.errors import ErrorScore

DOCUMENT = Path(__file__).with_name("validate.md")


def summary(result: RunsValidation) -> str:
    """All rows: each source left out, and with the shipped constants."""
    assert result.loso is not None
    lines = ["| all rows | rows | mean | median | P90 | worst | bias |", f"| --- |{' ---: |' * 6}"]
    for name, score in (
        ("time, its source left out", result.loso.time),
        ("memory, its source left out", result.loso.memory),
        ("time, shipped constants", result.in_sample.time),
        ("memory, shipped constants", result.in_sample.memory),
    ):
        assert score is not None
        lines.append(f"| {name} | {_cells(score)} |")
    return "\n".join(lines)


def sources(result: RunsValidation) -> str:
    """Every source, left out of the fit."""
    assert result.loso is not None
    lines = ["| source | rows | time: mean | median | bias | rows | memory: mean | bias |", f"| --- |{' ---: |' * 7}"]
    for name in dict.fromkeys([*result.loso.times, *result.loso.memories]):
        time, memory = result.loso.times.get(name), result.loso.memories.get(name)
        first = f"{time.rows} | {time.mean:.1%} | {time.median:.1%} | {time.bias:+.1%}" if time else " | | | "
        second = f"{memory.rows} | {memory.mean:.1%} | {memory.bias:+.1%}" if memory else " | | "
        lines.append(f"| {name} | {first} | {second} |")
    return "\n".join(lines)


def groups(result: RunsValidation) -> str:
    """Layouts of one job, ranked with their source left out."""
    lines = ["| job | layouts | spread | rank correlation | regret |", f"| --- |{' ---: |' * 4}"]
    for g in result.ranked("source"):
        lines.append(f"| {g.source}: {g.name} | {g.rows} | {g.spread:.0%} | {g.spearman:.2f} | {g.regret:.1%} |")
    return "\n".join(lines)


def _cells(s: ErrorScore) -> str:
    return " | ".join([str(s.rows), *(f"{x:.1%}" for x in (s.mean, s.median, s.p90, s.worst)), f"{s.bias:+.1%}"])


def pasted(document: str, result: RunsValidation) -> str:
    """Replace the tables of the document."""
    for name, table in (("summary", summary(result)), ("sources", sources(result)), ("groups", groups(result))):
        pattern = re.compile(rf"(<!-- {name} -->)\n.*?<!-- end -->", re.DOTALL)
        document = pattern.sub(lambda m, table=table: f"{m[1]}\n{table}\n<!-- end -->", document)  # type: ignore[misc]
    return document


if __name__ == "__main__":
    result = validate(sys.argv[1], loso=True)
    DOCUMENT.write_text(pasted(DOCUMENT.read_text(encoding="utf-8"), result), encoding="utf-8")
