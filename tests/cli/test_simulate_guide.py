"""docs/simulate-steps.md is executed: each command prints what the page shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from command import here

PAGE = (Path(__file__).parents[2] / "docs" / "simulate-steps.md").read_text()
EXAMPLES = re.findall(r"```sh\n(.*?)```\n```text\n(.*?)```", PAGE, re.S)


def test_every_command_shows_its_output() -> None:
    assert len(EXAMPLES) == PAGE.count("```sh") == 4


@pytest.mark.parametrize(("command", "shown"), EXAMPLES, ids=["step", "slow link", "failures", "sweep"])
def test_an_example(command: str, shown: str) -> None:
    done = here(*shlex.split(command)[1:], COLUMNS="120")
    assert done.returncode == 0, done.stderr
    for line in shown.strip("\n").splitlines():
        assert line.partition(" ...")[0] in done.stdout, (line, done.stdout)
