"""`drumline doctor` as a user types it: text, JSON, narrow terminals, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from drumline.cli import app
from drumline.measurement import doctor
from drumline.measurement.doctor import DoctorFinding

TOPICS = ("devices", "memory", "shared memory", "limits", "disk", "network", "clock", "versions", "terminal")


def drumline(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "drumline", "doctor", *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, **env},
    )


def test_quick() -> None:
    done = drumline("--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if line in TOPICS] == list(TOPICS)
    assert any(line.startswith("  ok      CPU cores: ") for line in lines)
    assert lines[-1].startswith("Drumline runs here; ")
    assert "operations" not in done.stdout


@pytest.mark.slow
def test_everything_as_json() -> None:
    done = drumline("--json")
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(done.stdout)
    assert set(document) == {"findings", "matrix", "problems", "notes", "seconds"}
    assert document["problems"] == 0
    assert document["notes"] == sum(f["state"] == "note" for f in document["findings"])
    assert {"topic", "name", "value", "state", "remedy"} == set(document["findings"][0])
    tried = {(t["backend"], t["device"], t["operation"]): t["state"] for t in document["matrix"]}
    assert tried["gloo", "cpu", "all_reduce float32"] == "ok"
    assert tried["shm", "cpu", "all_reduce bfloat16"] == "ok"
    assert {op for b, d, op in tried if (b, d) == ("mpi", "cpu")} == {
        op for b, d, op in tried if (b, d) == ("gloo", "cpu")
    }
    assert done.stderr == ""


def run(
    monkeypatch: pytest.MonkeyPatch, findings: list[DoctorFinding], trials: list[doctor.OperationTrial], *arguments: str
) -> tuple[int, str]:
    """The command in this process, with the given findings."""
    monkeypatch.setattr(doctor, "examine", lambda on_topic: findings)
    monkeypatch.setattr(doctor, "columns", lambda: [doctor.BackendColumn("gloo", "cpu", 2)])
    monkeypatch.setattr(doctor, "try_column", lambda column, **_: trials)
    done = CliRunner().invoke(app, ["doctor", *arguments])
    return done.exit_code, done.stdout


def test_a_problem_ends_with_2(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = DoctorFinding("network", "loopback", "refused", "problem", "ip link set lo up")
    code, text = run(
        monkeypatch, [problem], [doctor.OperationTrial("gloo", "cpu", "barrier", "hangs", "no answer within 8 s")]
    )
    assert code == 2
    assert "  problem loopback: refused\n          try: ip link set lo up\n" in text
    assert "  problem gloo cpu: barrier hangs: no answer within 8 s\n" in text
    assert "Drumline cannot run here: 2 problems" in text


def test_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = [
        doctor.OperationTrial("gloo", "cpu", "barrier", "ok"),
        doctor.OperationTrial("gloo", "cpu", "all_gather", "ok"),
        doctor.OperationTrial("shm", "cpu", "barrier", "aborts", "rank 1 was killed by SIGABRT"),
        doctor.OperationTrial("shm", "cpu", "all_gather", "refused", "RuntimeError: no"),
    ]
    monkeypatch.setenv("COLUMNS", "100")
    code, text = run(monkeypatch, [], trials)
    assert code == 0
    assert "  operation   gloo cpu  shm cpu" in text
    assert "  barrier     ok        ABORTS" in text
    assert "  all_gather  ok        no" in text
    assert "  shm cpu: barrier: aborts (rank 1 was killed by SIGABRT)" in text
    monkeypatch.setenv("COLUMNS", "40")
    code, text = run(monkeypatch, [], trials)
    assert "  gloo cpu: 2 of 2 work" in text
    assert "  shm cpu: all_gather: refused (RuntimeError: no)" in text
    assert "operation   gloo" not in text
