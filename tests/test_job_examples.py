"""The examples of jobs: each trains as its first lines say, and is planned, verified and trained from the command line."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch
import warm
from command import here

import drumline as dl
from drumline.comm.environment import disconnect

FOLDER = Path(__file__).parents[1] / "examples"
NAMES = ["experts", "lora", "lstm", "unet"]
PLANS = [
    ("gpt", "dp=2,zero=1"),
    ("cnn", "dp=2"),
    *(("lora", f"dp=2,zero={stage}") for stage in (1, 2)),
]
"""Plans of examples next to those that the examples name themselves."""


def docstring(name: str) -> str:
    return ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text())) or ""


def command(name: str) -> tuple[list[str], str]:
    """The command and the last line of its output that an example's docstring has."""
    text = docstring(name)
    line = re.search(r"^ {4}drumline (.+)$", text, re.M)
    promised = re.search(r"^ {4}(passed: .+)$", text, re.M)
    assert line and promised, name
    return line[1].split(), promised[1]


@pytest.mark.parametrize("name", NAMES)
def test_the_first_losses(name: str) -> None:
    """On one rank in this process; a device or another version may round the last digit differently."""
    promised = re.search(r"The first losses: (.+)", docstring(name))
    assert promised
    expected = [float(x) for x in promised[1].split(", ")]
    engine = dl.initialize(dl.Job.load(str(FOLDER / f"{name}.py")))
    losses = [engine.step(batch) for batch in engine.data(3)]
    disconnect()
    assert losses == pytest.approx(expected, abs=2e-3)


def test_only_the_small_matrices_are_trained() -> None:
    model = dl.Job.load(str(FOLDER / "lora.py")).model()
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained and all(name.endswith((".up", ".down")) for name in trained)
    before = model(torch.zeros(1, 4, dtype=torch.long))
    for name, p in model.named_parameters():
        if name.endswith(".down"):
            p.data.zero_()
    assert torch.equal(model(torch.zeros(1, 4, dtype=torch.long)), before)  # it begins as the base alone


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_planned(name: str) -> None:
    done = here("plan", FOLDER / f"{name}.py", "--cluster", "dgx-a100", "--devices", "4")
    assert done.returncode == 0, done.stderr
    assert "dp=" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_verified_and_trained(name: str, tmp_path: Path) -> None:
    words, promised = command(name)
    done = warm.python("-m", "drumline", *words, cwd=FOLDER.parent)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == promised
    plan = words[words.index("--plan") + 1]
    more = ("--steps", "3", "--output", tmp_path / "run", "--cluster", "dgx-a100")
    done = warm.python("-m", "drumline", "train", *words[1:2], "--plan", plan, *more, cwd=FOLDER.parent)
    assert done.returncode == 0, done.stderr
    assert len(dl.Run.load(tmp_path / "run").losses) == 3


@pytest.mark.slow
@pytest.mark.parametrize(("name", "plan"), PLANS)
def test_another_plan_of_an_example(name: str, plan: str) -> None:
    assert dl.verify(str(FOLDER / f"{name}.py"), plan, steps=2).passed
