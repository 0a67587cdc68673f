"""The commands of docs/data.md print what the page shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import command

PAGE = Path(__file__).parents[1] / "docs" / "data.md"


def test_the_commands_of_the_page(tmp_path: Path) -> None:
    for i in range(6):
        folder = tmp_path / "photos" / ("cat" if i % 2 else "dog")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{i}.jpg").write_bytes(bytes(1600))
    (block,) = re.findall(r"```console\n(.*?)```", PAGE.read_text(), re.S)
    commands = re.findall(r"\$ drumline (.*)\n((?:[^$].*\n)*)", block)
    assert len(commands) == 2
    for line, shown in commands:
        done = command.here(*shlex.split(line), cwd=tmp_path)
        assert (done.returncode, done.stdout) == (0, shown), done.stderr
