"""Rewrite the tables of cost.md: closed forms, the growth of three all-reduces, errors on published collectives.

    python docs/paste_cost.py [published_collectives.csv]

Without a file the errors are kept.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from drumline.costs.networks import CollectivesValidation, ErrorSummary, validate_collectives
from drumline.theory.collective_forms import CLOSED_FORMS
from drumline.theory.scaling import growth_table, markdown

DOCUMENT = Path(__file__).with_name("cost.md")


def forms() -> str:
    """Table of every closed form, from the docstring of its function."""
    lines = ["| collective | algorithm | seconds |", "| --- | --- | --- |"]
    for (collective, algorithm), form in CLOSED_FORMS.items():
        formula = (form.__doc__ or "").splitlines()[0].removesuffix(".")
        lines.append(f"| {collective} | {algorithm} | {formula} |")
    return "\n".join(lines)


def collectives(validation: CollectivesValidation) -> str:
    """Table of errors by level, as shipped and leaving each source out."""
    heads = ("rows", "count", "mean", "median", "P90", "worst", "bias")
    lines = [f"| {' | '.join(heads)} |", f"| --- |{' ---: |' * 6}"]
    names = {"inside": "inside a node", "across": "between nodes"}
    for groups, tail in ((validation.levels, ""), (validation.left_out, ", without its source")):
        lines += [f"| {names[level]}{tail} | {_cells(errors)} |" for level, errors in groups.items()]
    return "\n".join(lines)


def _cells(e: ErrorSummary) -> str:
    shares = (e.mean, e.median, e.p90, e.worst)
    return " | ".join([str(e.rows), *(f"{100 * share:.1f}%" for share in shares), f"{100 * e.bias:+.1f}%"])


def pasted(document: str, validation: CollectivesValidation | None = None) -> str:
    """Replace the tables of the document."""
    tables = {"forms": forms()} | {f"growth {p}": markdown(growth_table(p)) for p in (8,)}
    if validation is not None:
        tables["collectives"] = collectives(validation)
    for name, table in tables.items():
        pattern = re.compile(rf"(<!-- {name} -->)\n.*?<!-- end -->", re.DOTALL)
        document = pattern.sub(lambda m, table=table: f"{m[1]}\n{table}\n<!-- end -->", document)  # type: ignore[misc]
    return document


if __name__ == "__main__":
    validated = validate_collectives(sys.argv[1]) if len(sys.argv) > 1 else None
    DOCUMENT.write_text(pasted(DOCUMENT.read_text(encoding="utf-8"), validated), encoding="utf-8")
