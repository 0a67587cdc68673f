"""The run folder: it loads as it was saved, and damaged files are named."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_run import make_bare_run, make_run

from drumline.core.errors import CorruptFile, InputError
from drumline.core.regular_files import LARGEST_FILE
from drumline.reports import Run, StepRecord
from drumline.reports.page import write_page
from drumline.reports.run import without_secrets
from drumline.reports.split_summary import SplitSummary
from drumline.reports.step_records import length_before, read_steps, step_line

PARTS = [
    "cluster.toml",
    "profile.json",
    "plan.toml",
    "estimate.json",
    "answer.json",
    "steps.jsonl",
    "predicted.json",
    "measured.json",
]


@pytest.mark.parametrize("make", [make_run, make_bare_run])
def test_reads_back_equal(make: Callable[[], Run], tmp_path: Path) -> None:
    run = make()
    assert run.save(tmp_path / "run") == tmp_path / "run"
    assert Run.load(tmp_path / "run") == run


def test_the_split_summary_reads_back(tmp_path: Path) -> None:
    division = SplitSummary({"rows": {"aten.cumsum.default": ("a", "b")}}, {"w": "why"}, ("b",), {"measured": 0.25})
    run = dataclasses.replace(make_run(), division=division)
    run.save(tmp_path)
    assert Run.load(tmp_path) == run


def test_a_folder_from_before_plans_split_models_is_read(tmp_path: Path) -> None:
    make_run().save(tmp_path)
    head = json.loads((tmp_path / "run.json").read_text())
    del head["division"]
    (tmp_path / "run.json").write_text(json.dumps(head))
    assert Run.load(tmp_path) == make_run()


def test_files_of_the_folder(tmp_path: Path) -> None:
    make_run().save(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"run.json", *PARTS}
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == 40


def test_saving_again_removes_stale_files_and_keeps_others(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text("mine")
    make_run().save(tmp_path)
    make_bare_run().save(tmp_path)
    assert Run.load(tmp_path) == make_bare_run()
    left = {"run.json", "report.html", *PARTS} - {"answer.json", "measured.json"}
    assert {p.name for p in tmp_path.iterdir()} == left


def test_errors_are_signed_and_relative_to_the_measurement() -> None:
    run = make_run()
    assert run.time_error == pytest.approx((0.0412 - 0.0440) / 0.0440)
    assert run.memory_error == pytest.approx((158 - 171) / 171)
    nothing = dataclasses.replace(run, step_seconds=0.0, peak_bytes=0.0)
    assert nothing.time_error is None
    assert nothing.memory_error is None


def test_a_diverged_run_has_a_file_form(tmp_path: Path) -> None:
    steps = (StepRecord(1, 2.0, 1.0, 0.1, 4), StepRecord(2, math.nan, math.inf, 0.1, 4))
    run = dataclasses.replace(make_run(), steps=steps, evaluation={"loss": math.nan})
    run.save(tmp_path)
    assert "NaN" not in (tmp_path / "run.json").read_text()
    back = Run.load(tmp_path)
    assert back.steps[0] == steps[0]
    assert math.isnan(back.steps[1].loss) and back.steps[1].grad_norm == math.inf
    assert math.isnan(back.evaluation["loss"])


# ---- what is not a run


def test_no_folder(tmp_path: Path) -> None:
    (tmp_path / "gpt-run").mkdir()
    with pytest.raises(InputError, match=r"no run at .*gpt-rum") as e:
        Run.load(tmp_path / "gpt-rum")
    assert e.value.exit_code == 2
    assert "gpt-run" in e.value.fix
    with pytest.raises(InputError, match="no run at"):
        Run.load(tmp_path / "not" / "there")


def test_a_folder_of_runs_lists_them(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"(?s)is not a run.*run\.json") as e:
        Run.load(tmp_path)
    assert "drumline train" in e.value.fix
    make_bare_run().save(tmp_path / "first")
    with pytest.raises(InputError) as e:
        Run.load(tmp_path)
    assert e.value.fix == "runs inside it: first"


def test_a_file_instead_of_its_folder(tmp_path: Path) -> None:
    make_bare_run().save(tmp_path)
    with pytest.raises(InputError, match="is a file") as e:
        Run.load(tmp_path / "run.json")
    assert str(tmp_path) in e.value.fix
    with pytest.raises(InputError, match="is a file"):
        make_bare_run().save(tmp_path / "run.json")


# ---- what is damaged


def _reseal(folder: Path, name: str) -> None:
    """Update the digest, so that loading gets to the contents."""
    head = json.loads((folder / "run.json").read_text())
    head["files"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    (folder / "run.json").write_text(json.dumps(head))


@pytest.mark.parametrize("name", PARTS)
def test_one_changed_byte_is_damage(name: str, tmp_path: Path) -> None:
    make_run().save(tmp_path)
    data = bytearray((tmp_path / name).read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / name).write_bytes(data)
    with pytest.raises(CorruptFile, match=f"(?s){name} is damaged.*sha256") as e:
        Run.load(tmp_path)
    assert e.value.exit_code == 6
    assert e.value.where == str(tmp_path / name)


@pytest.mark.parametrize("garbage", [b"\xff\xfe\x00", b"{[", b'{"nonsense": 1}\n', b"nonsense = 1\n", b"[[1]]"])
@pytest.mark.parametrize("name", PARTS)
def test_garbage_is_reported_as_damage(name: str, garbage: bytes, tmp_path: Path) -> None:
    make_run().save(tmp_path)
    (tmp_path / name).write_bytes(garbage)
    _reseal(tmp_path, name)
    with pytest.raises(CorruptFile) as e:
        Run.load(tmp_path)
    assert name in e.value.where


@pytest.mark.parametrize("name", PARTS)
def test_a_missing_file_is_damage(name: str, tmp_path: Path) -> None:
    make_run().save(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(CorruptFile, match=f"{name} is missing"):
        Run.load(tmp_path)


def test_a_damaged_head(tmp_path: Path) -> None:
    make_run().save(tmp_path)
    head = tmp_path / "run.json"
    good = json.loads(head.read_text())
    half = head.read_text()[:100]
    unlisted = {**good, "files": {k: v for k, v in good["files"].items() if k != "plan.toml"}}
    outside = {**good, "files": {**good["files"], "../../etc/passwd": "0"}}
    missing = {k: v for k, v in good.items() if k != "ranks"}
    wrong = (unlisted, outside, missing, {**good, "rank": 1}, {**good, "ranks": "x"})
    for text in (half, "[]", "", *map(json.dumps, wrong)):
        head.write_text(text)
        with pytest.raises(CorruptFile) as e:
            Run.load(tmp_path)
        assert "run.json" in e.value.where


def test_a_run_of_a_later_drumline_is_not_damage(tmp_path: Path) -> None:
    make_run().save(tmp_path)
    head = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps({**head, "format": 2, "more": 1}))
    with pytest.raises(InputError, match=r"(?s)later drumline.*format 2; this one reads up to 1"):
        Run.load(tmp_path)


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    make_run().save(tmp_path)
    lines = (tmp_path / "steps.jsonl").read_text().splitlines()
    lines[6] = lines[6][:-3]
    (tmp_path / "steps.jsonl").write_text("\n".join(lines))
    _reseal(tmp_path, "steps.jsonl")
    with pytest.raises(CorruptFile, match=r"steps\.jsonl, line 7"):
        Run.load(tmp_path)


# ---- secrets, and what is imported


def test_secrets_never_enter_the_value(tmp_path: Path) -> None:
    command = (
        "HF_TOKEN=hunter2",
        "drumline",
        "train",
        "--api-key",
        "hunter2",
        "--db_pass=hunter2",
        "--password",
        "--seed=1",
        "https://me:hunter2@host/x",
        "--tokens",
        "512",
        "--monkey=3",
        "--tokenizer",
        "gpt2",
    )
    run = dataclasses.replace(make_run(), command=command)
    assert "hunter2" not in str(run)
    assert run.command == (
        "HF_TOKEN=***",
        "drumline",
        "train",
        "--api-key",
        "***",
        "--db_pass=***",
        "--password",
        "--seed=1",
        "https://***@host/x",
        "--tokens",
        "512",
        "--monkey=3",
        "--tokenizer",
        "gpt2",
    )
    assert without_secrets(run.command) == run.command
    run.save(tmp_path)
    assert Run.load(tmp_path) == run


def test_neither_torch_nor_numpy_is_imported() -> None:
    code = "import sys, drumline.reports.page; print(sorted({'torch', 'numpy', 'plotly'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_long_training_is_read(tmp_path: Path) -> None:
    """More bytes than any other file of the folder may have."""
    lines = 35_000
    line = step_line(StepRecord(0, 2.5, 1.0, 0.01, 8, note="n" * 2000))
    with open(tmp_path / "steps.jsonl", "w") as f:
        f.writelines(line.replace(": 0,", f": {i},", 1) for i in range(lines))
    assert (tmp_path / "steps.jsonl").stat().st_size > LARGEST_FILE
    steps = read_steps(tmp_path / "steps.jsonl")
    assert len(steps) == lines and steps[-1].step == lines - 1
    assert length_before(tmp_path / "steps.jsonl", lines) == (tmp_path / "steps.jsonl").stat().st_size


@pytest.mark.slow
def test_a_million_steps_make_a_small_page(tmp_path: Path) -> None:
    run = make_run()
    steps = tuple(StepRecord(i, 2.5 + i % 7, 1.0, 0.01, 8) for i in range(1_000_000))
    folder = dataclasses.replace(run, steps=steps).save(tmp_path / "run")
    page = write_page(Run.load(folder), folder)
    assert page.stat().st_size <= 10**6
    assert "http://" not in page.read_text().replace("http://www.w3.org", "") and "https://" not in page.read_text()
