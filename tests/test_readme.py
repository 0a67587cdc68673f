"""The README is executed: its commands in order, and its Python as it stands."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from drumline.clusters import Cluster
from drumline.clusters.spec import SET_BY_USER

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def commands() -> list[str]:
    lines = [line.partition("#")[0].strip() for block in blocks("sh") for line in block.splitlines()]
    return [line for line in lines if line.startswith("drumline")]


def test_first_code_stands_before_line_15() -> None:
    assert README.split("```")[0].count("\n") < 15


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^make (\S+)", "\n".join(blocks("sh")), re.M)
    assert {"demo", "test", "check"} <= set(targets)
    assert all(re.search(rf"^{t}:", makefile, re.M) for t in targets)
    told = (ROOT / ".ci" / "run").read_text()
    assert all(f"make {t}" in told for t in ("demo", "test", "check"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("readme")
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


ELSEWHERE = (
    "drumline verify",
    "drumline bench",
    "drumline profile examples/gpt.py --dry-run",
    "drumline run",
    "drumline train examples/gpt.py --plan dp=2,zero=1",
    "drumline train examples/gpt.py --plan dp=1",
    "drumline export",
)
"""No other command but these needs what these leave, and other quick tests have each of them."""


@pytest.mark.parametrize(
    "command",
    [pytest.param(command, marks=pytest.mark.slow if command.startswith(ELSEWHERE) else ()) for command in commands()],
)
def test_command(command: str, folder: Path) -> None:
    run(command, folder)


def run(command: str, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(command)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "DRUMLINE_CACHE": str(folder / "cache")},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_every_number_that_was_measured_names_its_origin(folder: Path) -> None:
    """The first command has measured this machine, and kept it for those that follow."""
    if not list((folder / "cache").glob("*.toml")):
        run(commands()[0], folder)
    kept = [Cluster.load(path) for path in (folder / "cache").glob("*.toml")]
    assert kept
    for cluster in kept:
        numbers = list(cluster.numbers())
        assert len(numbers) > 50
        assert [key for key, _, origin in numbers if origin == SET_BY_USER] == []
        assert cluster.measured and cluster.table("all_reduce", cluster.devices)


def test_python(tmp_path: Path) -> None:
    (program,) = blocks("python")
    path = tmp_path / "readme.py"
    path.write_text(program)
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"\d\.\d\d \{'loss': \d\.\d+\}\n", done.stdout)


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
