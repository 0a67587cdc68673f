"""Pastes measured numbers into the README and redraws its picture. `make numbers` calls it."""

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
COLLECTIVES = ("<!-- collectives -->", "<!-- /collectives -->")


def drumline(*arguments: str) -> dict[str, Any]:
    """One command's JSON."""
    command = [sys.executable, "-m", "drumline", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        sys.exit(done.stderr)
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def main() -> None:
    """Measure, train both examples, paste the tables, redraw the picture."""
    with tempfile.TemporaryDirectory() as folder:
        cluster = f"{folder}/here.toml"
        device = drumline("measure", "-o", cluster)["cluster"]["device"]
        rows = []
        for name in ("gpt", "cnn"):
            command = f"drumline train examples/{name}.py --plan auto --ranks 2"
            r = drumline(*command.split()[1:], "--cluster", cluster, "-o", f"{folder}/{name}", "--no-corrections")
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
        "| command | chosen plan | step predicted | measured | error | peak memory predicted | measured | error |",
        "|---|---|---|---|---|---|---|---|",
        *rows,
        "",
        f"{when}, 2 ranks on {device['name']}s, one thread each, shm; pasted by `make numbers`.",
    ]
    paste(MARKS, table)
    paste(COLLECTIVES, collectives(when, device["name"]))
    picture()


def picture() -> None:
    """Run the command that the README names below its picture."""
    (command,) = re.findall(r"`(drumline simulate \S+ .* --picture \S+)`", (ROOT / "README.md").read_text())
    drumline(*command.split()[1:])


def collectives(when: str, device: str) -> list[str]:
    """The table of all-reduce times, one column for each implementation."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, str(ROOT / "benchmarks" / "collectives.py"), "--json", str(out)]
        subprocess.run(command, check=True, cwd=ROOT)
        rows = json.loads(out.read_text())["rows"]
    names = [key for key in rows[0] if key != "bytes" and "/" not in key]
    lines = [f"| bytes | {' | '.join(names)} | gloo / shm |", "|---" * (len(names) + 2) + "|"]
    for row in rows:
        times = " | ".join(f"{row[name] * 1e6:.0f} us" for name in names)
        lines.append(f"| {int(row['bytes']):,} | {times} | {row['gloo / shm']:.1f} |")
    return [*lines, "", f"{when}, float32, medians, 2 ranks on {device}s; pasted by `make numbers`."]


def paste(marks: tuple[str, str], lines: list[str]) -> None:
    """Write lines between two marks of the README."""
    readme = ROOT / "README.md"
    pattern = re.compile(f"{re.escape(marks[0])}.*{re.escape(marks[1])}", re.S)
    text = "\n".join([marks[0], *lines, marks[1]])
    readme.write_text(pattern.sub(lambda _: text, readme.read_text()))


if __name__ == "__main__":
    main()
