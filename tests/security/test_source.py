"""No dangerous call in the package: no shell, no eval, no unpickling of files, no name that others can guess."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "drumline"
FORBIDDEN = {
    "eval",
    "exec",
    "pickle.load",
    "pickle.loads",
    "pickle.Unpickler",
    "marshal.load",
    "marshal.loads",
    "shelve.open",
    "dill.loads",
    "joblib.load",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "os.system",
    "os.popen",
    "tempfile.mktemp",
    "torch.jit.load",
    "torch.export.load",
    "torch.package.PackageImporter",
    "dist.all_gather_object",
    "dist.broadcast_object_list",
    "dist.gather_object",
    "dist.scatter_object_list",
    "dist.send_object_list",
    "dist.recv_object_list",
}
ALLOWED = {
    ("core/job.py", "exec"): "the user's own job file, which the user asked to run",
    ("partition/program.py", "exec"): "our own lines, made from a captured graph",
    ("launchers/local.py", "pickle.loads"): "through a pipe from the process that started this one",
    ("launchers/payload.py", "pickle.loads"): "through a pipe from the process that started this one",
    (
        "accelerate/accelerator.py",
        "dist.all_gather_object",
    ): "gather_for_metrics(use_gather_object=True), as Accelerate's",
    ("horovod/collectives.py", "dist.all_gather_object"): "allgather_object, between ranks of one job, as Horovod's",
    (
        "horovod/collectives.py",
        "dist.broadcast_object_list",
    ): "broadcast_object, between ranks of one job, as Horovod's",
    ("mpi/pickling.py", "pickle.loads"): "object messages of drumline.MPI, between ranks of one job, as mpi4py's",
}
KEYWORDS = {"shell": True, "trust_remote_code": True, "allow_pickle": True, "weights_only": False}


def dotted(node: ast.expr) -> str:
    """`a.b.c` of an expression; empty if it is none."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        left = dotted(node.value)
        return f"{left}.{node.attr}" if left else ""
    return ""


def dangerous(text: str) -> Iterator[tuple[str, int]]:
    """Names used in a file that are forbidden, with their lines; `loads or pickle.loads` counts too."""
    tree = ast.parse(text)
    renamed = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    for node in ast.walk(tree):
        name = dotted(node) if isinstance(node, ast.Name | ast.Attribute) else ""
        name = renamed.get(name, name).replace("torch.distributed.", "dist.").replace("_pickle.", "pickle.")
        if name in FORBIDDEN:
            yield name, node.lineno
        if isinstance(node, ast.Call):
            called = dotted(node.func)
            words = {k.arg: k.value for k in node.keywords}
            for key, bad in KEYWORDS.items():
                if isinstance(given := words.get(key), ast.Constant) and given.value is bad:
                    yield f"{key}={bad}", node.lineno
            if called == "torch.load" and "weights_only" not in words:
                yield "torch.load without weights_only", node.lineno
            if called.endswith("subprocess.run") and isinstance(node.args[0], ast.JoinedStr | ast.Constant):
                yield "subprocess.run of one string", node.lineno


def test_nothing_dangerous_is_called() -> None:
    found = {
        (path.relative_to(SOURCE).as_posix(), name): line
        for path in SOURCE.rglob("*.py")
        for name, line in dangerous(path.read_text())
    }
    assert {place: line for place, line in found.items() if place not in ALLOWED} == {}


@pytest.mark.parametrize(
    "text",
    [
        "import pickle\npickle.load(f)",
        "from pickle import loads\nloads(b)",
        "from pickle import loads as read\nread(b)",
        "f = loads or pickle.loads",
        "eval(x)",
        "import subprocess\nsubprocess.run(['a'], shell=True)",
        "subprocess.run(f'ssh {host}')",
        "torch.load(p)",
        "torch.load(p, weights_only=False)",
        "np.load(p, allow_pickle=True)",
        "import torch\ntorch.distributed.all_gather_object(a, b)",
    ],
)
def test_the_check_can_fail(text: str) -> None:
    assert list(dangerous(text))


def test_linter_rules_of_security_are_on() -> None:
    """ruff's S rules, as `make check` runs them; each exception has its reason on its line."""
    ruff = shutil.which("ruff", path=str(Path(sys.executable).parent)) or shutil.which("ruff")
    if ruff is None:
        pytest.skip("ruff is not installed")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    assert "S" in settings["select"]
    words = [ruff, "check", "--output-format", "concise", str(SOURCE)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=100)
    assert [line for line in done.stdout.splitlines() if re.search(r": S\d+ ", line)] == []
