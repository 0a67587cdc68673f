"""`--set`: consequences of a change, and refusals."""

from __future__ import annotations

import dataclasses

import pytest

from drumline.clusters import Cluster, CollectiveTable, load
from drumline.core.errors import ClusterError
from drumline.costs.collectives import collective_seconds
from drumline.costs.what_if import FROM_COMMAND_LINE, settable, with_changes


@pytest.fixture
def dgx() -> Cluster:
    return load("dgx-a100")


def test_a_link(dgx: Cluster) -> None:
    new = with_changes(dgx, ["node.link.bandwidth=400GB/s", "node.link.alpha = 5us"])
    assert new.node.link.bandwidth == 400e9
    assert new.node.link.alpha == pytest.approx(5e-6)
    assert new.node.link.type == dgx.node.link.type
    assert new.origin_of("node.link.bandwidth") == FROM_COMMAND_LINE
    assert new.origin_of("network.link.bandwidth") == dgx.origin_of("network.link.bandwidth")
    assert with_changes(dgx, []) is dgx
    assert new.network == dgx.network and new.device == dgx.device


def test_a_measured_table_does_not_hide_the_change(dgx: Cluster) -> None:
    measured = dataclasses.replace(
        dgx, collective=(CollectiveTable("all_reduce", "nccl", 8, (1e3, 1e9), (1e-5, 1e-2)),)
    )
    before = collective_seconds("all_reduce", 8, 1e9, measured)
    slow = with_changes(measured, ["node.link.bandwidth=1GB/s"])
    assert collective_seconds("all_reduce", 8, 1e9, slow) > 100 * before
    assert with_changes(measured, ["device.launch=1us"]).collective == measured.collective


def test_curves_follow_their_rate(dgx: Cluster) -> None:
    new = with_changes(dgx, ["device.peak.bf16=624TFLOP/s"])
    old_curve, new_curve = dgx.device.curve_of("matmul", "bf16"), new.device.curve_of("matmul", "bf16")
    assert old_curve is not None and new_curve is not None
    assert new_curve.rates == pytest.approx([2 * rate for rate in old_curve.rates])
    assert new.device.curve_of("matmul", "fp16") == dgx.device.curve_of("matmul", "fp16")
    assert "scaled" in new.origin_of("device.curve")
    assert with_changes(dgx, ["device.peak.fp8=1PFLOP/s"]).device.peak["fp8"] == 1e15


def test_other_numbers(dgx: Cluster) -> None:
    new = with_changes(
        dgx, ["node.devices=4", "network.nodes=3", "device.memory=40GB", "overlap=0.5", "node.in_switch_reduction=true"]
    )
    assert (new.devices, new.device.memory, new.overlap, new.node.in_switch_reduction) == (12, 40e9, 0.5, True)
    assert "device.peak.bf16" in settable(dgx) and "network.ports" in settable(dgx)
    assert not [key for key in settable(dgx) if "origin" in key or "curve" in key or "name" in key]


@pytest.mark.parametrize(
    ("change", "what", "says"),
    [
        ("node.link.bandwith=400GB/s", "no such number", "Did you mean 'node.link.bandwidth'?"),
        ("bandwidth=400GB/s", "no such number", "Did you mean"),
        ("node.link=400GB/s", "that is a table", "node.link.alpha, node.link.bandwidth"),
        ("device.curve=3", "no such number", ""),
        ("node.link.bandwidth", "--set node.link.bandwidth", "KEY=VALUE"),
        ("node.link.bandwidth=", "--set node.link.bandwidth=", "KEY=VALUE"),
        ("node.link.bandwidth=3us", "'3us' is not a rate", "--set: node.link.bandwidth"),
        ("node.link.bandwidth=400GB", "'400GB' is not a rate", "per second"),
        ("node.link.alpha=3GB/s", "'3GB/s' is not a time", "units are s, ms"),
        ("node.link.alpha=-1us", "node.link.alpha", "greater than or equal to 0"),
        ("node.devices=2.5", "node.devices", "integer"),
        ("device.peak.bf16=fast", "'fast' is not a rate", "TFLOP"),
        ("overlap=2", "overlap", "less than or equal to 1"),
    ],
)
def test_refusals(dgx: Cluster, change: str, what: str, says: str) -> None:
    with pytest.raises(ClusterError) as e:
        with_changes(dgx, [change])
    assert what in str(e.value)
    assert says in str(e.value)
    assert e.value.exit_code == 2


def test_a_missing_network() -> None:
    one = load("one-a100")
    with pytest.raises(ClusterError, match=r"'nodes' is missing(.|\n)*network.nodes"):
        with_changes(one, ["network.link.bandwidth=50GB/s", "network.link.alpha=10us"])
    both = with_changes(one, ["network.link.bandwidth=50GB/s", "network.link.alpha=10us", "network.nodes=4"])
    assert both.devices == 4
