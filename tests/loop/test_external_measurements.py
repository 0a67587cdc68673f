"""Measurements of joined ranks: made once, kept by every host and by the run, and never made again."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from drumline.clusters import Cluster, load
from drumline.core.errors import PlanError
from drumline.loop import external_ranks, measure, train, verify
from drumline.loop.measure import cached_cluster, machine_file, read_measurement, store_measurement, this_machine

MACHINE = load("dgx-h100").with_devices(2)


@dataclass
class FakeRanks:
    """Joined ranks that run nothing."""

    size: int = 4
    hosts: int = 2
    run_folder: Path | None = None

    def check_size(self, what: str, ranks: int) -> None:
        if ranks != self.size:
            raise PlanError(f"{what} needs {ranks}")


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeRanks:
    joined = FakeRanks()
    monkeypatch.setenv("DRUMLINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(measure, "current_ranks", lambda: joined)
    monkeypatch.setattr(measure, "local_devices", lambda: 1)
    return joined


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the tasks that were sent to the ranks; `read_measurement` finds nothing."""
    tasks: list[str] = []

    def run_ranks(function: Any, *arguments: Any, ranks: int, **_: Any) -> list[Any]:
        tasks.append(function.__name__)
        return [""] * ranks

    monkeypatch.setattr("drumline.launchers.run_ranks", run_ranks)
    monkeypatch.setattr(measure, "measure_local", lambda ranks, **_: tasks.append(f"measure {ranks}") or MACHINE)
    return tasks


def test_hosts_are_measured_once_and_every_host_keeps_it(ranks: FakeRanks, asked: list[str]) -> None:
    first = this_machine(4, notify=lambda text: None)
    assert asked == ["read_measurement", "measure 4", "store_measurement"]
    assert machine_file(4).name.endswith("-2x2.toml")
    assert this_machine(4) == first
    assert len(asked) == 3  # from the file


def test_the_first_start_of_a_run_keeps_it_at_once(ranks: FakeRanks, asked: list[str], tmp_path: Path) -> None:
    assert external_ranks._kept_measurement(tmp_path / "run", ranks) is None  # type: ignore[arg-type]
    this_machine(4, notify=lambda text: None)
    machine_file(4).unlink()  # another host
    assert external_ranks._kept_measurement(tmp_path / "run", ranks) == tmp_path / "run" / "cluster.toml"  # type: ignore[arg-type]


def test_a_host_that_replaces_another_asks_the_others(
    ranks: FakeRanks, asked: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    MACHINE.save(tmp_path / "theirs.toml")
    text = (tmp_path / "theirs.toml").read_text()
    monkeypatch.setattr("drumline.launchers.run_ranks", lambda function, *_, ranks: ["", "", text, text])
    assert this_machine(4) == MACHINE
    assert asked == []
    assert machine_file(4).read_text() == text


def test_measurements_that_a_rank_reads_and_stores(ranks: FakeRanks) -> None:
    assert read_measurement(None, 4, 2) == ""
    store_measurement(None, "text", 4, 2)
    store_measurement(None, "another", 4, 2)
    assert read_measurement(None, 4, 2) == "text"
    assert read_measurement(None, 4, 1) == ""


def test_one_host_uses_what_local_ranks_have_measured(ranks: FakeRanks) -> None:
    ranks.hosts = 1
    assert machine_file(4) == cached_cluster(4)
    MACHINE.save(cached_cluster(8))
    assert machine_file(8) == cached_cluster(8)


def test_a_run_keeps_its_measurement(ranks: FakeRanks, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert external_ranks._kept_measurement(run, ranks) is None  # type: ignore[arg-type]
    MACHINE.save(machine_file(4))
    assert external_ranks._kept_measurement(run, ranks) is None  # type: ignore[arg-type]
    machine_file(4).unlink()  # another host
    kept = external_ranks._kept_measurement(run, ranks)  # type: ignore[arg-type]
    assert kept is not None
    assert Cluster.load(kept) == MACHINE


@pytest.mark.parametrize("verb", [train.train, verify.verify])
def test_the_launcher_decides_the_number_of_ranks(verb: Any, ranks: FakeRanks) -> None:
    def fitted(*words: Any, **options: Any) -> dict[str, Any]:
        bound = inspect.signature(verb).bind("job.py", *words, **options)
        external_ranks._fit(bound, verb, ranks)  # type: ignore[arg-type]
        return bound.arguments

    assert fitted("dp=4")["ranks"] == 4
    assert fitted("auto", ranks=4)["ranks"] == 4
    for words, options in ((["dp=2"], {}), (["auto"], {"ranks": 2}), (["dp=4,backend=threads"], {})):
        with pytest.raises(PlanError):
            fitted(*words, **options)
