"""`drumline` alone: what this folder and this machine have, and what to do next."""

from __future__ import annotations

import re
from pathlib import Path

_JOB = re.compile(r"^def job\(|\bJob\(", re.M)
_MOST_FILES = 200
"""Python files of a folder that are looked at."""
_MOST_BYTES = 1_000_000


def print_welcome(help_text: str) -> None:
    """Print what was found here and the commands to try next, then list all commands."""
    from ..reports.console import console

    out = console()
    for line in next_steps(Path()):
        out.print(line)
    out.print("")
    out.print(help_text)


def next_steps(folder: Path) -> list[str]:
    """Lines for a person: what was found, and the commands to type next, the most useful one first."""
    job, run, measured = find_job(folder), newest_run(folder), is_measured()
    state = [
        f"a job in {job}" if job else "no job in this folder",
        f"the newest run is {run}" if run else "no runs yet",
        "this machine is measured" if measured else "this machine is not measured yet",
    ]
    lines = [f"Here: {', '.join(state)}.", "", "Next:"]
    commands: list[tuple[str, str]] = []
    if job:
        first = "which strategy, does it fit, why" + ("" if measured else "; measures this machine first")
        commands += [
            (f"drumline plan {job}", first),
            (f"drumline verify {job} --plan auto", "the same gradients as on one device?"),
            (f"drumline train {job}", "train with the fastest plan; compare with the prediction"),
        ]
        commands += [("drumline report", f"the page about {run}")] if run else []
    else:
        commands += [("drumline report", f"the page about {run}")] if run else []
        commands += [
            ("drumline demo", "the whole loop on this machine, in a minute"),
            ("drumline plan gpt:7b --cluster dgx-h100 --devices 64", "a plan for machines you do not have"),
            ("drumline plan --list", "the models and the machines that are known"),
            ("drumline doctor --quick", "what works on this machine, and what would help"),
        ]
    for command, why in commands:
        lines += [f"  {command}", f"      {why}"]
    if not job:
        lines += ["", "A job is a Python file with a function job() that returns dl.Job(...); see the README."]
    return lines


def find_job(folder: Path) -> str:
    """The first Python file of the folder, or of its examples, that defines a job; empty if there is none."""
    paths = [*sorted(folder.glob("*.py")), *sorted((folder / "examples").glob("*.py"))]
    for path in paths[:_MOST_FILES]:
        try:
            if not path.is_file() or path.stat().st_size > _MOST_BYTES:
                continue
            text = path.read_text()
        except (OSError, UnicodeDecodeError):
            continue
        if _JOB.search(text) and "drumline" in text:
            return path.as_posix()
    return ""


def newest_run(folder: Path) -> str:
    """The newest run folder under runs/; empty if there is none."""
    heads = sorted((folder / "runs").glob("*/run.json"), key=lambda p: p.stat().st_mtime)
    return heads[-1].parent.as_posix() if heads else ""


def is_measured() -> bool:
    """Whether a measurement of this machine is stored."""
    import os

    from ..loop.measure import cached_cluster

    return cached_cluster(os.cpu_count() or 1).exists()
