"""Examples print exactly the output in their docstrings, and the training loop resumes where it stopped."""

from __future__ import annotations

import ast
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest
import warm

FOLDER = Path(__file__).parents[1] / "examples" / "mpi"
EXAMPLES = sorted(path.stem for path in FOLDER.glob("*.py"))


def documented_run(name: str) -> tuple[list[str], list[str]]:
    """Parse the command and the expected output from an example's docstring."""
    text = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text()), clean=False) or ""
    blocks = [textwrap.dedent(block).rstrip() for block in text.split("\n\n")]
    first = next(i for i, block in enumerate(blocks) if block.startswith("drumline "))
    return blocks[first].split(), blocks[first + 1].splitlines()


def run(words: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    assert words[0] == "drumline"
    return warm.python("-m", "drumline", *words[1:], cwd=FOLDER.parents[1], timeout=120, **variables)


def test_list_of_examples() -> None:
    assert EXAMPLES == ["average", "deadlock", "deviation", "grid", "pi", "ring"]


QUICK = ("ring",)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in EXAMPLES if name != "deadlock"],
)
def test_example_prints_its_documented_output(name: str) -> None:
    command, output = documented_run(name)
    done = run(command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == output
    assert done.stderr == ""


def test_deadlock_is_explained() -> None:
    command, output = documented_run("deadlock")
    done = run(command)
    assert done.returncode == 5
    assert "Traceback" not in done.stderr
    assert "\n".join(output) in done.stderr
    line = int(output[1].rpartition(":")[2])
    assert "comm.Recv(" in (FOLDER / "deadlock.py").read_text().splitlines()[line - 1]


@pytest.mark.slow
def test_same_output_over_gloo() -> None:
    command, output = documented_run("ring")
    done = run(command, DRUMLINE_TRANSPORT="gloo")
    assert done.stdout.splitlines() == output, done.stderr


@pytest.mark.parametrize(
    "parts",
    [
        ((1, 2), (2, 2, "dp=2,zero=2")),
        pytest.param(((1, 2), (2, 2), (3, 2, "dp=3,zero=2")), marks=pytest.mark.slow),
    ],
    ids=len,
)
def test_one_loop_on_any_number_of_ranks(tmp_path: Path, parts: tuple[Any, ...]) -> None:
    """Restarted with another number of ranks and another plan, it continues like an uninterrupted run."""
    script = str(FOLDER.parent / "own_loop.py")

    def losses(folder: str, ranks: int, steps: int, *plan: str) -> list[str]:
        words = [script, str(tmp_path / folder), str(steps), *plan]
        done = warm.python(*words) if ranks == 1 else run(["drumline", "run", "-n", str(ranks), *words])
        assert done.returncode == 0, done.stderr
        return [line.rpartition(" ")[2] for line in done.stdout.splitlines()]

    whole = losses("whole", 1, 2 * len(parts))
    assert len(whole) == 2 * len(parts)
    assert [loss for part in parts for loss in losses("parts", *part)] == whole
