"""Runs the examples and pastes what was predicted and measured into the README. `make numbers` calls it."""

from __future__ import annotations

import datetime
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MARKS = ("<!-- numbers -->", "<!-- /numbers -->")


def drumline(*arguments: str) -> dict[str, Any]:
    """One command's JSON."""
    command = [sys.executable, "-m", "drumline", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        sys.exit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    """Measure, train both examples, write the table between the marks."""
    with tempfile.TemporaryDirectory() as folder:
        cluster = f"{folder}/here.toml"
        device = drumline("measure", "-o", cluster)["cluster"]["device"]
        rows = []
        for name in ("gpt", "cnn"):
            command = f"drumline train examples/{name}.py --plan auto --ranks 2"
            r = drumline(*command.split()[1:], "--cluster", cluster, "-o", f"{folder}/{name}")
            time, memory = r["time_error"], r["memory_error"]
            cells = [
                f"`{command}`",
                f"`{r['plan']}`",
                f"{1e3 * r['predicted_step_seconds']:.1f} ms",
                f"{1e3 * r['step_seconds']:.1f} ms",
                f"{100 * time:+.0f}%",
                f"{r['predicted_peak_bytes'] / 2**20:.1f} MiB",
                f"{r['peak_bytes'] / 2**20:.1f} MiB",
                f"{100 * memory:+.0f}%",
            ]
            rows.append("| " + " | ".join(cells) + " |")
    when = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    table = [
        "| command | plan it chose | step predicted | measured | off | peak memory predicted | measured | off |",
        "|---|---|---|---|---|---|---|---|",
        *rows,
        "",
        f"{when}, 2 ranks on {device['name']}s, one thread each, gloo; pasted by `make numbers`.",
    ]
    readme = ROOT / "README.md"
    pattern = re.compile(f"{re.escape(MARKS[0])}.*{re.escape(MARKS[1])}", re.S)
    text = "\n".join([MARKS[0], *table, MARKS[1]])
    readme.write_text(pattern.sub(lambda _: text, readme.read_text()))


if __name__ == "__main__":
    main()
