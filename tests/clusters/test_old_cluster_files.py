"""Cluster files of earlier releases are read: old keys and values become the current ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from drumline.clusters import Cluster, CollectiveTable, PartialOccupancy, ShapeTimes
from drumline.clusters.links import Link, RankLink
from drumline.core import files
from drumline.core.errors import ClusterError

OLD = """\
name = "vm"
straggle = 1.25
stall = 0.012
unit = 0.03
spread = 0.15

[device]
name = "core"
kind = "cpu"
memory = 8e9
bandwidth = 57e9
launch = 3e-6

[device.peak]
fp32 = 65e9

[device.start]
update = 2e-5
each_forward = 1.25e-4
each_backward = 1e-4
again = 1e-3
watched = 3e-5
look = 0.02

[device.situ]
update = 2.5
compute_forward = 1.5

[[device.curve]]
kernel = "pulse_matmul"
dtype = "fp32"
sizes = [1e6]
rates = [1e9]

[[device.curve]]
kernel = "fresh"
dtype = "fp32"
sizes = [1e6]
rates = [2e9]

[[device.cloud]]
kernel = "matmul"
dtype = "fp32"
shapes = [[1.0, 2.0, 3.0]]
seconds = [1e-6]

[node]
devices = 2
link = { alpha = 1e-5, bandwidth = 1e9, wire = "nvswitch" }
reduces = true

[fewer.1]
pace = 0.75
straggle = 1.5
stall = 0.01
unit = 0.02

[[fewer.1.collective]]
collective = "all_reduce"
transport = "shm"
ranks = 1
bytes = [8.0]
seconds = [1e-5]

[[pair]]
src = 0
dst = 1
link = { alpha = 1e-5, bandwidth = 1e9, wire = "nvlink" }

[origin]
stall = "small steps"
"device.situ" = "two small steps"
"device.start.each_forward" = "a step"
"node.link.wire" = "data sheet"
"""


@pytest.fixture
def old(tmp_path: Path) -> Cluster:
    path = tmp_path / "old.toml"
    path.write_text(OLD)
    return Cluster.load(path)


def test_old_keys_of_the_cluster(old: Cluster) -> None:
    assert (old.straggler_slowdown, old.mid_step_message_s, old.sharded_unit_s) == (1.25, 0.012, 0.03)
    assert old.measurement_spread == 0.15
    table = CollectiveTable("all_reduce", "shm", 1, (8.0,), (1e-5,))
    assert old.partial_occupancy == {"1": PartialOccupancy(0.75, 1.5, 0.01, 0.02, (table,))}
    assert old.rank_link == (RankLink(0, 1, Link(1e-5, 1e9, "nvlink")),)


def test_old_keys_of_devices_and_links(old: Cluster) -> None:
    assert old.device.host_overhead == {
        "update": 2e-5,
        "operator_forward": 1.25e-4,
        "operator_backward": 1e-4,
        "recompute": 1e-3,
        "selective_recompute": 3e-5,
        "speed_probe": 0.02,
    }
    assert old.device.in_step_slowdown == {"update": 2.5, "compute_forward": 1.5}
    assert old.device.shape_times == (ShapeTimes("matmul", "fp32", ((1.0, 2.0, 3.0),), (1e-6,)),)
    assert [curve.kernel for curve in old.device.curve] == ["probe_matmul", "new_pages"]
    assert old.node.link.type == "nvswitch" and old.node.in_switch_reduction


def test_old_keys_in_origins(old: Cluster) -> None:
    assert old.origin_of("mid_step_message_s") == "small steps"
    assert old.origin_of("device.in_step_slowdown") == "two small steps"
    assert old.origin_of("node.link.type") == "data sheet"


def test_new_keys_are_written(old: Cluster, tmp_path: Path) -> None:
    old.save(tmp_path / "new.toml")
    assert Cluster.load(tmp_path / "new.toml") == old
    table = files.read_toml(tmp_path / "new.toml")
    assert not {"fewer", "straggle", "stall", "unit", "spread", "pair"} & set(table)
    assert not {"start", "situ", "cloud"} & set(table["device"])
    assert not {"wire", "reduces"} & (set(table["node"]) | set(table["node"]["link"]))


def test_a_number_alone_is_a_compute_factor(tmp_path: Path) -> None:
    text = OLD[: OLD.index("[fewer.1]")] + "[fewer]\n1 = 0.5\n"
    (tmp_path / "old.toml").write_text(text)
    assert Cluster.load(tmp_path / "old.toml").partial_occupancy == {"1": PartialOccupancy(0.5)}


@pytest.mark.parametrize(
    ("good", "bad", "key", "line"),
    [
        ("stall = 0.012", 'stall = "fast"', "mid_step_message_s", 3),
        ("pace = 0.75", "pace = -1", "partial_occupancy.1.compute_factor", OLD[: OLD.index("pace")].count("\n") + 1),
        ("compute_forward = 1.5", "compute_forward = 0", "device.in_step_slowdown.compute_forward", 27),
    ],
)
def test_bad_values_at_old_keys_have_a_line(tmp_path: Path, good: str, bad: str, key: str, line: int) -> None:
    path = tmp_path / "old.toml"
    path.write_text(OLD.replace(good, bad, 1))
    with pytest.raises(ClusterError) as e:
        Cluster.load(path)
    assert e.value.where == f"{path}: {key} (line {line})"


def test_both_names_of_a_key_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "old.toml"
    path.write_text("mid_step_message_s = 0.5\n" + OLD)
    with pytest.raises(ClusterError, match="unknown key 'stall'"):
        Cluster.load(path)


def test_current_files_do_not_change(old: Cluster, tmp_path: Path) -> None:
    old.save(tmp_path / "a.toml")
    Cluster.load(tmp_path / "a.toml").save(tmp_path / "b.toml")
    assert (tmp_path / "a.toml").read_text() == (tmp_path / "b.toml").read_text()
    assert dataclasses.replace(old) == old
