"""The doctor finds what is broken: each way of going wrong, limits of control groups, ports, what the trials mean."""

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


def test_every_way_to_go_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """What dies or hangs ends its processes, and what stands after it is tried in new ones."""
    monkeypatch.setattr(backend_matrix, "PATIENCE", (1.0, 2.0))
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
    found = {t.operation: (t.state, t.why) for t in trials}
    assert {name: state for name, (state, _) in found.items()} == {
        "first": "ok",
        "wrong": "wrong",
        "refused": "refused",
        "dies": "aborts",
        "after a death": "ok",
        "hangs": "hangs",
        "last": "ok",
    }, found
    assert found["refused"][1] == "RuntimeError: this backend has no such operation"
    assert found["dies"][1] == "rank 1 was ended by SIGABRT: the last words of rank 1"
    assert found["hangs"][1] == "no answer within 4 s"
    assert heard == list(operations)


def test_a_death_is_that_of_its_own_operation() -> None:
    """Rank 1 is done with the first, and would die in the second before rank 0 has said how the first went."""
    trials = try_column(BackendColumn("gloo", "cpu", 2), operations={"slow": broken.slow, "dies": broken.dies})
    assert [(t.operation, t.state) for t in trials] == [("slow", "ok"), ("dies", "aborts")], trials


def test_a_busy_machine_is_not_a_broken_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes longer than the first patience, or gives up by itself, is tried again with the second."""
    monkeypatch.setattr(backend_matrix, "PATIENCE", (0.25, 10.0))
    operations = {"first": broken.right, "slow": broken.slow, "gives up": broken.gives_up, "last": broken.right}
    trials = try_column(BackendColumn("gloo", "cpu", 2), operations=operations)
    assert [(t.operation, t.state) for t in trials] == [(name, "ok") for name in operations], trials


def test_a_column_that_cannot_start() -> None:
    trials = try_column(BackendColumn("nccl", "cpu", 2), operations={"first": broken.right, "second": broken.right})
    assert {t.state for t in trials} == {"refused"}
    assert all(t.why for t in trials)


def test_a_column_that_is_not_there() -> None:
    (trial,) = try_column(
        BackendColumn("mpi", "cpu", 2, "mpi4py is not installed: pip"), operations={"x": broken.right}
    )
    assert trial == OperationTrial("mpi", "cpu", "x", "not tried", "mpi4py is not installed: pip")
    assert judge([trial]) == [DoctorFinding("backends", "mpi cpu", "mpi4py is not installed", "note", "pip")]


def test_time_that_is_over() -> None:
    trials = try_column(BackendColumn("gloo", "cpu", 2), operations={"a": broken.right, "b": broken.right}, seconds=-1)
    assert [(t.state, t.why) for t in trials] == [("not tried", "-1 s were over")] * 2


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
def test_what_trials_mean(trial: OperationTrial, state: str) -> None:
    (finding,) = judge([trial])
    assert finding.state == state
    assert bool(finding.remedy) == (state != "ok")


def test_what_there_was_no_time_for_is_no_problem() -> None:
    done, left = (
        OperationTrial("gloo", "cpu", "all_reduce float32", "ok"),
        OperationTrial("gloo", "cpu", "barrier", "not tried", "15 s were over"),
    )
    (finding,) = judge([done, left])
    assert (finding.state, finding.value) == ("note", "barrier not tried: 15 s were over")
    (finding,) = judge([OperationTrial("gloo", "cpu", "barrier", "not tried", "torch was built without gloo")])
    assert finding.state == "problem"


def test_all_columns_have_gloo_first() -> None:
    assert str(columns()[0]) == "gloo cpu"


def test_each_finding_that_is_not_ok_has_a_remedy() -> None:
    topics: list[str] = []
    found = examine(topics.append)
    assert topics == list(dict.fromkeys(f.topic for f in found))
    assert {"CPU cores", "memory", "open files", "loopback", "torch", "C compiler"} <= {f.name for f in found}
    assert all(f.remedy for f in found if f.state != "ok")
    assert all(not f.remedy for f in found if f.state == "ok")


def test_a_port_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        finding = next(f for f in environment.network() if f.name == f"port {port}")
    assert (finding.value, finding.state) == ("taken", "note")
    assert "--master-port" in finding.remedy


def test_an_interface_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    finding = next(f for f in environment.network() if f.name == "gloo's interface")
    assert finding.state == "note"
    assert "eth77" in finding.value
    assert "lo" in finding.remedy


def group(folder: Path, own: str, **files: str) -> tuple[Path, Path]:
    """A tree of control groups, and the file that says where this process is in it."""
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
    """Version 2: the tightest on the way up counts."""
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
