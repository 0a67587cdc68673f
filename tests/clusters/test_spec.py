"""The `Cluster` value: its file form, its errors and its arithmetic."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from drumline.clusters import Cluster, CollectiveTable, KernelCurve, Link, LogPTimes, Node, load
from drumline.clusters.spec import SET_BY_USER
from drumline.core.errors import ClusterError

GOOD = """
name = "mine"
overlap = 0.5
measurement_spread = 0.02

[device]
name = "Something"
kind = "cuda"
memory = "40GB"
bandwidth = "1555GB/s"
launch = "5us"
context = "1.5GB"
peak = { bf16 = "312TFLOP/s", fp32 = 19.5e12 }

[[device.curve]]
kernel = "matmul"
dtype = "bf16"
sizes = [1e6, 1e8, 1e10]
rates = [1e12, 1e13, 1e14]

[node]
devices = 8
link = { alpha = "3us", bandwidth = "300GB/s" }

[network]
nodes = 4
link = { alpha = "10us", bandwidth = "200Gb/s" }

[[collective]]
collective = "all_reduce"
transport = "nccl"
ranks = 8
bytes = [1e3, 1e6]
seconds = [2e-5, 1e-4]

[origin]
device = "data sheet"
"device.peak" = "measured yesterday"
node = "measured"
"node.link.alpha" = "estimate"
"""


def read(folder: Path, text: str) -> Cluster:
    path = folder / "mine.toml"
    path.write_text(text)
    return Cluster.load(path)


def refused(folder: Path, old: str, new: str) -> str:
    """The error for GOOD with `old` replaced by `new`."""
    assert GOOD.count(old) == 1, f"{old!r} must occur once in the good file"
    with pytest.raises(ClusterError) as e:
        read(folder, GOOD.replace(old, new))
    assert e.value.exit_code == 2
    return str(e.value)


@pytest.fixture
def good(tmp_path: Path) -> Cluster:
    return read(tmp_path, GOOD)


def test_units_are_parsed(good: Cluster) -> None:
    assert good.device.memory == 40e9
    assert good.device.bandwidth == 1555e9
    assert good.device.peak == {"bf16": 312e12, "fp32": 19.5e12}
    assert good.device.launch == pytest.approx(5e-6)
    assert good.network is not None
    assert good.network.link.bandwidth == 25e9
    assert good.network.link.beta == 1 / 25e9
    assert good.devices == 32


def test_file_form_reads_back_equal(good: Cluster, tmp_path: Path) -> None:
    again = tmp_path / "again.toml"
    good.save(again)
    assert Cluster.load(again) == good
    assert again.read_text().startswith("# Cluster mine. SI units")


def test_every_number_has_an_origin(good: Cluster) -> None:
    origins = {key: origin for key, _, origin in good.numbers()}
    assert origins["device.memory"] == "data sheet"
    assert origins["device.curve.rates"] == "data sheet"
    assert origins["device.peak.bf16"] == "measured yesterday"
    assert origins["node.link.bandwidth"] == "measured"
    assert origins["node.link.alpha"] == "estimate"
    assert origins["network.link.alpha"] == SET_BY_USER
    assert ("node.devices", 8.0, "measured") in list(good.numbers())
    assert good.measured


def test_an_origin_matches_whole_words_only(good: Cluster) -> None:
    c = dataclasses.replace(good, origin={"node.link.a": "wrong", "node.link.alpha": "right"})
    assert c.origin_of("node.link.alpha") == "right"
    assert dataclasses.replace(good, origin={"node.link.a": "wrong"}).origin_of("node.link.alpha") == SET_BY_USER


@pytest.mark.parametrize(
    ("old", "new", "key", "near"),
    [
        ('memory = "40GB"', 'memory = "40GB"\nmemroy = "2GB"', "device.memroy", "memory"),
        ("measurement_spread = 0.02", "measurment_spread = 0.02", "measurment_spread", "measurement_spread"),
        ("devices = 8", "devices = 8\ndevice = 8", "node.device", "devices"),
        ('{ alpha = "3us",', '{ alpha = "3us", bandwith = 1,', "node.link.bandwith", "bandwidth"),
        ('kernel = "matmul"', 'kernel = "matmul"\nrate = [1.0]', "device.curve.0.rate", "rates"),
    ],
)
def test_unknown_keys_are_refused_with_the_nearest(tmp_path: Path, old: str, new: str, key: str, near: str) -> None:
    message = refused(tmp_path, old, new)
    assert f"unknown key {key.split('.')[-1]!r}" in message
    assert f"mine.toml: {key}" in message
    assert f"Did you mean {near!r}?" in message


@pytest.mark.parametrize(
    ("old", "new", "key", "rule"),
    [
        ('bandwidth = "300GB/s"', "bandwidth = 0", "node.link.bandwidth", "greater than 0"),
        ('bandwidth = "300GB/s"', 'bandwidth = "-3GB/s"', "node.link.bandwidth", "greater than 0"),
        ('bandwidth = "300GB/s"', 'bandwidth = "300GB"', "node.link.bandwidth", "not a rate"),
        ('bandwidth = "300GB/s"', 'bandwidth = "fast"', "node.link.bandwidth", "a rate such as 400GB/s"),
        ('bandwidth = "300GB/s"', "bandwidth = nan", "node.link.bandwidth", "a rate such as 400GB/s"),
        ('bandwidth = "300GB/s"', "bandwidth = inf", "node.link.bandwidth", "a rate such as 400GB/s"),
        ('bandwidth = "300GB/s"', "bandwidth = true", "node.link.bandwidth", "a rate such as 400GB/s"),
        ('alpha = "3us"', 'alpha = "3GB"', "node.link.alpha", "not a time"),
        ('alpha = "3us"', "alpha = -1e-6", "node.link.alpha", "greater than or equal to 0"),
        ('memory = "40GB"', 'memory = "40us"', "device.memory", "no known unit"),
        ('memory = "40GB"', 'memory = "forty"', "device.memory", "a size such as 80GB"),
        ('bf16 = "312TFLOP/s"', 'bf16 = "312GB"', "device.peak.bf16", "rate of operations"),
        ('launch = "5us"', 'launch = "5TFLOP/s"', "device.launch", "not a time"),
        ("devices = 8", "devices = 0", "node.devices", "greater than or equal to 1"),
        ("devices = 8", 'devices = "eight"', "node.devices", "integer"),
        ("devices = 8", "devices = 8.5", "node.devices", "integer"),
        ("overlap = 0.5", "overlap = 1.5", "overlap", "less than or equal to 1"),
        ("overlap = 0.5", 'overlap = "half"', "overlap", "number"),
        ('kind = "cuda"', 'kind = "abacus"', "device.kind", "'cpu' or 'cuda'"),
        ("sizes = [1e6, 1e8, 1e10]", "sizes = [1e6, 1e8]", "device.curve.0", "2 sizes but 3 rates"),
        ("sizes = [1e6, 1e8, 1e10]", "sizes = [1e6, 1e6, 1e7]", "device.curve.0", "must be positive and grow"),
        ("rates = [1e12, 1e13, 1e14]", "rates = [1e12, 0, 1e14]", "device.curve.0.rates.1", "greater than 0"),
        ("bytes = [1e3, 1e6]", "bytes = [0, 1e6]", "collective.0", "must be positive and grow"),
        ("seconds = [2e-5, 1e-4]", "seconds = [2e-5]", "collective.0", "2 sizes but 1 times"),
    ],
)
def test_impossible_values_are_refused_by_file_and_key(tmp_path: Path, old: str, new: str, key: str, rule: str) -> None:
    message = refused(tmp_path, old, new)
    assert f"mine.toml: {key}" in message
    assert rule in message
    assert "Traceback" not in message


@pytest.mark.parametrize(
    ("old", "key"),
    [
        ('link = { alpha = "3us", bandwidth = "300GB/s" }\n', "node.link"),
        ('memory = "40GB"\n', "device.memory"),
        ('name = "mine"\n', "name"),
        ('launch = "5us"\n', "device.launch"),
    ],
)
def test_missing_keys_are_named(tmp_path: Path, old: str, key: str) -> None:
    message = refused(tmp_path, old, "")
    assert f"key {key.split('.')[-1]!r} is missing" in message
    assert f"mine.toml: {key}" in message


def test_a_file_that_is_not_toml(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="is not TOML"):
        read(tmp_path, "name = ")
    with pytest.raises(ClusterError, match=r"Did you mean 'mine\.toml'"):
        Cluster.load(tmp_path / "mime.toml")


def test_with_devices(good: Cluster) -> None:
    part = good.with_devices(4)
    assert (part.devices, part.node.devices, part.network) == (4, 4, None)
    more = good.with_devices(64)
    assert more.network is not None
    assert (more.devices, more.node.devices, more.network.nodes) == (64, 8, 8)
    assert good.with_devices(32) == good


def test_devices_that_do_not_fill_nodes(good: Cluster) -> None:
    with pytest.raises(ClusterError) as e:
        good.with_devices(20)
    assert "20 devices do not fill nodes of 8" in str(e.value)
    assert "20 % 8 = 4" in e.value.rule
    assert "--devices 16 or 24" in e.value.fix
    with pytest.raises(ClusterError, match="0 devices"):
        good.with_devices(0)
    with pytest.raises(ClusterError, match=r"one node of 8\n.*link between nodes"):
        dataclasses.replace(good, network=None).with_devices(16)


def test_memory_from_the_command_line(good: Cluster) -> None:
    small = good.with_memory(8e9)
    assert small.device.memory == 8e9
    assert small.origin_of("device.memory") == "given on the command line"
    assert good.origin_of("device.memory") == "data sheet"
    with pytest.raises(ClusterError, match="memory > 0"):
        good.with_memory(0)


def test_a_curve_is_straight_in_log_log_and_flat_outside() -> None:
    curve = KernelCurve("matmul", "bf16", (1e6, 1e8), (1e12, 1e14))
    assert curve.at(1e7) == pytest.approx(1e13)
    assert curve.at(1) == 1e12
    assert curve.at(1e12) == 1e14
    assert KernelCurve("matmul", "bf16", (1e6,), (1e12,)).at(1e6) == 1e12


def test_a_table_is_flat_below_and_linear_above() -> None:
    table = CollectiveTable("all_reduce", "nccl", 8, (1e3, 1e5), (1e-5, 1e-3))
    assert table.at(1) == 1e-5
    assert table.at(1e4) == pytest.approx(1e-4)
    assert table.at(1e6) == pytest.approx(1e-2)


def test_tables_match_the_number_of_ranks_exactly(good: Cluster) -> None:
    assert good.table("all_reduce", 8) is good.collective[0]
    assert good.table("all_reduce", 4) is None
    assert good.table("all_gather", 8) is None


def test_text_form(good: Cluster) -> None:
    assert str(good).splitlines() == [
        "cluster mine: 32 x Something, 37.3 GiB each",
        "  peak bf16 312 TFLOP/s, fp32 19.5 TFLOP/s (measured yesterday)",
        "  memory 1.55 TB/s, launch 5.00 us (data sheet)",
        "  node: 8 devices, alpha 3.00 us, 300 GB/s (measured)",
        "  network: 4 nodes, alpha 10.0 us, 25.0 GB/s (set by the user)",
    ]


def test_short_messages_are_printed_stored_and_checked(tmp_path: Path) -> None:
    cluster = dataclasses.replace(load("dgx-a100"), node=Node(8, Link(3e-6, 3e11, logp=LogPTimes(2e-6, 5e-7, 1e-6))))
    assert "alpha 3.00 us, 300 GB/s, L 2.00 us, o 500 ns, g 1.00 us" in str(cluster)
    cluster.save(tmp_path / "c.toml")
    assert Cluster.load(tmp_path / "c.toml") == cluster
    text = (tmp_path / "c.toml").read_text()
    (tmp_path / "c.toml").write_text(text.replace("2e-06", "2"))
    with pytest.raises(ClusterError, match="node.link.logp.L: 2 seconds is implausible"):
        Cluster.load(tmp_path / "c.toml")
