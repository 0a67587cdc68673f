"""The wheel, as a stranger gets it: built, installed into a fresh environment, and used as the README says.

The environment shares torch and the other dependencies with this one, but not Drumline, pip, or the repository. It has
no C compiler on its path.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import torch
from test_readme import blocks, commands

from drumline.loop.measure import cached_cluster, local_devices

ROOT = Path(__file__).parents[1]
OWN = "job.py"
"""The user's own file: the job of the README."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    build = "import sys, hatchling.build; print(hatchling.build.build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", build, str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def home(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an environment, the user's file, the examples and, if there is one, this machine's measurement."""
    home = tmp_path_factory.mktemp("home")
    venv.create(home / "venv", with_pip=False, symlinks=True)
    python = home / "venv" / "bin" / "python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(subprocess.run([python, "-c", where], capture_output=True, text=True, check=True).stdout.strip())
    # a line of a .pth file is a folder to search: what the .pth files there say, such as editable installs, is not read
    (site / "shared.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet", wheel]
    done = subprocess.run(install, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (home / OWN).write_text(blocks("python")[1])
    measured = cached_cluster(local_devices())
    if measured.is_file():
        (home / "cache").mkdir()
        shutil.copy(measured, home / "cache")
    return home


def typed(command: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Type a command in the user's folder."""
    keep = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "CC", "DRUMLINE_NATIVE")}
    env = {**keep, "PATH": str(home / "venv" / "bin"), "DRUMLINE_CACHE": str(home / "cache"), "HOME": str(home)}
    words = shlex.split(command)
    program = str(home / "venv" / "bin" / words[0])
    done = subprocess.run([program, *words[1:]], cwd=home, capture_output=True, text=True, timeout=280, env=env)
    assert done.returncode == 0, done.stderr
    return done


def documented(start: str) -> str:
    """The command of the README that starts so, about the user's own file."""
    command = next(c for c in commands() if c.startswith(start))
    return command.replace("examples/gpt.py", OWN)


def test_the_wheel_contains_the_package_and_the_examples_only(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        names = files.namelist()
        metadata = next(files.read(n).decode() for n in names if n.endswith("METADATA"))
    sources = {p.relative_to(ROOT / "src").as_posix() for p in (ROOT / "src" / "drumline").rglob("*.py")}
    assert sources <= set(names)
    assert {n.split("/")[0] for n in names} == {"drumline", wheel.name.replace("-py3-none-any.whl", ".dist-info")}
    assert not [n for n in names if "__pycache__" in n or n.endswith((".so", ".pyd", ".pyc"))]
    assert "drumline/examples/gpt.py" in names and "drumline/py.typed" in names
    assert wheel.name.endswith("-py3-none-any.whl"), "nothing was compiled"
    assert "Requires-Dist: torch" in metadata and "pytest" not in metadata.partition("Provides-Extra")[0]


def test_the_installed_command_runs_without_the_repository(home: Path) -> None:
    where = typed("python -c 'import drumline; print(drumline.__file__)'", home).stdout
    assert Path(where.strip()).is_relative_to(home)
    assert re.fullmatch(r"drumline \d+\.\d+\.\d+\n", typed("drumline --version", home).stdout)
    here = typed("drumline", home).stdout
    assert f"a job in {OWN}" in here and f"drumline plan {OWN}" in here
    planned = typed("drumline plan gpt:125m --cluster dgx-a100 --devices 4 --batch 8 --top 1", home).stdout
    assert "per device" in planned and "MFU" in planned


def test_without_a_compiler_shared_memory_works_in_python(home: Path) -> None:
    program = """
from drumline.comm.shm import native
try:
    native.load()
except native.NativeUnavailable as e:
    print(e)
"""
    (home / "native.py").write_text(program)
    assert "no C compiler" in typed("python native.py", home).stdout
    (home / "sum.py").write_text(
        "import drumline as dl, torch\n"
        "import torch.distributed as dist\n"
        "import drumline.comm\n"
        "dist.init_process_group('shm')\n"
        "x = torch.ones(3)\n"
        "dist.all_reduce(x)\n"
        "print(x.tolist())\n"
        "dist.destroy_process_group()\n"
    )
    assert "[2.0, 2.0, 2.0]" in typed("drumline run -n 2 sum.py", home).stdout


@pytest.mark.slow
def test_a_person_takes_the_path_of_the_readme(home: Path) -> None:
    """Check the machine, plan their own file, verify, train, report."""
    typed(documented("drumline doctor"), home)
    assert "step " in typed(documented("drumline plan examples/gpt.py"), home).stdout
    assert "passed: " in typed(documented("drumline verify"), home).stdout
    trained = typed(documented("drumline train examples/gpt.py --plan auto"), home).stdout
    assert "throughput: " in trained and "MFU" in trained and "report: " in trained
    reported = typed("drumline report", home).stdout
    page = home / reported.splitlines()[-1].removeprefix("report: ")
    assert page.is_file() and "predicted" in reported
    assert "the newest run is runs/job-" in typed("drumline", home).stdout


@pytest.mark.slow
def test_the_demonstration_of_the_wheel(home: Path) -> None:
    assert "report" in typed("drumline demo", home).stdout
