"""Clusters of the catalogue: they load, their numbers have origins and are consistent."""

from __future__ import annotations

from pathlib import Path

import pytest

from drumline.clusters import Cluster, catalogue, load
from drumline.clusters.spec import SET_BY_USER
from drumline.core.errors import ClusterError, nearest
from drumline.models.profile import KINDS

EVERY = catalogue()
EXPECTED = {
    "a10",
    "a100-ethernet",
    "a100-pcie-40",
    "a100-pcie-80",
    "a800",
    "dgx-a100",
    "dgx-a100-40",
    "dgx-h100",
    "dgx-h200",
    "dgx-v100",
    "gb200-nvl72",
    "gb300-nvl72",
    "h100-ethernet",
    "h100-pcie",
    "h100-roce",
    "h800",
    "hgx-b200",
    "hgx-b300",
    "l4",
    "l40s",
    "mi250x",
    "mi300x",
    "mi325x",
    "mi355x",
    "one-a100",
    "one-h100-pcie",
    "p4d",
    "p4de",
    "p5",
    "rtx4090",
    "rtx5090",
    "tpu-v5p",
    "tpu-v6e",
}


def test_catalogue_names() -> None:
    assert set(EVERY) == EXPECTED
    assert tuple(sorted(EVERY)) == EVERY


@pytest.mark.parametrize("name", EVERY)
def test_every_number_has_an_origin(name: str) -> None:
    c = load(name)
    assert c.name == name
    numbers = list(c.numbers())
    assert len(numbers) > 20
    assert [key for key, _, origin in numbers if origin == SET_BY_USER] == []
    for key in ("device.launch", "overlap", "node.link.alpha"):
        assert "estimate" in c.origin_of(key)
    assert not c.measured


@pytest.mark.parametrize("name", EVERY)
def test_origins_refer_to_existing_numbers(name: str) -> None:
    c = load(name)
    keys = [key for key, _, _ in c.numbers()]
    unused = [o for o in c.origin if not any(key == o or key.startswith(o + ".") for key in keys)]
    assert unused == []


@pytest.mark.parametrize("name", EVERY)
def test_rates_grow_and_stay_below_the_peak(name: str) -> None:
    d = load(name).device
    half = "fp16" if name == "dgx-v100" else "bf16"
    best = d.curve_of("matmul", half)
    assert best is not None
    assert d.peak[half] > 4 * d.peak["fp32"] or name in ("rtx4090", "rtx5090", "a10")
    assert 0.5 < best.rates[-1] / d.peak[half] < 0.95
    for curve in d.curve:
        assert curve.kernel in KINDS
        assert all(a < b for a, b in zip(curve.rates, curve.rates[1:], strict=False))
        assert curve.rates[-1] < d.peak[curve.dtype]
        assert 1e6 / curve.rates[0] < 20e-6  # a tiny kernel takes some microseconds
        reference = d.curve_of("matmul", curve.dtype)
        assert reference is not None
        assert curve.rates[-1] <= reference.rates[-1]


@pytest.mark.parametrize("name", EVERY)
def test_links_between_nodes_are_slower(name: str) -> None:
    c = load(name)
    assert c.overlap == 0.9
    assert 1e9 <= c.device.context < 2e9
    assert c.node.link.bandwidth < c.device.bandwidth
    assert 2.9e-6 < c.node.link.alpha < 10.1e-6
    if c.network is not None:
        assert 9.9e-6 < c.network.link.alpha < 20.1e-6
        assert c.network.link.bandwidth / c.node.devices < c.node.link.bandwidth
        assert c.with_devices(4 * c.node.devices).devices == 4 * c.node.devices


@pytest.mark.parametrize(
    ("name", "memory", "peak", "inside", "between", "best"),
    [
        ("dgx-v100", 32 * 2**30, 125e12, 150e9, 50e9, 100e12),
        ("dgx-a100", 80 * 2**30, 312e12, 300e9, 200e9, 271e12),
        ("p4d", 40 * 2**30, 312e12, 300e9, 50e9, 271e12),
        ("p5", 79.6 * 2**30, 989e12, 450e9, 400e9, 794e12),
        ("h800", 79.6 * 2**30, 989e12, 200e9, 400e9, 794e12),
        ("hgx-b200", 179 * 2**30, 2250e12, 900e9, 400e9, 1745e12),
        ("mi300x", 192 * 2**30, 1307e12, 448e9, 400e9, 668e12),
    ],
)
def test_data_sheet_numbers(name: str, memory: float, peak: float, inside: float, between: float, best: float) -> None:
    c = load(name)
    assert c.network is not None
    assert c.device.memory == pytest.approx(memory)
    assert c.device.peak["fp16"] == pytest.approx(peak)
    assert (c.node.link.bandwidth, c.network.link.bandwidth) == pytest.approx((inside, between))
    curve = c.device.curve_of("matmul", "fp16")
    assert curve is not None
    assert curve.at(1e15) == pytest.approx(best, rel=5e-3)


@pytest.mark.parametrize("name", EVERY)
def test_file_round_trip(name: str, tmp_path: Path) -> None:
    c = load(name)
    c.save(tmp_path / "mine.toml")
    assert load(tmp_path / "mine.toml") == c
    assert Cluster.load(str(tmp_path / "mine.toml")) == c


def test_numbers_of_devices() -> None:
    assert load("one-a100").devices == 1
    assert load("rtx4090").devices == 2
    assert load("gb200-nvl72").node.devices == 72


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(ClusterError) as e:
        load("dgx-a10")
    assert "no cluster 'dgx-a10'" in str(e.value)
    assert "Did you mean 'dgx-a100'?" in str(e.value)
    assert "gb200-nvl72" in e.value.rule
    with pytest.raises(ClusterError, match="drumline measure"):
        load("zzzzzz")
    with pytest.raises(ClusterError, match=r"no file .*missing\.toml"):
        load("missing.toml")


@pytest.mark.parametrize(
    ("name", "ports", "port", "in_switch"),
    [
        ("dgx-v100", 4, 12.5e9, False),
        ("dgx-a100", 8, 25e9, False),
        ("p4d", 4, 12.5e9, False),
        ("dgx-h100", 8, 50e9, True),
        ("p5", 32, 12.5e9, True),
        ("h800", 8, 50e9, True),
        ("hgx-b200", 8, 50e9, True),
        ("gb200-nvl72", 72, 50e9, True),
        ("mi250x", 4, 25e9, False),
        ("mi300x", 8, 50e9, False),
        ("a100-pcie-80", 2, 12.5e9, False),
        ("h100-pcie", 2, 25e9, False),
    ],
)
def test_ports_and_switches(name: str, ports: int, port: float, in_switch: bool) -> None:
    c = load(name)
    assert c.network is not None
    assert (c.network.ports, c.node.in_switch_reduction) == (ports, in_switch)
    assert c.network.port_bandwidth == pytest.approx(port)
    assert ("from memory" in c.origin_of("node.in_switch_reduction")) == in_switch


@pytest.mark.parametrize(
    ("word", "first"),
    [("a100", "dgx-a100"), ("h100", "dgx-h100"), ("l4", "l4"), ("h200", "dgx-h200"), ("b200", "hgx-b200")],
)
def test_a_chip_is_found_in_the_names_of_its_machines(word: str, first: str) -> None:
    """`a100` is part of `dgx-a100`, not a slip in `a10`; `h100` is never answered with another chip."""
    suggested = nearest(word, EVERY)
    assert suggested.startswith(f"Did you mean {first!r}"), suggested
    others = {
        "a100": ("'a10'", "a800"),
        "h100": ("h800", "h200"),
        "l4": ("l40s",),
        "h200": ("h800",),
        "b200": ("h200",),
    }
    assert not any(other in suggested for other in others[word])
