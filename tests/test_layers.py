"""The one-way order of the packages: each imports only from those before it, and torch begins at `torchkit`."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from source_tree import SOURCE, files, imports, syntax

ORDER = [
    {"core"},
    {"schedules"},
    {"clusters"},
    {"models"},
    {"plans"},
    {"interop"},
    {"theory"},
    {"costs"},
    {"planner"},
    {"simulator"},
    {"reports"},
    {"validation"},
    {"torchkit"},
    {"datasets"},
    {"tracing"},
    {"comm"},
    {"mpi", "MPI"},
    {"partition"},
    {"runtime"},
    {"deepspeed", "horovod", "accelerate"},
    {"measurement"},
    {"launchers"},
    {"loop"},
    {"cli"},
]
TORCH_BEGINS = "torchkit"
ARRAYS = ("costs/fitted", "costs/plan_columns.py", "validation", "planner/finalists.py")
"""Modules before the torch line that import numpy at the top; all others import it where it is used."""
LEVEL = {package: i for i, packages in enumerate(ORDER) for package in packages}


@pytest.fixture(scope="module", autouse=True)
def _syntax_is_dropped() -> Iterator[None]:
    """Later tests do not need a million nodes in memory."""
    yield
    syntax.cache_clear()


def package_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def at_start(path: Path) -> list[str]:
    """Collect the top-level imports of a file."""
    body = syntax(path.read_text()).body
    names = [alias.name for node in body if isinstance(node, ast.Import) for alias in node.names]
    return names + [node.module or "" for node in body if isinstance(node, ast.ImportFrom) and not node.level]


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_a_package_imports_only_from_packages_before_it(path: Path) -> None:
    package = package_of(path)
    if package in ("__init__", "__main__"):
        return
    for item in imports(path):
        parts = item.module.split(".")
        if parts[0] != "drumline" or len(parts) < 2 or parts[1] not in LEVEL:
            continue
        other = parts[1]
        assert other == package or LEVEL[other] <= LEVEL[package], f"{package} imports {other}"


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_torch_begins_at_torchkit(path: Path) -> None:
    package = package_of(path)
    if package in LEVEL and LEVEL[package] < LEVEL[TORCH_BEGINS]:
        heavy = [i.module for i in imports(path) if i.module.split(".")[0] == "torch" and not i.typing_only]
        if not path.relative_to(SOURCE).as_posix().startswith(ARRAYS):
            heavy += [m for m in at_start(path) if m.split(".")[0] == "numpy"]
        assert not heavy, f"{path} imports {heavy}"


def test_every_package_is_in_the_order() -> None:
    packages = {package_of(p) for p in files()} - {"__init__", "__main__"}
    assert packages == set(LEVEL)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["plan", "resnet50", "--cluster", "dgx-h100", "--devices", "8", "--json"],
        ["plan", "gpt:7b", "--cluster", "dgx-h100", "--devices", "64", "--json"],
        ["simulate", "pipeline:1f1b"],
        ["profile", "resnet50"],
    ],
)
def test_commands_without_torch(arguments: list[str]) -> None:
    program = (
        "import sys; sys.argv = ['drumline', *sys.argv[1:]]\n"
        "from drumline.cli import app\n"
        "app(standalone_mode=False)\n"
        "arrays = 'gpt:7b' in sys.argv  # transformers of the zoo are priced on arrays\n"
        "assert 'torch' not in sys.modules and ('numpy' in sys.modules) == arrays, 'torch or numpy was imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
