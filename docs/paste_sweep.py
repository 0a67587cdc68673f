"""Rewrite the table of sweeps in validate.md: layouts ranked with their model left out of the fit.

python docs/paste_sweep.py published_runs_bulk.csv
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

from drumline.costs.fitted import load_constants
from drumline.validation import validate
from drumline.validation.errors import layout_groups
from drumline.validation.fit_waits import leave_models_out
from drumline.validation.run_columns import predict, run_columns

DOCUMENT = Path(__file__).with_name("validate.md")


def table(path: str) -> str:
    """Groups of sweeps whose hosts wait: ranked without waits, without the model, and without as many ranks, too."""
    result = validate(path, lomo=True)
    waiting = {run.source for run in result.runs if run.software.host_waits}
    runs = [run for run in result.runs if run.source in waiting]
    sizes_too = layout_groups(runs, leave_models_out(run_columns(runs), load_constants(), sizes_too=True))
    without = layout_groups(runs, predict(run_columns(runs), replace(load_constants(), waits=None))[0])
    groups = [g for g in result.ranked("model") if g.source in waiting]
    cells = [(g, *(next(x for x in other if x.name == g.name) for other in (without, sizes_too))) for g in groups]
    lines = [
        "| job | layouts | spread | without waits: rank correlation, regret | model left out | and size |",
        f"| --- |{' ---: |' * 5}",
    ]
    for g, before, both in cells:
        scores = " | ".join(f"{x.spearman:.2f}, {x.regret:.1%}" for x in (before, g, both))
        lines.append(f"| {g.name} | {g.rows} | {g.spread:.0%} | {scores} |")
    means = [
        f"{sum(x.spearman for x in own) / len(own):.2f}, {sum(x.regret for x in own) / len(own):.1%}"
        for own in zip(*[(before, g, both) for g, before, both in cells], strict=True)
    ]
    lines.append(f"| mean | {sum(g.rows for g in groups)} | | {' | '.join(means)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    text = DOCUMENT.read_text(encoding="utf-8")
    pasted = f"<!-- sweep -->\n{table(sys.argv[1])}\n<!-- end -->"
    text = re.sub(r"<!-- sweep -->\n.*?<!-- end -->", lambda _: pasted, text, flags=re.DOTALL)
    DOCUMENT.write_text(text, encoding="utf-8")
