"""The README is executed: its programs as they are, and its commands in order."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import xml.dom.minidom
from pathlib import Path

import pytest

from drumline.clusters import Cluster
from drumline.clusters.spec import SET_BY_USER
from drumline.loop.measure import cached_cluster, local_devices

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def commands() -> list[str]:
    lines = [line.partition("#")[0].strip() for block in blocks("sh") for line in block.splitlines()]
    return [line for line in lines if line.startswith("drumline")]


def test_code_comes_before_line_15() -> None:
    assert README.split("```")[0].count("\n") < 15


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^make (\S+)", "\n".join(blocks("sh")), re.M)
    assert {"demo", "test", "check"} <= set(targets)
    assert all(re.search(rf"^{t}:", makefile, re.M) for t in targets)
    checks = (ROOT / ".ci" / "run").read_text()
    assert all(f"make {t}" in checks for t in ("demo", "test", "check"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("readme")
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    measured = cached_cluster(local_devices())
    if measured.is_file():  # by `make demo`, which CI runs before the tests
        (folder / "cache").mkdir()
        shutil.copy(measured, folder / "cache")
    return folder


def test_the_first_screen_shows_the_loop_and_a_picture() -> None:
    lines = README.splitlines()
    assert "![" in "\n".join(lines[:40])
    assert len(blocks("sh")[0].splitlines()) == 2 and len(blocks("python")[0].splitlines()) == 8
    assert all(f"dl.{verb}(" in blocks("python")[0] for verb in ("measure", "plan", "verify", "train", "report"))


def test_the_picture_is_drawn_by_the_command_under_it(folder: Path) -> None:
    (command,) = re.findall(r"`(drumline simulate .* --picture \S+)`", README)
    title = "<title>gpt:1.3b with dp=1,pp=4,micro=8,precision=bf16 on dgx-h100: "
    run(command, folder)
    for place in (ROOT, folder):
        picture = (place / command.split()[-1]).read_text()
        xml.dom.minidom.parseString(picture)  # well-formed
        assert title in picture


@pytest.mark.parametrize("measures", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_loop(measures: bool, folder: Path) -> None:
    """Without a guard: the job is in a file. A measurement that this machine already has takes the place of another."""
    text = blocks("python")[0]
    if not measures and (cached := next((folder / "cache").glob("*.toml"), None)):
        assert text.count("dl.measure()") == 1
        text = text.replace("dl.measure()", f"dl.Cluster.load({str(cached)!r})")
    done = program(text, folder)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"dp=\S+ True runs/gpt-\S+/report.html\n", done.stdout), done.stdout
    assert (folder / done.stdout.split()[-1]).is_file()


QUICK_ELSEWHERE = (
    "drumline verify",
    "drumline bench",
    "drumline profile examples/gpt.py --dry-run",
    "drumline run",
    "drumline train examples/gpt.py --plan dp=2,zero=1",
    "drumline train examples/gpt.py --plan dp=1",
    "drumline train examples/gpt.py --plan auto",
    "drumline export",
)
"""Slow here: quick tests elsewhere cover each of them, and no other command needs their files."""


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=pytest.mark.slow if command.startswith(QUICK_ELSEWHERE) else ())
        for command in commands()
    ],
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


def test_every_measured_number_names_its_origin(folder: Path) -> None:
    """Of the measurement that the commands use."""
    if not list((folder / "cache").glob("*.toml")):
        run("drumline plan examples/gpt.py", folder)
    cached = [Cluster.load(path) for path in (folder / "cache").glob("*.toml")]
    assert cached
    for cluster in cached:
        numbers = list(cluster.numbers())
        assert len(numbers) > 50
        assert [key for key, _, origin in numbers if origin == SET_BY_USER] == []
        assert cluster.measured and cluster.table("all_reduce", cluster.devices)
        assert cluster.node.link.logp and cluster.node.link.logp.o > 0
        assert "trains of 8-byte messages over" in cluster.origin_of("node.link.logp.o")


def program(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "readme.py").write_text(text)
    env = {**os.environ, "DRUMLINE_CACHE": str(folder / "cache")}
    return subprocess.run(
        [sys.executable, "readme.py"], cwd=folder, capture_output=True, text=True, timeout=280, env=env
    )


def test_the_job(tmp_path: Path) -> None:
    done = program(blocks("python")[1], tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"\d\.\d\d \{'loss': \d\.\d+\}\n", done.stdout)


def test_links_are_valid() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
