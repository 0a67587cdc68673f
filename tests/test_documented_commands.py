"""Every `drumline` command on a page is one that the command line takes: names, options and the form of their values.

What the commands print is tested elsewhere (test_guides.py, test_first_hour.py, test_command_pages.py, tests/cli); here no
page may show a command that has been renamed, or an option that is gone.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main

from drumline.cli import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/course").glob("*.md"))]
COMMAND = re.compile(r"^(?:    |)(?:\$ )?(drumline [a-z].*)$", re.M)
INLINE = re.compile(r"`(drumline [a-z][^`\n]*)`")
PLACEHOLDER = re.compile(r"\b[A-Z]{2,}\b|\.\.\.|[|<>\[\]{}]|\\$")
"""Words that stand for something (JOB, ...), and what a shell would read first: such lines are forms, not commands."""


def commands(pattern: re.Pattern[str]) -> list[tuple[str, str]]:
    """(page, command) of every line, or phrase, that can be typed as it stands."""
    lines = [(page.name, m[1]) for page in PAGES for m in pattern.finditer(page.read_text(encoding="utf-8"))]
    lines = [(page, line.partition("  #")[0].strip()) for page, line in lines]
    return sorted({(page, line) for page, line in lines if not PLACEHOLDER.search(line)})


def parse(line: str) -> None:
    """Parse a command as the command line does, without running it."""
    words = shlex.split(line.partition(" && ")[0].removesuffix("&").strip(), comments=True)[1:]
    root: Any = typer.main.get_command(app)
    command = root.commands.get(words[0])
    assert command is not None, f"no command {words[0]!r}"
    parent = root.make_context("drumline", [], resilient_parsing=True)
    try:
        command.make_context(words[0], words[1:], parent=parent).close()
    except Exception as e:
        raise AssertionError(f"{line}: {e}") from None


@pytest.mark.parametrize(("page", "line"), commands(COMMAND), ids=[f"{p}: {c}" for p, c in commands(COMMAND)])
def test_documented_command_is_valid(page: str, line: str) -> None:
    parse(line)


def test_commands_and_options_that_are_mentioned_exist() -> None:
    root: Any = typer.main.get_command(app)
    for page, line in commands(INLINE):
        words = shlex.split(line)[1:]
        assert words[0] in root.commands, f"{page}: {line}"
        options = {name for p in root.commands[words[0]].params for name in (*p.opts, *p.secondary_opts)}
        unknown = [w for w in words[1:] if w.startswith("-") and w.partition("=")[0] not in options]
        assert not unknown or words[0] in ("run", "launch"), f"{page}: {line}"


def test_many_commands_are_found_and_wrong_ones_refused() -> None:
    assert len(commands(COMMAND)) > 100 and len(commands(INLINE)) > 50
    for wrong in ("drumline plan gpt:7b --devises 8", "drumline fly", "drumline plan gpt:7b --top many"):
        with pytest.raises(AssertionError):
            parse(wrong)
