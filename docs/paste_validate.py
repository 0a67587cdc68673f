"""Writes the tables of validate.md anew.

python docs/paste_validate.py published_runs.csv
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from drumline.validation import Outcome, validate
from drumline.validation.scores import Score

DOCUMENT = Path(__file__).with_name("validate.md")


def summary(found: Outcome) -> str:
    """All rows: each source left out, and by the profiles that ship."""
    assert found.loso is not None
    lines = ["| all rows | rows | mean | median | P90 | worst | bias |", f"| --- |{' ---: |' * 6}"]
    for name, score in (
        ("time, its source left out", found.loso.time),
        ("memory, its source left out", found.loso.memory),
        ("time, profiles that ship", found.here.time),
        ("memory, profiles that ship", found.here.memory),
    ):
        assert score is not None
        lines.append(f"| {name} | {_cells(score)} |")
    return "\n".join(lines)


def sources(found: Outcome) -> str:
    """Every source, predicted without it."""
    assert found.loso is not None
    lines = ["| source | rows | time: mean | median | bias | rows | memory: mean | bias |", f"| --- |{' ---: |' * 7}"]
    for name in dict.fromkeys([*found.loso.times, *found.loso.memories]):
        time, memory = found.loso.times.get(name), found.loso.memories.get(name)
        first = f"{time.rows} | {time.mean:.1%} | {time.median:.1%} | {time.bias:+.1%}" if time else " | | | "
        second = f"{memory.rows} | {memory.mean:.1%} | {memory.bias:+.1%}" if memory else " | | "
        lines.append(f"| {name} | {first} | {second} |")
    return "\n".join(lines)


def groups(found: Outcome) -> str:
    """Layouts of one job, ranked without their source."""
    lines = ["| job | layouts | apart | rank correlation | regret |", f"| --- |{' ---: |' * 4}"]
    for g in found.ranked(loso=True):
        lines.append(f"| {g.source}: {g.name} | {g.rows} | {g.spread:.0%} | {g.spearman:.2f} | {g.regret:.1%} |")
    return "\n".join(lines)


def _cells(s: Score) -> str:
    return " | ".join([str(s.rows), *(f"{x:.1%}" for x in (s.mean, s.median, s.p90, s.worst)), f"{s.bias:+.1%}"])


def pasted(document: str, found: Outcome) -> str:
    """The document with its tables written anew."""
    for name, table in (("summary", summary(found)), ("sources", sources(found)), ("groups", groups(found))):
        pattern = re.compile(rf"(<!-- {name} -->)\n.*?<!-- end -->", re.DOTALL)
        document = pattern.sub(lambda m, table=table: f"{m[1]}\n{table}\n<!-- end -->", document)  # type: ignore[misc]
    return document


if __name__ == "__main__":
    outcome = validate(sys.argv[1], loso=True)
    DOCUMENT.write_text(pasted(DOCUMENT.read_text(encoding="utf-8"), outcome), encoding="utf-8")
