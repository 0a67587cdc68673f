"""Run the commands of pages and rewrite their output: every block that begins with `$ drumline`.

python docs/paste_commands.py
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

DOCS = Path(__file__).parent
PAGES = ("case-studies.md", "graph.md")
COLUMNS = "100"
BLOCK = re.compile(r"```console\n\$ drumline (.*)\n(?:.*\n)*?```\n")


def pasted(text: str, run: Callable[[list[str]], str]) -> str:
    """The page with the output of its commands."""
    return BLOCK.sub(lambda m: f"```console\n$ drumline {m[1]}\n{run(shlex.split(m[1])).rstrip()}\n```\n", text)


def run_command(arguments: list[str]) -> str:
    """What a command prints; it must succeed."""
    command = [sys.executable, "-m", "drumline", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=DOCS.parent, env={**os.environ, "COLUMNS": COLUMNS}
    )
    if done.returncode:
        sys.exit(f"{' '.join(arguments)}\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    for name in PAGES:
        page = DOCS / name
        page.write_text(pasted(page.read_text(encoding="utf-8"), run_command), encoding="utf-8")
