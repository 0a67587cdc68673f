"""`drumline report` on a broken, empty or half-written run folder: a page with what is there, a line on what is not."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_run import EVIL, make_bare_run, make_run
from page_reader import Reader

import drumline as dl
from drumline.core.errors import CorruptFile, InputError
from drumline.loop.report import newest_run, open_run
from drumline.reports.page import page
from drumline.reports.partial_page import partial_page
from drumline.reports.partial_run import PartialRun, read_partial
from drumline.reports.run import Run

sys.path.insert(0, str(Path(__file__).parents[1]))
from command import here

PARTS = ["cluster.toml", "profile.json", "plan.toml", "estimate.json", "answer.json", "predicted.json", "measured.json"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_run().save(tmp_path / "run")


def shown(folder: Path) -> str:
    """The text of the page, which must be well formed."""
    opened = open_run(folder)
    assert isinstance(opened, PartialRun) and opened.problems
    text = Reader(partial_page(opened)).text
    for problem in opened.problems:
        assert problem in text
    return text


def test_a_complete_folder_is_a_run(folder: Path) -> None:
    assert open_run(folder) == make_run()
    assert read_partial(folder).problems == ()
    assert partial_page(read_partial(folder)) == page(Run.load(folder))


def test_without_run_json(folder: Path) -> None:
    (folder / "run.json").unlink()
    text = shown(folder)
    assert "run.json is missing: the training has not ended, or was killed" in text
    assert "ms a step, measured 45" in text and "Loss and step time" in text


def test_a_killed_training_has_its_steps(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name != "steps.jsonl":
            path.unlink()
    text = shown(folder)
    assert (
        "40 steps can be read; the last took" in text
        and "cluster.toml, profile.json, estimate.json and predicted.json are missing" in text
    )
    assert "answer.json" not in text and "measured.json" not in text  # not every run has them


def test_a_truncated_line(folder: Path) -> None:
    data = (folder / "steps.jsonl").read_bytes()
    (folder / "steps.jsonl").write_bytes(data[: len(data) // 2])
    problems = read_partial(folder).problems
    assert problems[0] == "steps.jsonl is not as the run wrote it: its sha256 differs"
    assert problems[1].startswith("steps.jsonl: 1 line is damaged and left out, the first is line 2")
    assert 15 < len(read_partial(folder).steps) < 25
    assert "One step, rank by rank" in shown(folder)


def test_lines_of_wrong_types_are_left_out(folder: Path) -> None:
    lines = (folder / "steps.jsonl").read_text().splitlines()
    lines[3], lines[8], lines[9] = '{"step": "x"}', "\x00\x01", "[1, 2]"
    (folder / "steps.jsonl").write_text("\n".join(lines))
    assert "steps.jsonl: 3 lines are damaged and left out, the first is line 4" in read_partial(folder).problems
    assert len(read_partial(folder).steps) == 37


@pytest.mark.parametrize("name", PARTS)
def test_a_missing_file(name: str, folder: Path) -> None:
    (folder / name).unlink()
    assert f"{name} is missing" in shown(folder)


@pytest.mark.parametrize("garbage", [b"\xff\xfe\x00", b"{[", b"", b'{"nonsense": 1}\n', b"[[1]]", b"null"])
@pytest.mark.parametrize("name", [*PARTS, "run.json", "steps.jsonl"])
def test_garbage(name: str, garbage: bytes, folder: Path) -> None:
    (folder / name).write_bytes(garbage)
    assert name in " ".join(read_partial(folder).problems)
    assert "The model" in shown(folder) or name == "profile.json"


def test_wrong_types_in_run_json(folder: Path) -> None:
    head = json.loads((folder / "run.json").read_text())
    del head["machine"]
    (folder / "run.json").write_text(json.dumps({**head, "ranks": "many", "memory_parts": [1], "command": 3}))
    text = shown(folder)
    for words in ("run.json has wrong values: command, ranks, memory_parts", "run.json has no machine"):
        assert words in text
    assert "examples/gpt.py:job" in text and "on 2 ranks" in text


@pytest.mark.parametrize("replace", [os.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_a_file_that_cannot_be_read(replace: Callable[[Path], None], folder: Path) -> None:
    for name in ("estimate.json", "steps.jsonl"):
        (folder / name).unlink()
        replace(folder / name)
    text = shown(folder)
    assert "estimate.json" in text and "steps.jsonl" in text and "The plan, and why it won" not in text
    assert "No step can be read." in text


def test_one_changed_byte_is_shown_and_named(folder: Path) -> None:
    text = (folder / "estimate.json").read_text()
    (folder / "estimate.json").write_text(text.replace("0.0412", "0.0512", 1))
    assert "estimate.json is not as the run wrote it: its sha256 differs" in shown(folder)


def test_names_that_are_markup_stay_text(tmp_path: Path) -> None:
    folder = make_bare_run().save(tmp_path)
    (folder / "profile.json").write_text(json.dumps({EVIL: EVIL}))
    (folder / "estimate.json").unlink()
    opened = open_run(folder)
    assert isinstance(opened, PartialRun)
    text = partial_page(opened)
    assert "<script>alert" not in text and "<img" not in text and "&lt;script&gt;alert" in text


# ---- nothing to show, and what is no run


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(CorruptFile, match="(?s)nothing in .* can be shown.*the folder is empty") as e:
        dl.report(tmp_path)
    assert e.value.exit_code == 6


def test_nothing_but_garbage(folder: Path) -> None:
    for path in folder.iterdir():
        path.write_bytes(b"\xff\x00garbage")
    with pytest.raises(CorruptFile, match="(?s)nothing in .* can be shown.*run.json is damaged"):
        dl.report(folder)


def test_a_folder_of_runs_is_an_error_of_the_user(folder: Path) -> None:
    with pytest.raises(InputError, match="is not a run") as e:
        dl.report(folder.parent)
    assert e.value.exit_code == 2 and e.value.fix == "runs inside it: run"


def test_a_later_format_is_refused(folder: Path) -> None:
    (folder / "run.json").write_text('{"format": 9}')
    with pytest.raises(InputError, match="later drumline"):
        dl.report(folder)


def test_the_newest_run_may_not_have_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder.parent / "runs").mkdir()
    folder.rename(folder.parent / "runs" / "one")
    monkeypatch.chdir(folder.parent)
    (folder.parent / "runs" / "one" / "run.json").unlink()
    assert newest_run() == Path("runs/one")
    assert dl.report().name == "report.html"


# ---- the command


def test_the_command(folder: Path) -> None:
    (folder / "measured.json").unlink()
    done = here("report", str(folder), "--trace", "t.json", cwd=folder.parent)
    assert done.returncode == 0 and "measured.json is missing" in done.stderr
    assert "".join(f"report: {folder / 'report.html'}".split()) in "".join(done.stdout.split())
    assert (folder.parent / "t.json").exists()
    (folder / "plan.toml").write_text("=")
    done = here("report", str(folder), "--json", cwd=folder.parent)
    document = json.loads(done.stdout)
    assert done.returncode == 0 and document["steps"] == 40 and document["page"].endswith("report.html")
    assert any("plan.toml" in line for line in document["missing"])


def test_the_command_on_an_empty_folder(tmp_path: Path) -> None:
    done = here("report", ".", cwd=tmp_path)
    assert done.returncode == 6 and "the folder is empty" in done.stderr
    assert not list(tmp_path.iterdir())
