"""docs/planning.md is executed: each command prints what the page shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from command import here

PAGE = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
EXAMPLES = re.findall(r"```sh\n(.*?)```\n```text\n(.*?)```", PAGE, re.S)


def test_every_command_shows_its_output() -> None:
    assert len(EXAMPLES) == PAGE.count("```sh") == 11


@pytest.mark.parametrize(("commands", "shown"), EXAMPLES, ids=[text.split(" --top ")[0][14:] for text, _ in EXAMPLES])
def test_an_example(commands: str, shown: str) -> None:
    printed = ""
    for command in commands.strip().splitlines():
        done = here(*shlex.split(command)[1:])
        assert done.returncode == 0, done.stderr
        printed += done.stdout
    for line in shown.strip().splitlines():
        assert line.partition(" ...")[0] in printed, (line, printed)
