"""The doctor: all kinds of failures, limits of control groups, ports, and the verdict on trials."""

from __future__ import annotations

import socket
from pathlib import Path

import broken_operations as broken
import pytest

from drumline.measurement import cgroup
from drumline.measurement.doctor import (
    BackendColumn,
    DoctorFinding,
    OperationTrial,
    backend_matrix,
    columns,
    environment,
    examine,
    judge,
    try_column,
)


def test_all_kinds_of_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations that die or hang end their processes; the next ones run in new processes."""
    monkeypatch.setattr(backend_matrix, "TIMEOUTS", (1.0, 2.0))
    operations = {
        "first": broken.right,
        "wrong": broken.wrong,
        "refused": broken.refused,
        "dies": broken.dies,
        "after a death": broken.right,
        "hangs": broken.hangs,
        "last": broken.right,
    }
    heard: list[str] = []
    trials = try_column(
        BackendColumn("gloo", "cpu", 2), operations=operations, on_trial=lambda t: heard.append(t.operation)
    )
    results = {t.operation: (t.state, t.why) for t in trials}
    assert {name: state for name, (state, _) in results.items()} == {
        "first": "ok",
        "wrong": "wrong",
        "refused": "refused",
        "dies": "aborts",
        "after a death": "ok",
        "hangs": "hangs",
        "last": "ok",
    }, results
    assert results["refused"][1] == "RuntimeError: this backend has no such operation"
    assert results["dies"][1] == "rank 1 was killed by SIGABRT: the last words of rank 1"
    assert results["hangs"][1] == "no answer within 4 s"
    assert heard == list(operations)


def test_a_death_belongs_to_its_operation() -> None:
    """Rank 1 has finished the first operation and would die in the second before rank 0 has recorded the first."""
    trials = try_column(BackendColumn("gloo", "cpu", 2), operations={"slow": broken.slow, "dies": broken.dies})
    assert [(t.operation, t.state) for t in trials] == [("slow", "ok"), ("dies", "aborts")], trials


def test_a_busy_machine_is_not_called_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations that exceed the first timeout, or give up by themselves, are tried again with the second."""
    monkeypatch.setattr(backend_matrix, "TIMEOUTS", (0.25, 10.0))
    operations = {"first": broken.right, "slow": broken.slow, "gives up": broken.gives_up, "last": broken.right}
    trials = try_column(BackendColumn("gloo", "cpu", 2), operations=operations)
    assert [(t.operation, t.state) for t in trials] == [(name, "ok") for name in operations], trials


def test_a_column_that_cannot_start() -> None:
    trials = try_column(BackendColumn("nccl", "cpu", 2), operations={"first": broken.right, "second": broken.right})
    assert {t.state for t in trials} == {"refused"}
    assert all(t.why for t in trials)


def test_a_missing_column() -> None:
    (trial,) = try_column(
        BackendColumn("mpi", "cpu", 2, "mpi4py is not installed: pip"), operations={"x": broken.right}
    )
    assert trial == OperationTrial("mpi", "cpu", "x", "not tried", "mpi4py is not installed: pip")
    assert judge([trial]) == [DoctorFinding("backends", "mpi cpu", "mpi4py is not installed", "note", "pip")]


def test_time_limit() -> None:
    trials = try_column(BackendColumn("gloo", "cpu", 2), operations={"a": broken.right, "b": broken.right}, seconds=-1)
    assert [(t.state, t.why) for t in trials] == [("not tried", "the limit of -1 s was reached")] * 2


@pytest.mark.parametrize(
    ("trial", "state"),
    [
        (OperationTrial("gloo", "cpu", "all_reduce float32", "ok"), "ok"),
        (OperationTrial("gloo", "cpu", "all_reduce float32", "hangs", "no answer"), "problem"),
        (OperationTrial("gloo", "cpu", "all_reduce float32", "refused", "no network"), "problem"),
        (OperationTrial("gloo", "cpu", "all_to_all", "wrong"), "note"),
        (OperationTrial("shm", "cpu", "all_reduce float32", "aborts"), "note"),
        (OperationTrial("shm", "cpu", "all_reduce float32", "refused", "too small"), "note"),
    ],
)
def test_verdict_on_trials(trial: OperationTrial, state: str) -> None:
    (finding,) = judge([trial])
    assert finding.state == state
    assert bool(finding.remedy) == (state != "ok")


def test_untested_operations_are_not_a_problem() -> None:
    done, left = (
        OperationTrial("gloo", "cpu", "all_reduce float32", "ok"),
        OperationTrial("gloo", "cpu", "barrier", "not tried", "the limit of 15 s was reached"),
    )
    (finding,) = judge([done, left])
    assert (finding.state, finding.value) == ("note", "barrier not tried: the limit of 15 s was reached")
    (finding,) = judge([OperationTrial("gloo", "cpu", "barrier", "not tried", "torch was built without gloo")])
    assert finding.state == "problem"


def test_all_columns_have_gloo_first() -> None:
    assert str(columns()[0]) == "gloo cpu"


def test_findings_that_are_not_ok_have_a_remedy() -> None:
    topics: list[str] = []
    findings = examine(topics.append)
    assert topics == list(dict.fromkeys(f.topic for f in findings))
    assert {"CPU cores", "memory", "open files", "loopback", "torch", "C compiler"} <= {f.name for f in findings}
    assert all(f.remedy for f in findings if f.state != "ok")
    assert all(not f.remedy for f in findings if f.state == "ok")


def test_port_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        finding = next(f for f in environment.network() if f.name == f"port {port}")
    assert (finding.value, finding.state) == ("taken", "note")
    assert "--master-port" in finding.remedy


def test_missing_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    finding = next(f for f in environment.network() if f.name == "gloo's interface")
    assert finding.state == "note"
    assert "eth77" in finding.value
    assert "lo" in finding.remedy


def group(folder: Path, own: str, **files: str) -> tuple[Path, Path]:
    """A tree of control groups, and the listing of this process's groups."""
    for name, text in files.items():
        file = folder / "fs" / name.replace("__", "/").replace("_DOT_", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (folder / "own").write_text(own)
    return folder / "fs", folder / "own"


def quota_cores(listing: Path, root: Path) -> float | None:
    quota = cgroup.cpu_quota(listing, root)
    return quota.cores if quota else None


def test_limits_of_control_groups(tmp_path: Path) -> None:
    """Version 2: the tightest limit of the group and its parents counts."""
    root, own = group(
        tmp_path,
        "0::/a/b\n",
        cpu_DOT_max="max 100000\n",
        a__cpu_DOT_max="150000 100000\n",
        a__b__cpu_DOT_max="300000 100000\n",
        a__memory_DOT_max="1073741824\n",
        a__b__memory_DOT_max="max\n",
        a__b__pids_DOT_max="77\n",
    )
    assert quota_cores(own, root) == 1.5
    assert cgroup.memory_limit(own, root) == 1 << 30
    assert cgroup.process_limit(own, root) == 77


def test_limits_of_old_control_groups(tmp_path: Path) -> None:
    root, own = group(
        tmp_path,
        "4:memory:/docker/x\n3:cpu,cpuacct:/\n",
        cpu__cpu_DOT_cfs_quota_us="50000\n",
        cpu__cpu_DOT_cfs_period_us="100000\n",
        memory__memory_DOT_limit_in_bytes="9223372036854771712\n",
    )
    assert quota_cores(own, root) == 0.5
    assert cgroup.memory_limit(own, root) is None
    assert cgroup.process_limit(own, root) is None


def test_no_control_groups(tmp_path: Path) -> None:
    assert cgroup.cpu_quota(tmp_path / "absent", tmp_path) is None
    assert cgroup.memory_limit(tmp_path / "absent", tmp_path) is None
