"""Rules that keep the package easy to read: unique class names, one-way imports, a complete map, sound Markdown."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import source_tree
from source_tree import syntax

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "drumline"
MODULES = sorted(SOURCE.rglob("*.py"))
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LONGEST_FILE = 400
LONGEST_FUNCTION = 70
MOST_ROOM_CHANGES = 15
"""Of `benchmarks/room_changes.py`: neighbouring first calls in different packages, apart from values and formulas."""


@pytest.fixture(scope="module", autouse=True)
def _syntax_is_dropped() -> Iterator[None]:
    """Later tests do not need a million nodes in memory."""
    yield
    syntax.cache_clear()


def test_public_class_names_are_unique() -> None:
    places = defaultdict(list)
    for path in MODULES:
        for node in syntax(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path.relative_to(SOURCE).as_posix())
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_no_two_packages_import_each_other() -> None:
    """Rooms and sub-packages, late imports and imports for type checking too."""
    assert source_tree.mutual_imports() == {}


def test_packages_that_import_each_other_are_detected(tmp_path: Path) -> None:
    texts = {
        "__init__.py": "from .one.a import x",
        "one/__init__.py": "from .a import x",
        "one/a.py": "def f():\n    from ..two import b",
        "two/__init__.py": "",
        "two/b.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from drumline.one import a",
        "one/deep/__init__.py": "",
        "one/deep/c.py": "from .. import a",
        "two/d.py": "from . import b",
    }
    for name, text in texts.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    pair = {
        "drumline.one <-> drumline.two in drumline": [
            "one/a.py:2 imports drumline.two.b",
            "two/b.py:3 imports drumline.one.a",
        ]
    }
    assert source_tree.mutual_imports(tmp_path) == pair
    (tmp_path / "one" / "a.py").write_text("from .deep import c")
    assert list(source_tree.mutual_imports(tmp_path)) == ["drumline.one.deep <-> its own modules in drumline.one"]


def test_the_map_names_every_module() -> None:
    spec = importlib.util.spec_from_file_location("paste_map", ROOT / "docs" / "paste_map.py")
    assert spec and spec.loader
    paste_map = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(paste_map)
    page = (ROOT / "docs" / "design.md").read_text()
    assert page == paste_map.pasted(page), "run: python docs/paste_map.py"
    assert all(paste_map.first_sentence(path) for path in MODULES), "every module says what it is for"


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    """Not with "What ...": it says what a module, class or function does or is."""
    assert [where for path in MODULES for where in what_docstrings(path.read_text(), path.relative_to(SOURCE))] == []


@pytest.mark.parametrize(
    ("code", "where"),
    [
        ('"""What it is."""', ["x.py: module"]),
        ('class A:\n    """What it is."""', ["x.py: A"]),
        ('async def f():\n    """What it does."""', ["x.py: f"]),
        ('def f():\n    """Whatever: does this."""', []),
    ],
)
def test_docstrings_that_begin_with_what_are_found(code: str, where: list[str]) -> None:
    assert what_docstrings(code, Path("x.py")) == where


def what_docstrings(text: str, path: Path) -> list[str]:
    """Modules, classes and functions of a file whose docstring begins with "What"."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    if "What " not in text:
        return []
    nodes = [node for node in ast.walk(syntax(text)) if isinstance(node, kinds)]
    names = [getattr(node, "name", "module") for node in nodes if (ast.get_docstring(node) or "").startswith("What ")]
    return [f"{path}: {name}" for name in names]


def test_files_and_functions_stay_short() -> None:
    long = []
    for path in MODULES:
        text = path.read_text()
        if text.count("\n") > LONGEST_FILE:
            long.append(f"{path.relative_to(SOURCE)}: {text.count(chr(10))} lines")
        for node in ast.walk(syntax(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.body[0].lineno + 1  # options of a command do not count
                if lines > LONGEST_FUNCTION:
                    long.append(f"{path.relative_to(SOURCE)}: {node.name} has {lines} lines")
    assert long == []


def test_no_line_is_exempt_from_the_formatter() -> None:
    exempt = [p for d in ("src", "tests", "benchmarks", "examples") for p in (ROOT / d).rglob("*.py")]
    marks = re.compile(r"#\s*fmt:\s*(skip|off)")
    assert [str(p.relative_to(ROOT)) for p in exempt if marks.search(p.read_text())] == []


def test_a_reader_of_the_planner_changes_packages_rarely() -> None:
    """Follow `drumline plan examples/gpt.py` in the order in which it runs; docs/log/structure.md has the history."""
    command = [sys.executable, str(ROOT / "benchmarks" / "room_changes.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) <= MOST_ROOM_CHANGES


def test_the_counts_of_the_log_are_pasted() -> None:
    spec = importlib.util.spec_from_file_location("paste_structure", ROOT / "docs" / "paste_structure.py")
    assert spec and spec.loader
    paste_structure = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(paste_structure)
    page = (ROOT / "docs" / "log" / "structure.md").read_text()
    table = page.split("<!-- structure -->")[1].split("<!-- /structure -->")[0]
    rows = [line for line in table.splitlines() if line.startswith("|")][2:]
    cells = [row.split(" | ")[-1].strip(" |") for row in rows]
    day = table.partition("Now: ")[2][:10]
    assert all(cells) and paste_structure.pasted(page, cells, day) == page
    assert paste_structure.pasted(page, ["x"] * len(cells), day) != page


# -- Markdown


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_markdown_is_sound(page: Path) -> None:
    assert markdown_faults(page.read_text(), page.parent) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("words ```python wrapped into prose```\n", "line 1: a code fence inside a line of text"),
        ("```python\nx = 1\n", "line 1: a code fence that is never closed"),
        ("| a | b |\n|---|---|\n| 1 | 2 | 3 |\n", "line 3: 3 cells in a table of 2 columns"),
        ("see [here](missing.md)\n", "line 1: no file missing.md"),
        ("see [here](#missing)\n", "line 1: no heading #missing"),
        ("see [here](other.md#missing)\n", "line 1: no heading #missing in other.md"),
        ("some `code\n\nnext\n", "line 1: a backtick without its partner"),
    ],
)
def test_markdown_faults_are_found(text: str, fault: str, tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# Other\n")
    assert markdown_faults(text, tmp_path) == [fault]


def test_every_page_is_reached_from_the_index() -> None:
    index = ROOT / "docs" / "index.md"
    reached, waiting = {index}, [index]
    while waiting:
        page = waiting.pop()
        for link in re.findall(r"\]\(([^)#]+\.md)", page.read_text()):
            target = (page.parent / link).resolve()
            if target not in reached and target.exists():
                reached.add(target)
                waiting.append(target)
    pages = set(ROOT.glob("docs/**/*.md"))
    assert sorted(str(p.relative_to(ROOT)) for p in pages - reached) == []


NEWCOMERS = {
    "where zero=3 is priced, offered and run": (
        ("README.md", "docs/design.md#where-a-choice-lives"),
        ("docs/design.md", "costs/data_parallel_comm.py"),
        ("docs/design.md", "costs/fitted/step.py"),
        ("docs/design.md", "planner/space.py"),
        ("docs/design.md", "`fsdp.py: FullyShard` (3)"),
    ),
    "the same from its page": (
        ("README.md", "docs/zero.md"),
        ("docs/zero.md", "costs/data_parallel_comm.py"),
        ("docs/zero.md", "costs/fitted/step.py"),
        ("docs/zero.md", "planner/space.py"),
        ("docs/zero.md", "runtime/strategies/fsdp.py"),
    ),
    "what happens when a rank dies": (
        ("README.md", "docs/faults.md"),
        ("docs/faults.md", "launchers/local.py"),
        ("docs/faults.md", "launchers/failures.py"),
        ("docs/faults.md", "loop/restarts.py"),
        ("docs/faults.md", "`cli/__init__.py` ends the process"),
    ),
    "how to add a collective algorithm": (
        ("README.md", "docs/collectives.md#adding-an-algorithm"),
        ("docs/collectives.md", "src/drumline/schedules/"),
        ("docs/collectives.md", "schedules/collectives.py"),
        ("docs/collectives.md", "theory/collective_forms.py"),
    ),
}
"""Questions of a newcomer -> (page, what it names): every step leads one file further, from the README on."""


@pytest.mark.parametrize("question", NEWCOMERS)
def test_newcomers_find_the_code_in_few_files(question: str) -> None:
    steps = NEWCOMERS[question]
    assert len({"README.md"} | {target.partition("#")[0] for _, target in steps}) <= 6
    for page, target in steps:
        assert target in (ROOT / page).read_text(), f"{page} does not name {target}"


@pytest.mark.parametrize("page", [p for p in PAGES if "log" not in p.parts], ids=lambda p: str(p.relative_to(ROOT)))
def test_source_files_that_a_page_names_exist(page: Path) -> None:
    packages = {p.name for p in SOURCE.iterdir() if p.is_dir()}
    names = re.findall(r"`(?:src/drumline/)?(\w+/[\w/]*\w+\.py)\b", page.read_text())
    assert [n for n in names if n.split("/")[0] in packages and not (SOURCE / n).exists()] == []


@pytest.mark.parametrize("page", [p for p in PAGES if "log" not in p.parts], ids=lambda p: str(p.relative_to(ROOT)))
def test_functions_and_classes_that_a_page_names_exist(page: Path) -> None:
    """In inline code such as `planner/space.py: shardings, SearchSpace`."""
    missing = []
    for name, members in re.findall(r"`(?:src/drumline/)?(\w+/[\w/]*\w+\.py): (\w[\w, ]*)`", page.read_text()):
        source = (SOURCE / name).read_text()
        missing += [
            f"{name}: {m}" for m in members.split(", ") if not re.search(rf"\b(def|class) {m}\b|^{m}\b", source, re.M)
        ]
    assert missing == []


def markdown_faults(text: str, folder: Path) -> list[str]:
    """Faults of one page: fences, tables, inline code, links to files and headings."""
    faults = []
    fence, opened, columns, paragraph, start = "", 0, 0, "", 1
    headings = _anchors(text)
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if fence:
            fence = "" if stripped == fence else fence
            continue
        if stripped.startswith("```"):
            fence, opened = "```", number
            continue
        if "```" in line:
            faults.append(f"line {number}: a code fence inside a line of text")
            continue
        if line.startswith("    ") and not paragraph:
            continue
        cells = len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`]*`", "", stripped))) - 1 if stripped.startswith("|") else 0
        if cells and columns and cells != columns:
            faults.append(f"line {number}: {cells} cells in a table of {columns} columns")
        columns = columns or cells if cells else 0
        if not stripped or cells:
            faults += [f"line {start}: a backtick without its partner"] if paragraph.count("`") % 2 else []
            paragraph, start = "", number + 1
        if not cells:
            paragraph, start = paragraph + line, start if paragraph else number
        for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", line)):
            path, _, anchor = target.partition("#")
            if "://" in path:
                continue
            if path and not (folder / path).exists():
                faults.append(f"line {number}: no file {path}")
            elif path.endswith(".md") and anchor and _anchor(anchor) not in _anchors((folder / path).read_text()):
                faults.append(f"line {number}: no heading #{anchor} in {path}")
            elif not path and _anchor(anchor) not in headings:
                faults.append(f"line {number}: no heading #{anchor}")
    if fence:
        faults.append(f"line {opened}: a code fence that is never closed")
    return faults + ([f"line {start}: a backtick without its partner"] if paragraph.count("`") % 2 else [])


def _anchors(text: str) -> set[str]:
    return {_anchor(line.lstrip("#")) for line in text.splitlines() if line.startswith("#")}


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w-]", "", heading.strip().lower().replace(" ", "-"))


# -- private names of torch


def test_private_torch_names_live_in_torchkit() -> None:
    """Names with one leading underscore that a module reaches from the torch package, by import or by attribute."""
    uses = {p.relative_to(SOURCE): names for p in MODULES if (names := private_torch_names(syntax(p.read_text())))}
    assert {str(path): names for path, names in uses.items() if path.parts[0] != "torchkit"} == {}
    assert len(uses) <= 12


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("import torch._dynamo", "torch._dynamo"),
        ("from torch._C import Node", "torch._C.Node"),
        ("from torch import nn\nx = nn._reduction", "torch.nn._reduction"),
        ("import torch.distributed as dist\ndist.group._x()", "torch.distributed.group._x"),
        ("import torch\naten = torch.ops.aten\ny = aten._softmax.default", "torch.ops.aten._softmax"),
        ("import torch\nx = getattr(torch.cuda, '_sleep')", "torch.cuda._sleep"),
        ("import importlib\nimportlib.import_module('torch._dynamo')", "torch._dynamo"),
    ],
)
def test_private_torch_names_are_recognised(code: str, name: str) -> None:
    assert name in private_torch_names(ast.parse(code))


@pytest.mark.parametrize("code", ["import torch\ntorch.__version__", "from torch import nn\nself._x = nn.Linear"])
def test_public_torch_names_are_not_private(code: str) -> None:
    assert private_torch_names(ast.parse(code)) == []


PYTHON_NAMES = {"_asdict", "_config", "_current_frames", "_exit", "_fields", "_getframe"}
"""Of named tuples, multiprocessing, os and sys."""
MODULE_TABLES = {"_parameters", "_buffers", "_modules", "_version"}
"""Exempt outside torchkit: the tables of `nn.Module` and the write counter of a tensor have kept their names since torch
1.0, and torch's own notes on extending it and on autograd use them; a function around each would only rename it."""


def test_private_attributes_of_torch_objects_are_used_in_torchkit_only() -> None:
    """Attributes with one leading underscore that no class, function or module of the package defines."""
    trees = {path.relative_to(SOURCE): syntax(path.read_text()) for path in MODULES}
    defined = set().union(*map(defined_names, trees.values())) | PYTHON_NAMES | MODULE_TABLES
    outside = {str(path): foreign_attributes(t, defined) for path, t in trees.items() if path.parts[0] != "torchkit"}
    assert {path: names for path, names in outside.items() if names} == {}


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("schema = func._schema", ["_schema"]),
        ("module._get_fsdp_state()._fsdp_param_group", ["_fsdp_param_group", "_get_fsdp_state"]),
        ("getattr(target, '_schema', None)", ["_schema"]),
        ("optimizer._opt_called = True", ["_opt_called"]),
        ("class A:\n    def __init__(self):\n        self._x = 1\ndef f(a):\n    return a._x", []),
        ("class A:\n    _x: int\ndef f(a):\n    return a._x", []),
        ("from . import other\nother._f()\ndef _f():\n    pass", []),
    ],
)
def test_private_attributes_are_recognised(code: str, names: list[str]) -> None:
    tree = ast.parse(code)
    assert foreign_attributes(tree, defined_names(tree)) == names


def defined_names(tree: ast.Module) -> set[str]:
    """Names of functions, classes, fields, attributes of `self` or `cls`, and variables of a module."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and _is_stored(node):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and _is_stored(node) and _name_of(node.value) in ("self", "cls"):
            names.add(node.attr)
    return names


def foreign_attributes(tree: ast.Module, defined: set[str]) -> list[str]:
    """Attributes with one leading underscore that are not defined, also those named by a string."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names.append(node.attr)
        elif isinstance(node, ast.Call) and _name_of(node.func) in ("getattr", "setattr", "hasattr"):
            names += [argument.value for argument in node.args[1:2] if isinstance(argument, ast.Constant)]
    return sorted({n for n in names if n[:1] == "_" and n[:2] != "__" and n not in defined})


def _name_of(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _is_stored(node: ast.AST) -> bool:
    return isinstance(getattr(node, "ctx", None), ast.Store)


def private_torch_names(tree: ast.Module) -> list[str]:
    aliases = _torch_aliases(tree)
    names = list(aliases.values())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [a.name for a in node.names if a.name.split(".")[0] == "torch"]
        elif isinstance(node, ast.Attribute):
            names.append(_torch_path(node, aliases))
        elif isinstance(node, ast.Call) and node.args:
            names.append(_named_by_string(node, aliases))
    return sorted({n for n in names if any(p[:1] == "_" and p[:2] != "__" for p in n.split("."))})


def _torch_aliases(tree: ast.Module) -> dict[str, str]:
    """Names of a module that stand for something in torch -> its dotted path."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for a in node.names:
                if a.name.split(".")[0] == "torch":
                    aliases[a.asname or "torch"] = a.name if a.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and not node.level and str(node.module).split(".")[0] == "torch":
            aliases.update({a.asname or a.name: f"{node.module}.{a.name}" for a in node.names})
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            path = _torch_path(node.value, aliases)
            if path:
                aliases[node.targets[0].id] = path
    return aliases


def _torch_path(node: ast.AST, aliases: dict[str, str]) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([aliases[node.id], *reversed(parts)]) if isinstance(node, ast.Name) and node.id in aliases else ""


def _named_by_string(call: ast.Call, aliases: dict[str, str]) -> str:
    """`getattr(torch.x, "_y")` and `import_module("torch._x")`."""
    last = call.args[min(1, len(call.args) - 1)]
    if not isinstance(last, ast.Constant) or not isinstance(last.value, str):
        return ""
    function = call.func.attr if isinstance(call.func, ast.Attribute) else _name_of(call.func)
    if function in ("getattr", "setattr", "hasattr"):
        base = _torch_path(call.args[0], aliases)
        return f"{base}.{last.value}" if base else ""
    return last.value if function == "import_module" and last.value.split(".")[0] == "torch" else ""
