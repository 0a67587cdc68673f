"""The usual advice on parallel training in seven cases: it must follow from the cost model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from drumline.clusters import Cluster, Link, load
from drumline.core.errors import DoesNotFit
from drumline.models import Profile, zoo
from drumline.planner import search
from drumline.planner.plan_families import families_of
from drumline.plans import Plan


def best(profile: Profile, cluster: Cluster) -> Plan:
    answer, _ = search(profile, cluster)
    return answer.best.plan


def with_memory(cluster: Cluster, gib: float, *, host: float | None = None) -> Cluster:
    """The cluster with `gib` per device and `host` GiB of host memory, or an undescribed host."""
    device = cluster.device
    other = replace(device.host, memory=host * 2**30) if host and device.host else None
    return replace(cluster, device=replace(device, memory=gib * 2**30, host=other))


HUGE = zoo.profile("mlp:4x32768", batch_size=8)
"""Layers of 4 GiB, 16 GiB each with gradients and Adam's state: more than the devices below have."""


def test_one_device_that_the_model_fits() -> None:
    plan = best(zoo.profile("gpt:125m", batch_size=8), load("one-a100"))
    assert families_of(plan) == ("one device",) and plan.zero == 0 and plan.recompute == "none", "nothing to do"


def test_one_device_that_the_model_does_not_fit() -> None:
    plan = best(zoo.profile("gpt:7b", batch_size=8), load("one-a100"))
    assert families_of(plan) == ("offload",), "ZeRO with offload"


def test_one_device_that_the_largest_layer_does_not_fit() -> None:
    plan = best(HUGE, with_memory(load("one-h100-pcie"), 8, host=512))
    assert "chunk" in families_of(plan) and plan.zero == 3, "memory-centric tiling"


def test_one_node_whose_devices_the_model_fits() -> None:
    plan = best(zoo.profile("gpt:1.3b", batch_size=32), load("dgx-h100").with_devices(8))
    assert families_of(plan)[0] in ("data", "sharded") and plan.dp == 8, "DDP or ZeRO"


def test_one_node_whose_devices_the_model_does_not_fit() -> None:
    machines = load("dgx-h100").with_devices(8)
    profile = zoo.profile("gpt:13b", batch_size=32)
    with pytest.raises(DoesNotFit):
        search(profile, with_memory(machines.with_devices(1), machines.device.memory / 2**30))
    plan = best(profile, machines)
    assert set(families_of(plan)) <= {"pipeline", "sharded", "tensor"} and plan.ranks == 8, "pipeline, ZeRO or tensor"


def test_one_node_whose_devices_the_largest_layer_does_not_fit() -> None:
    plan = best(HUGE, with_memory(load("dgx-h100").with_devices(8), 11))
    assert set(families_of(plan)) <= {"sharded", "chunk", "tensor"}, "ZeRO or tensor"
    assert plan.zero == 3 or plan.tp > 1
    assert not {"pipeline", "data"} & set(families_of(plan)), "a stage has a whole layer"


def test_several_nodes() -> None:
    """Fast links: ZeRO. On a slow network, for a model larger than a device: pipeline x tensor x data."""
    fast = load("dgx-h100").with_devices(32)
    profile = zoo.profile("gpt:30b", batch_size=256)
    assert families_of(best(profile, fast)) == ("sharded",)
    assert fast.network is not None
    slow = replace(fast, network=replace(fast.network, link=Link(1e-5, 12.5e9)))
    plan = best(profile, slow)
    assert plan.pp > 1 and plan.tp > 1 and plan.dp > 1 and plan.ranks == 32, plan


def test_last_resorts_where_nothing_fits() -> None:
    small = with_memory(load("one-a100"), 20)
    with pytest.raises(DoesNotFit) as caught:
        search(zoo.profile("gpt:175b", batch_size=8), small)
    options = caught.value.fix
    assert all(
        word in options for word in ("devices with", "host memory", "smaller or pruned model", "training on CPUs")
    )
    assert " > " in caught.value.rule and caught.value.exit_code == 3


def test_a_layer_larger_than_every_device() -> None:
    with pytest.raises(DoesNotFit) as caught:
        search(HUGE, with_memory(load("one-a100"), 1.75))
    assert "the largest layer, " in caught.value.rule and "2.00 GiB of parameters, more than" in caught.value.rule
