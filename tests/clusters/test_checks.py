"""Errors about cluster files name file, line and key."""

from __future__ import annotations

from pathlib import Path

import pytest

import drumline.clusters
from drumline.clusters import Cluster
from drumline.clusters.checks import line_of
from drumline.core.errors import ClusterError

FILE = """\
name = "mine"

[device]
name = "Something"
kind = "cuda"
memory = "40GB"
bandwidth = "1555GB/s"
launch = "5us"
peak = { bf16 = "312TFLOP/s" }

[[device.curve]]
kernel = "matmul"
dtype = "bf16"
sizes = [1e6]
rates = [1e12]

[[device.curve]]  # the second
kernel = "conv"
dtype = "bf16"
sizes = [1e6]
rates = [1e12]

[node]
devices = 8
link.alpha = "3us"
link.bandwidth = "300GB/s"

[network]
nodes = 4

[network.link]
alpha = "10us"
bandwidth = "200Gb/s"

[origin]
"node.link.alpha" = "estimate"
"""


@pytest.mark.parametrize(
    ("key", "line"),
    [
        ("name", 1),
        ("device.memory", 6),
        ("device.peak.bf16", 9),
        ("device.curve.0.rates", 15),
        ("device.curve.1.rates", 21),
        ("device.curve.1.rates.0", 21),
        ("node.link.alpha", 25),
        ("network.link.bandwidth", 33),
        ("network.link.type", 31),
        ("node.in_switch_reduction", 23),
        ("overlap", None),
        ("device.curve.2.rates", 3),
    ],
)
def test_line_of_a_key(key: str, line: int | None) -> None:
    assert line_of(FILE, key) == line


@pytest.mark.parametrize(
    ("old", "new", "key", "line", "says"),
    [
        ('link.alpha = "3us"', 'link.alpha = "-3us"', "node.link.alpha", 25, "greater than or equal to 0"),
        ('alpha = "10us"', "alpha = -1e-5", "network.link.alpha", 32, "greater than or equal to 0"),
        ('bandwidth = "300GB/s"', 'bandwidth = "3us"', "node.link.bandwidth", 26, "'3us' is not a rate"),
        ('link.alpha = "3us"', 'link.alpha = "300GB/s"', "node.link.alpha", 25, "'300GB/s' is not a time"),
        ('memory = "40GB"', 'memory = "312TFLOP/s"', "device.memory", 6, "no known unit"),
        ('bandwidth = "300GB/s"', "bandwidth = 300", "node.link.bandwidth", 26, "is a unit missing?"),
        ('alpha = "10us"', "alpha = 10", "network.link.alpha", 32, "is a unit missing?"),
        ('memory = "40GB"', "memory = 40", "device.memory", 6, "is a unit missing?"),
        ('launch = "5us"', 'launch = "5min"', "device.launch", 8, "is a unit missing?"),
        ('bandwidth = "200Gb/s"\n', "", "network.link.bandwidth", 31, "is missing"),
        ('link.alpha = "3us"\nlink.bandwidth = "300GB/s"\n', "", "node.link", 23, "is missing"),
        ("rates = [1e12]\n\n[node]", "rates = [0]\n\n[node]", "device.curve.1.rates.0", 21, "greater than 0"),
        ("nodes = 4", "node = 4", "network.node", 29, "Did you mean 'nodes'?"),
    ],
)
def test_errors_name_file_line_and_key(tmp_path: Path, old: str, new: str, key: str, line: int, says: str) -> None:
    assert FILE.count(old) == 1
    path = tmp_path / "mine.toml"
    path.write_text(FILE.replace(old, new))
    with pytest.raises(ClusterError) as e:
        Cluster.load(path)
    assert e.value.where == f"{path}: {key} (line {line})"
    assert says in str(e.value)


def test_all_wrong_keys_are_listed_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    text = (
        FILE.replace("nodes = 4", "node = 4")
        .replace('link.alpha = "3us"', "")
        .replace('launch = "5us"', 'launch = "5GB"')
    )
    path.write_text(text)
    with pytest.raises(ClusterError) as e:
        Cluster.load(path)
    assert str(e.value).splitlines() == [
        "3 keys are wrong or missing",
        f"  where: {path}",
        "  rule:  line 8, [device]: device.launch: '5GB' is not a time: the units are s, ms, us, µs, ns, min, h; given '5GB'",
        "         line 29, [network]: unknown key 'node'; Did you mean 'nodes'?",
        "         line 23, [node.link]: key 'alpha' is missing",
    ]


def test_a_valid_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(FILE)
    assert Cluster.load(path).devices == 32


def test_a_file_that_is_not_toml_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(FILE.replace("nodes = 4", "nodes 4"))
    with pytest.raises(ClusterError, match=r"not TOML(.|\n)*line 29"):
        Cluster.load(path)


NETWORK = """
[network]
nodes = 8
link = { alpha = "10us", bandwidth = "100GB/s" }
"""


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ('topology = "rial"', "rial is none of fat-tree, rail, ethernet, torus. Did you mean 'rail'?"),
        ("topologie = 'rail'", "Did you mean 'topology'?"),
        ('topology = "torus"', "a torus of 8 nodes in the shape (none)"),
        ('topology = "torus"\nshape = [4, 4]', 'network.shape = "2x4"'),
        ('topology = "torus"\nshape = "4 by 4"', "4 by 4 is not a shape such as 4x8"),
        ('shape = "2x4"', "the shape 2x4 of a network that is no torus"),
        ("oversubscription = 4", "oversubscription 4 without nodes_per_switch"),
        ("oversubscription = 0.5", "greater than or equal to 1"),
    ],
)
def test_a_wrong_topology_is_refused(tmp_path: Path, keys: str, says: str) -> None:
    path = tmp_path / "cluster.toml"
    text = (Path(drumline.clusters.__file__).parent / "catalogue" / "rtx4090.toml").read_text()
    path.write_text(text.replace("[origin]", f"{NETWORK}{keys}\n\n[origin]"))
    with pytest.raises(ClusterError) as refused:
        Cluster.load(path)
    assert says in str(refused.value) and "network" in str(refused.value)


@pytest.mark.parametrize(
    "keys", ["", 'topology = "rail"', 'topology = "torus"\nshape = "2x2x2"', "nodes_per_switch = 4"]
)
def test_a_topology_is_read_and_written(tmp_path: Path, keys: str) -> None:
    path = tmp_path / "cluster.toml"
    text = (Path(drumline.clusters.__file__).parent / "catalogue" / "rtx4090.toml").read_text()
    path.write_text(text.replace("[origin]", f"{NETWORK}{keys}\n\n[origin]"))
    cluster = Cluster.load(path)
    cluster.save(path)
    assert Cluster.load(path) == cluster
