"""Files that are made to hang a command or to fill its memory: refused in seconds, by name, without a traceback.

All commands of a group run in one process whose memory and time are limited, since starting one takes longer than
refusing a file.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from drumline.core import files, regular_files
from drumline.core.errors import CorruptFile, InputError

MEMORY = 3 * 2**30
"""Bytes of address space: the imports take a third of it, the dotted key took 21 GB."""
SECONDS = 60
"""For a whole group; one file hung for minutes, or for ever."""
RUN = Path(__file__).parents[1] / "data" / "release-0.1" / "run"
CHILD = """
import json, resource, sys, time
resource.setrlimit(resource.RLIMIT_AS, ({memory}, {memory}))
resource.setrlimit(resource.RLIMIT_CPU, ({seconds}, {seconds}))
from command import here
for words in json.loads(sys.argv[1]):
    start = time.process_time()
    done = here(*words)
    print(json.dumps([done.returncode, done.stderr, time.process_time() - start]), flush=True)
"""


def run_limited(commands: list[list[str]], cwd: Path) -> list[tuple[int, str, float]]:
    """Exit code, standard error and seconds of a processor of each command."""
    script = CHILD.format(memory=MEMORY, seconds=SECONDS)
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(commands)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},  # for `command`
        capture_output=True,
        text=True,
        timeout=4 * SECONDS,
    )
    results = [tuple(json.loads(line)) for line in done.stdout.splitlines()]
    assert len(results) == len(commands), f"{commands[len(results)]} ended the process: {done.stderr[-2000:]}"
    return results  # type: ignore[return-value]


def write(path: Path, text: str | bytes) -> None:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())


def sparse(path: Path) -> None:
    with open(path, "wb") as f:
        f.truncate(100 * 2**30)


SPECIAL: dict[str, Callable[[Path], None]] = {
    "fifo": os.mkfifo,
    "zero": lambda p: p.symlink_to("/dev/zero"),
    "tty": lambda p: p.symlink_to("/dev/ptmx"),
    "folder": Path.mkdir,
    "loop": lambda p: p.symlink_to(p.name),
    "100 GiB": sparse,
    "endless /proc": lambda p: p.symlink_to("/proc/self/mem"),
}
BYTES: dict[str, str | bytes] = {
    "empty": "",
    "binary": bytes(range(256)) * 100,
    "not UTF-8": b"name = 'caf" + b"\xe9'\n",
    "zeros": b"\0" * 1000,
    "bom only": b"\xef\xbb\xbf",
}
TOML: dict[str, str | bytes] = {
    "dotted key": "a." * 100_000 + "a = 1\n",
    "dotted key with quotes": "'a' . \"b\" . " * 50_000 + "a = 1\n",
    "dotted table": "[" + "a." * 100_000 + "a]\n",
    "nested lists": "x = " + "[" * 10_000 + "]" * 10_000,
    "nested tables": "x = " + "{a = " * 10_000 + "1" + "}" * 10_000,
    "many keys": "".join(f"k{i} = 1\n" for i in range(300_000)),
    "digits": "x = " + "9" * 100_000 + "\n",
    "20 MB": "# x\n" * 5_000_000,
    "twice": "name = 'a'\nname = 'b'\n",
}
JSON: dict[str, str | bytes] = {
    "string of 60 MB": '"' + "a" * 60_000_000 + '"',
    "escapes": '"' + "\\u00e9" * 5_000_000 + '"',
    "nested": "[" * 100_000,
    "nested to the end": "[" * 900 + "]" * 900,
    "nested tables": '{"a":' * 900 + "1" + "}" * 900,
    "empty lists": "[" + "[]," * 20_000_000 + "[]]",
    "wrong items": '{"name": "x", "batch_size": 1, "origin": "", "layers": [' + "1," * 4_000_000 + "1]}",
    "many keys": "{" + ",".join(f'"k{i}": 1' for i in range(500_000)) + "}",
    "digits": '{"name": "x", "batch_size": ' + "9" * 100_000 + "}",
    "twice": '{"name": "x", "name": "y"}',
}
CONFIG: dict[str, str | bytes] = {
    "open string": '{"a": "' + "\\\\" * 100_000,
    "open comment": "/*" * 100_000,
    "commas": "[" + "," * 200_000,
    "wide": "{" + ",".join(f'"k{i}": {{}}' for i in range(15_000)) + "}",
}
YAML: dict[str, str | bytes] = {
    "anchors": "a: &a [x, x]\n"
    + "".join(f"{c}: &{c} [*{p}, *{p}]\n" for p, c in zip("abcdefgh", "bcdefghi", strict=True)),
    "nested": "- " * 10_000,
    "nested flow": "a: " + "[" * 10_000,
    "long": "a: x\n" * 200_000,
}


def make(folder: Path, suffix: str, texts: dict[str, str | bytes]) -> list[Path]:
    paths = []
    for name, text in {**BYTES, **texts}.items():
        paths.append(folder / f"{name.replace(' ', '-').replace('/', '')}{suffix}")
        write(paths[-1], text)
    for name, create in SPECIAL.items():
        paths.append(folder / f"{name.replace(' ', '-').replace('/', '')}{suffix}")
        create(paths[-1])
    return paths


def damaged_runs(folder: Path) -> list[list[str]]:
    """Copies of a run folder with one file replaced by each of the bombs."""
    commands = []
    for path in make(folder, ".json", JSON):
        for name in ("run.json", "steps.jsonl") if path.stem in ("fifo", "zero", "nested") else ("run.json",):
            copy = folder / f"run-{path.stem}-{name}"
            shutil.copytree(RUN, copy)
            (copy / name).unlink()
            os.link(path, copy / name, follow_symlinks=False) if not path.is_dir() else (copy / name).mkdir()
            commands.append(["report", str(copy)])
    return commands


GROUPS: dict[str, Callable[[Path], list[list[str]]]] = {
    "clusters": lambda f: [["plan", "gpt:125m", "--cluster", str(p)] for p in make(f, ".toml", TOML)],
    "profiles": lambda f: [["plan", str(p), "--cluster", "dgx-h100"] for p in make(f, ".json", JSON)],
    "plans": lambda f: [["train", str(f / "j.py"), "--plan", str(p)] for p in make(f, ".toml", TOML)][:6],
    "deepspeed": lambda f: [
        ["plan", "gpt:125m", "--cluster", "dgx-h100", "--from", str(p)] for p in make(f, ".json", {**JSON, **CONFIG})
    ],
    "accelerate": lambda f: [
        ["plan", "gpt:125m", "--cluster", "dgx-h100", "--from", str(p)] for p in make(f, ".yaml", YAML)
    ],
    "tables": lambda f: [
        ["validate", str(p)] for p in make(f, ".csv", {"long field": "a" * 200_000, "quote": '"' * 99_999})
    ],
    "runs": damaged_runs,
    "jobs": lambda f: [["profile", str(p)] for p in make(f, ".py", {"nested": "(" * 100_000, "job": "job = 1"})],
}


@pytest.mark.parametrize("group", GROUPS)
def test_refused_in_time_and_by_name(group: str, tmp_path: Path) -> None:
    write(tmp_path / "j.py", "import drumline as dl\njob = dl.Job(*[print] * 4, batch_size=1)\n")
    commands = GROUPS[group](tmp_path)
    harmless = {"wide", "empty", "bom-only"}  # a plan or a config may be empty
    for words, (code, errors, seconds) in zip(commands, run_limited(commands, tmp_path), strict=True):
        name = next(Path(w).name for w in words if w.startswith(str(tmp_path)) and not w.endswith("j.py"))
        assert "Traceback" not in errors and "MemoryError" not in errors, (name, errors[-500:])
        if group == "runs":  # what is left of the run is shown, and the file is named
            assert code == 0 and name.rpartition("-")[2] in errors, (name, code, errors[-500:])
        elif Path(name).stem not in harmless:
            assert code in (2, 6), (name, code, errors[-500:])
            assert name in errors, (name, errors[:500])
        assert seconds < 20, (name, seconds)
        assert len(errors) < 2000, (name, len(errors))


def test_limits_are_in_one_place(tmp_path: Path) -> None:
    """A pipe without a writer does not block, whoever reads it."""
    os.mkfifo(tmp_path / "p")
    for read in (files.read_text, files.read_toml, files.read_json, regular_files.sha256, regular_files.read_bytes):
        with pytest.raises(InputError, match="p is not a regular file"):
            read(tmp_path / "p")
    with pytest.raises(InputError, match="p is not a regular file"):
        list(regular_files.read_lines(tmp_path / "p"))


def test_long_lines_are_refused_with_their_number(tmp_path: Path) -> None:
    write(tmp_path / "a", b"x\n" + b"y" * (regular_files.LONGEST_LINE + 5))
    with pytest.raises(InputError, match="at most 1048576 bytes") as caught:
        list(regular_files.read_lines(tmp_path / "a"))
    assert caught.value.where == f"{tmp_path / 'a'}, line 2"


@pytest.mark.parametrize("parts", [3, 32])
def test_keys_of_some_parts_are_read(tmp_path: Path, parts: int) -> None:
    write(tmp_path / "a", "a." * (parts - 1) + "a = 1\nb = '" + "x." * 20 + "'\n")
    assert files.read_toml(tmp_path / "a")["b"] == "x." * 20
    write(tmp_path / "b", "\n" + "a." * 33 + "a = 1\n")
    with pytest.raises(InputError, match="at most 32 parts .at line 2: a.a.a"):
        files.read_toml(tmp_path / "b")


def test_a_document_with_a_key_twice_is_damaged(tmp_path: Path) -> None:
    write(tmp_path / "a", '{"x": {"y": 1, "y": 2}}')
    with pytest.raises(CorruptFile, match="the key 'y' is given twice"):
        files.read_json(tmp_path / "a")
