"""The guides are executed: every program runs, and prints what its comments say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import warm

DOCS = Path(__file__).parents[1] / "docs"
GUIDES = [
    "jobs.md",
    "learning-rate.md",
    "from-deepspeed.md",
    "from-horovod.md",
    "from-accelerate.md",
    "experts.md",
    "planning.md",
    "dry-run.md",
    "simulate-steps.md",
    "data.md",
    "notebooks.md",
    "communicator.md",
    "pipelines.md",
]
ON_FOUR_RANKS = ["bench.md", "mpi.md"]
"""Each rank prints what the comment says."""
EXECUTED_ELSEWHERE = {
    **dict.fromkeys(["cost.md", "case-studies.md", "network.md", "asynchronous.md"], "test_cost_pages.py"),
    "first-hour.md": "test_first_hour.py",
}
BLOCK = re.compile(r"```python\n(.*?)```", re.S)


def programs() -> list[tuple[str, str]]:
    all_programs = []
    for name in GUIDES:
        all_programs += [(name, text) for text in BLOCK.findall((DOCS / name).read_text())]
    return all_programs


@pytest.mark.parametrize(("name", "text"), programs(), ids=[f"{n} {i}" for i, (n, _) in enumerate(programs())])
def test_guide_program(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "guide.py").write_text(text)
    if "dl.spawn(" in text:  # ranks look for its functions in the file that was started
        done = subprocess.run([sys.executable, "guide.py"], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    else:
        done = warm.python("guide.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    promised = re.search(r"print\(.*\)(?:  # (.*)|((?:\n# .*)+))\n?\Z|print\(.*\)  # (.*)", text)
    assert promised
    words = next(g for g in promised.groups() if g)
    lines = [line.removeprefix("# ") for line in words.strip().splitlines()]
    for line, printed in zip(lines, done.stdout.splitlines(), strict=False):
        assert printed.startswith(line.partition(" ...")[0]), done.stdout


def test_the_loop_on_two_ranks(tmp_path: Path) -> None:
    text = next(text for name, text in programs() if name == "from-deepspeed.md" and "train_batch_size()" in text)
    (tmp_path / "train.py").write_text(text)
    done = warm.python("-m", "drumline", "run", "-n", 2, "train.py", cwd=tmp_path, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "".join(done.stdout.split()) == "8888", done.stdout  # 8 and 8 of each rank, which write at the same time


@pytest.mark.parametrize("name", ON_FOUR_RANKS)
def test_programs_of_four_ranks(tmp_path: Path, name: str) -> None:
    (text,) = BLOCK.findall((DOCS / name).read_text())
    (tmp_path / "script.py").write_text(text)
    done = warm.python("-m", "drumline", "run", "-n", 4, "script.py", cwd=tmp_path, timeout=200)
    assert done.returncode == 0, done.stderr
    (promised,) = re.findall(r"print\(.*\)  # (.*)", text)
    written = "".join(done.stdout.split())  # the ranks write at the same time, word by word
    assert sorted(written) == sorted(4 * promised.replace(" ", "")), done.stdout


def test_every_python_block_is_executed() -> None:
    with_blocks = {page.name for page in DOCS.glob("*.md") if BLOCK.search(page.read_text())}
    assert with_blocks == {*GUIDES, *ON_FOUR_RANKS, *EXECUTED_ELSEWHERE}
    for page, test in EXECUTED_ELSEWHERE.items():
        assert page in (Path(__file__).parent / test).read_text(), f"{test} does not read {page}"
    marked = [
        page.name for page in DOCS.glob("**/*.md") for mark in ("```py\n", "```Python") if mark in page.read_text()
    ]
    assert not marked, "python blocks begin with ```python"


def test_links_are_valid() -> None:
    for name in GUIDES:
        for link in re.findall(r"\]\(([^)#]+)\)", (DOCS / name).read_text()):
            assert (DOCS / link).exists(), f"{name}: {link}"
