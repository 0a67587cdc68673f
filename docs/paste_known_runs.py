"""Writes the table of well-known runs into known-runs.md: what benchmarks/known_runs.py prints."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

DOCUMENT = Path(__file__).with_name("known-runs.md")
COMMAND = (sys.executable, "benchmarks/known_runs.py")


def pasted(document: str, table: str) -> str:
    """Replace the table of the document."""
    text = f"<!-- runs -->\n{table.strip()}\n<!-- end -->"
    return re.sub(r"<!-- runs -->\n.*?<!-- end -->", lambda _: text, document, flags=re.DOTALL)


if __name__ == "__main__":
    table = subprocess.run(COMMAND, cwd=DOCUMENT.parents[1], check=True, capture_output=True, text=True).stdout
    DOCUMENT.write_text(pasted(DOCUMENT.read_text(encoding="utf-8"), table), encoding="utf-8")
