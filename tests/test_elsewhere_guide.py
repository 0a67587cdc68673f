"""docs/plan-elsewhere.md is executed: its commands run in order, and print what the page shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from command import here

from drumline.interop.tools import TOOLS

GUIDE = (Path(__file__).parents[1] / "docs" / "plan-elsewhere.md").read_text()


def test_commands_print_what_the_page_says(tmp_path: Path) -> None:
    (config,) = re.findall(r"```json\n(.*?)```", GUIDE, re.S)
    (tmp_path / "ds_config.json").write_text(config)
    steps = re.findall(r"```sh\n(.*?)\n```\n+```text\n(.*?)\n```", GUIDE, re.S)
    assert len(steps) == GUIDE.count("```sh") == 4
    for command, promised in steps:
        words, _, code = command.partition("  # ")
        done = here(*shlex.split(words)[1:], cwd=tmp_path)
        assert done.returncode == int(code or 0), done.stderr
        printed = done.stderr if code else done.stdout
        assert printed.startswith(promised), printed
    assert "fsdp_version: 2" in (tmp_path / "fsdp.yaml").read_text()


def test_every_tool_and_config_is_on_the_page() -> None:
    assert all(f"| `{tool}` |" in GUIDE for tool in TOOLS)
    count = len(list((Path(__file__).parent / "interop" / "configs").iterdir()))
    assert f"{count} configs in `tests/interop/configs`" in GUIDE
    for link in re.findall(r"\]\(([^)#]+)\)", GUIDE):
        assert (Path(__file__).parents[1] / "docs" / link).exists(), link
