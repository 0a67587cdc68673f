"""docs/first-hour.md is executed: its file is written, and its commands run in the order of the page."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command import here

from drumline.loop.measure import cached_cluster, local_devices

PAGE = (Path(__file__).parents[1] / "docs" / "first-hour.md").read_text()
(PROGRAM,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.S) for line in block.splitlines()]
QUICK = ("drumline plan my_job.py --cluster",)
"""Run by the quick tests too; the others start ranks or measure."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("first")
    (folder / "my_job.py").write_text(PROGRAM)
    (folder / "cache").mkdir()
    measured = cached_cluster(local_devices())
    if measured.is_file():
        shutil.copy(measured, folder / "cache")
    return folder


def test_the_page_goes_through_the_whole_loop() -> None:
    assert COMMANDS[0] == "pip install drumline"
    verbs = [line.split()[1] for line in COMMANDS[1:]]
    assert verbs == ["demo", "doctor", "plan", "plan", "verify", "train", "train", "report", "export"]
    assert all(line.startswith("drumline ") for line in COMMANDS[1:])


@pytest.mark.parametrize("line", [c for c in COMMANDS if c.startswith(QUICK)])
def test_a_quick_command(line: str, folder: Path) -> None:
    done = here(*shlex.split(line)[1:], cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "The best of each family" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_every_command_in_order(folder: Path) -> None:
    for line in COMMANDS[1:]:
        done = subprocess.run(
            [sys.executable, "-m", *shlex.split(line)],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=1200,
            env={**os.environ, "DRUMLINE_CACHE": str(folder / "cache")},
        )
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        assert done.stdout.strip(), line
    assert (folder / "runs" / "first" / "report.html").is_file()
    assert (folder / "weights" / "model.safetensors").is_file()
