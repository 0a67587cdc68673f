"""Standard output that is closed, full, narrow or ASCII: no traceback, and a training never ends because of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from drumline.core.streams import GuardedStream, OutputFailed, guarded_streams, tolerant_output
from drumline.reports.step_records import StepRecord
from drumline.runtime.telemetry.sinks import JsonLinesFile, Sink, TolerantSink

PLAN = "plan gpt:125m --cluster dgx-h100 --devices 8"
JOB = """
import torch
from torch import nn
import drumline as dl

class Data(torch.utils.data.Dataset):
    def __len__(self): return 40
    def __getitem__(self, i):
        print("sample", i, flush=True)
        return torch.ones(4) * i, i % 2

def job():
    return dl.Job(model=lambda: nn.Linear(4, 2), loss=nn.functional.cross_entropy,
                  optimizer=lambda p: torch.optim.SGD(p, lr=0.01), data=Data, batch_size=4, steps=30)
"""
RECORD = StepRecord(0, 1.0, 1.0, 0.1, 8)


def shell(line: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash in which `drumline` is the command."""
    function = f'drumline() {{ "{sys.executable}" -m drumline "$@"; }}\n'
    return subprocess.run(
        ["bash", "-c", function + line],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, **env},
    )


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        (f"drumline {PLAN} >&-", 0, ""),
        (f"drumline {PLAN} >&- 2>&-", 0, ""),
        ("drumline --help >&-", 0, ""),
        (f"drumline {PLAN} | head -1; exit ${{PIPESTATUS[0]}}", 0, ""),
        (f"drumline {PLAN} >/dev/full", 1, "standard output cannot be written: No space left on device"),
        (f"drumline {PLAN} --json >/dev/full", 1, "standard output cannot be written: No space left on device"),
        ("drumline --help >/dev/full", 1, "standard output cannot be written: No space left on device"),
        ("drumline plan none >/dev/full 2>/dev/full", 2, ""),
        (f"COLUMNS=x drumline {PLAN}", 0, ""),
        (f"COLUMNS=-3 drumline {PLAN}", 0, ""),
        (f"COLUMNS=99999999999999 drumline {PLAN} | wc -c | grep -E '^[0-9]{{3,5}}$'", 0, ""),
    ],
)
def test_commands(line: str, code: int, says: str, tmp_path: Path) -> None:
    done = shell(line, tmp_path)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr and says in done.stderr
    assert says or not done.stderr


TRAIN = "drumline train j.py --plan {plan} --cluster dgx-h100 -o run --log-every 1"


@pytest.mark.parametrize(
    ("line", "note"),
    [
        pytest.param(
            TRAIN.format(plan="dp=2") + " | head -5; exit ${PIPESTATUS[0]}",
            "standard output is closed",
            id="pipe",
        ),
        pytest.param(
            TRAIN.format(plan="dp=1") + " >/dev/full",
            "standard output cannot be written: No space left on device",
            id="full",
        ),
        pytest.param(
            TRAIN.format(plan="dp=1") + " --log-format jsonl 2>&1 | head -1; exit ${PIPESTATUS[0]}",
            "",
            id="both",
            marks=pytest.mark.slow,
        ),
        pytest.param(TRAIN.format(plan="dp=1") + " >&-", "", id="closed", marks=pytest.mark.slow),
    ],
)
def test_training_goes_on_without_its_screen(line: str, note: str, tmp_path: Path) -> None:
    """The ranks of this job print too."""
    (tmp_path / "j.py").write_text(JOB)
    done = shell(line, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count("goes on without it") == bool(note)
    assert note in done.stderr
    assert len((tmp_path / "run" / "steps.jsonl").read_text().splitlines()) == 30
    assert json.loads((tmp_path / "run" / "run.json").read_text())["ranks"] >= 1
    assert (tmp_path / "run" / "report.html").exists()


def test_a_path_that_is_not_ascii_in_the_c_locale(tmp_path: Path) -> None:
    """Also a path that is no UTF-8 at all, and without Python's own UTF-8 mode."""
    for name, env in {
        b"caf\xc3\xa9": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        b"caf\xe9": {"LC_ALL": "C"},
    }.items():
        folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))
        folder.mkdir()
        (folder / "j.py").write_text(JOB.replace("flush=True", ""))
        done = shell(
            "cd caf*; drumline train $PWD/j.py --plan dp=1 --cluster dgx-h100 -o $PWD/run --steps 2", tmp_path, **env
        )
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
        done = shell("drumline report $PWD/caf*/run && drumline report $PWD/caf*/run --json", tmp_path, **env)
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
        (folder / "run" / "report.html").read_text(encoding="utf-8")
        for path in folder.glob("run/*"):
            path.unlink()
        (folder / "j.py").unlink()
        (folder / "run").rmdir()
        folder.rmdir()


def test_a_stream_fails_once(capsys: pytest.CaptureFixture[str]) -> None:
    with open("/dev/full", "w", encoding="ascii") as full, guarded_streams():
        out = GuardedStream(full, "the screen", tolerant=True)
        for _ in range(3):
            out.write("x" * 10_000)
            out.flush()
        out.write("é")  # not ASCII
    assert capsys.readouterr().err == (
        "drumline: the screen cannot be written: No space left on device; the run goes on without it\n"
    )
    with open("/dev/full", "w", encoding="ascii") as full:
        out = GuardedStream(full, "the screen", tolerant=False)
        with pytest.raises(OutputFailed, match="the screen cannot be written"):
            out.write("x" * 100_000)
            out.flush()
        out.write("y")
        with pytest.raises(OutputFailed):
            out.check()


def test_tolerance_ends_with_its_block() -> None:
    with guarded_streams() as out:
        with tolerant_output():
            assert out.tolerant
        assert not out.tolerant
    with tolerant_output():  # nothing to do where nothing is guarded
        pass


class Failing(Sink):
    """Fails with an error that can be set."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.written: list[int] = []

    def write(self, record: StepRecord) -> None:
        if self.error:
            raise self.error
        self.written.append(record.step)

    def close(self) -> None:
        if self.error:
            raise self.error


def test_a_sink_that_fails_is_reported_once() -> None:
    inner, notes = Failing(), list[str]()
    sink = TolerantSink(inner, notes.append)
    inner.error = OSError(28, "No space left on device")
    sink.write(RECORD)
    sink.write(RECORD)
    inner.error = None  # there is space again
    sink.write(RECORD)
    assert inner.written == [0] and len(notes) == 1 and "Failing failed (OSError: [Errno 28] No space" in notes[0]
    inner.error = RuntimeError("the server says no")
    sink.write(RECORD)
    inner.error = None
    sink.write(RECORD)  # not tried again
    sink.close()
    assert inner.written == [0] and len(notes) == 1


def test_a_full_disk_under_the_record_of_steps(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.symlink_to("/dev/full")
    notes: list[str] = []
    sink = TolerantSink(JsonLinesFile(path), notes.append)
    for _ in range(3):
        sink.write(RECORD)
    sink.close()
    assert len(notes) == 1 and "No space left on device" in notes[0]
