"""Scripts moved from other tools: the diff is small, and the losses are those of the original."""

from __future__ import annotations

import difflib
import importlib.util
import io
import json
import runpy
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import warm
from world import World

FOLDER = Path(__file__).parents[1] / "examples" / "migrations"
NAMES = sorted(path.stem for path in (FOLDER / "before").glob("*.py"))
CHANGED = {"deepspeed_loop": 1, "horovod_loop": 1, "accelerate_loop": 1, "torch_ddp": 5, "torch_one_device": 6}
"""Lines of the new script that are not in the old one."""
MOST = 10
"""Lines of a diff, removed and added ones."""
ARGUMENTS = {"deepspeed_loop": ["--deepspeed"]}
RECORD: dict[str, Any] = json.loads((FOLDER / "losses.json").read_text())


def recorder() -> Any:
    spec = importlib.util.spec_from_file_location("record", FOLDER / "record.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def numbers(lines: list[str]) -> list[float]:
    return [float(line.split()[1]) for line in lines if line.startswith(("loss ", "correct "))]


def same(lines: list[str], expected: list[str]) -> None:
    assert len(numbers(lines)) == len(numbers(expected)) > 0
    assert numbers(lines) == pytest.approx(numbers(expected), abs=2e-6)


def test_each_original_has_its_migration() -> None:
    assert sorted(path.stem for path in (FOLDER / "after").glob("*.py")) == NAMES == sorted(CHANGED) == sorted(RECORD)


@pytest.mark.parametrize("name", NAMES)
def test_the_diff_is_small(name: str) -> None:
    before, after = ((FOLDER / side / f"{name}.py").read_text().splitlines() for side in ("before", "after"))
    lines = list(difflib.unified_diff(before, after, lineterm="", n=0))[2:]
    changed = [line for line in lines if line[0] in "+-"]
    assert len(changed) <= MOST, "\n".join(changed)
    assert sum(line[0] == "+" for line in changed) == CHANGED[name], "\n".join(changed)


def script_output(path: str, arguments: list[str]) -> list[str]:
    """Collect the output of a script on this rank."""
    sys.argv[:] = [path, *arguments]
    with redirect_stdout(io.StringIO()) as out:
        runpy.run_path(path, run_name="__main__")
    return out.getvalue().splitlines()


@pytest.mark.parametrize("name", NAMES)
def test_the_losses_are_those_of_the_original(world: Callable[[int], World], name: str) -> None:
    """On two ranks, against the record; the plain script, too, which was recorded on one device."""
    outputs = world(2).run(script_output, str(FOLDER / "after" / f"{name}.py"), ARGUMENTS.get(name, []))
    same(outputs[0], RECORD[name]["lines"])
    assert outputs[1] == []


def test_the_plain_script_on_one_device() -> None:
    for side in ("before", "after"):
        done = warm.python(FOLDER / side / "torch_one_device.py")
        assert done.returncode == 0, done.stderr
        same(done.stdout.splitlines(), RECORD["torch_one_device"]["lines"])


def test_horovod_has_the_arithmetic_of_ddp() -> None:
    """Its original cannot run here."""
    assert RECORD["horovod_loop"]["lines"] == RECORD["torch_ddp"]["lines"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_record_is_what_the_originals_print(name: str) -> None:
    module = recorder()
    package = module.ORIGINALS[name][0]
    if module.version_of(package) is None:
        pytest.skip(f"{package} is not installed; MIGRATION_PACKAGES names the folder that has it")
    same(module.run_original(name, timeout=250), RECORD[name]["lines"])


@pytest.mark.slow
def test_deepspeeds_launcher_options() -> None:
    words = ["run", "--num_gpus", "2", "after/deepspeed_loop.py", "--deepspeed", "--epochs", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "drumline", *words], cwd=FOLDER, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    assert numbers(done.stdout.splitlines()) == pytest.approx(numbers(RECORD["deepspeed_loop"]["lines"])[:4], abs=2e-6)
