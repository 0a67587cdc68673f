"""One page per strategy, all with the same headings, a picture that the tool draws, and plans that the engine runs."""

from __future__ import annotations

import importlib.util
import re
import shlex
import xml.dom.minidom
from pathlib import Path
from types import ModuleType

import pytest
from command import here

from drumline.plans import Plan, check

ROOT = Path(__file__).parents[1]
INDEX = (ROOT / "docs" / "index.md").read_text()
PAGES = re.findall(r"^\| \[([\w-]+\.md)\]", INDEX.partition("## Strategies")[2].partition("\n## ")[0], re.M)
HEADINGS = ["What it does", "When it wins", "What it costs", "Example", "What it refuses"]
QUICK = ("docs/images/data-parallel.svg", "docs/images/experts.svg")


def drawing() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_pictures", ROOT / "docs" / "draw_pictures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


COMMANDS: dict[str, str] = drawing().commands()


def faults(text: str) -> list[str]:
    """List what a strategy's page lacks."""
    headings = re.findall(r"^## (.+)$", text, re.M)
    lacks = [f"no section {h!r}" for h in HEADINGS if h not in headings]
    if not lacks and [h for h in headings if h in HEADINGS] != HEADINGS:
        lacks.append("the sections have another order")
    first = text.partition(f"## {HEADINGS[0]}")[2].partition("\n## ")[0]
    picture = re.search(
        r"!\[[^\]]{20,}\]\((images/[\w-]+\.svg)\)\n\n`drumline simulate [^`]*--picture docs/(\S+\.svg)`", first
    )
    if not picture or picture[1] != picture[2]:
        lacks.append("no picture with its command")
    return lacks


def test_every_strategy_has_its_page() -> None:
    assert len(PAGES) == len(set(PAGES)) == 12
    table = INDEX.partition("## Strategies")[2].partition("\n## ")[0]
    for key in ("dp", "zero", "offload", "chunk", "tp", "pp", "cp", "tile", "ep", "sync=server", "sync=local:k"):
        assert f"`{key}`" in table


@pytest.mark.parametrize("page", PAGES)
def test_headings_and_picture(page: str) -> None:
    assert faults((ROOT / "docs" / page).read_text()) == []


def test_a_page_in_another_form_is_found() -> None:
    text = (ROOT / "docs" / "zero.md").read_text()
    assert faults(text.replace("## When it wins", "## Why")) == ["no section 'When it wins'"]
    assert faults(text.replace("docs/images/zero", "docs/images/other")) == ["no picture with its command"]
    swapped = (
        text.replace("## Example", "## X").replace("## What it costs", "## Example").replace("## X", "## What it costs")
    )
    assert faults(swapped) == ["the sections have another order"]


@pytest.mark.parametrize("page", PAGES)
def test_its_plans_are_run_by_the_engine(page: str) -> None:
    plans = re.findall(r"--plan (\S+?)`?(?=\s|$)", (ROOT / "docs" / page).read_text())
    assert plans
    for plan in {p for p in plans if p not in ("...", "auto")}:
        check(Plan.parse(plan.rstrip(",.)`")))


def is_drawn(picture: Path, command: str) -> None:
    """The picture is that of the command: of its job, plan and cluster, or of its algorithm."""
    text = picture.read_text()
    xml.dom.minidom.parseString(text)
    (title,) = re.findall(r"<title>(.*?)</title>", text)[:1]
    job, options = shlex.split(command)[1], shlex.split(command)
    assert len(text) < 80_000
    if ":" in job and "--plan" not in options:
        size, ranks, cluster = (options[options.index(f"--{key}") + 1] for key in ("bytes", "ranks", "cluster"))
        assert title.startswith(f"{size} over {ranks} ranks on one node of {cluster}: "), title
        return
    plan = Plan.parse(options[options.index("--plan") + 1])
    assert title.startswith(f"{job} with {plan} on {options[options.index('--cluster') + 1]}: "), title


@pytest.mark.parametrize("picture", COMMANDS)
def test_the_picture_is_that_of_its_command(picture: str) -> None:
    is_drawn(ROOT / picture, COMMANDS[picture])


@pytest.mark.parametrize("picture", [p if p in QUICK else pytest.param(p, marks=pytest.mark.slow) for p in COMMANDS])
def test_the_command_draws_it(picture: str, tmp_path: Path) -> None:
    done = here(*shlex.split(COMMANDS[picture]), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    is_drawn(tmp_path / picture, COMMANDS[picture])
