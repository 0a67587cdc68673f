"""Prices of replicas that do not meet in every step: compute, messages, servers, waiting, memory; and of those that do."""

from __future__ import annotations

import dataclasses

import pytest

from drumline.clusters import (
    Cluster,
    DeviceSpec,
    HostMemory,
    KernelCurve,
    Link,
    Network,
    Node,
    StepTimeDistribution,
    load,
)
from drumline.costs import OperatorCostModel, cost_model, estimate
from drumline.costs.tuning import REQUEST_SECONDS, UPDATE_SECONDS
from drumline.costs.worker_memory import server_bytes
from drumline.models import zoo
from drumline.models.profile import Affine, Layer, Profile, ProfiledOp
from drumline.plans import Plan
from drumline.plans.sync_caveats import sync_caveat
from drumline.theory.order_statistics import expected_largest
from drumline.theory.parameter_server import transfer_seconds

RATE, MEMORY_RATE = 1e9, 1e9
DEVICE = DeviceSpec(
    "core",
    "cpu",
    1e9,
    1e10,
    {"fp32": RATE},
    0.0,
    curve=(KernelCurve("matmul", "fp32", (1.0,), (RATE,)), KernelCurve("pointwise", "fp32", (1.0,), (MEMORY_RATE,))),
)
LINK = Link(1e-4, 1e8)
CPU = Cluster("cpu", DEVICE, Node(4, LINK))
HOSTS = dataclasses.replace(CPU, node=Node(2, LINK), network=Network(2, Link(2e-4, 5e7)))
NUMBERS = 250_000
"""Parameters: 1 MB of gradients."""
OPS = (
    ProfiledOp("mm", "matmul", "forward", Affine(per_sample=1e6), Affine()),
    ProfiledOp("mm", "matmul", "backward", Affine(per_sample=2e6), Affine()),
)
PROFILE = Profile(
    "small",
    64,
    (Layer("a", "Linear", NUMBERS, tensors=2, largest=NUMBERS, ops=OPS),),
    optimizer_bytes=16.0,
    optimizer_ops=1.0,
)
"""3 ms of compute a sample."""
C_SLICE, C_BATCH = 16 * 3e-3, 64 * 3e-3
WORDS = ("server", "async", "stale:0", "stale:4", "hogwild", "local:1", "local:8", "gossip", "gossip:random")
EVERY = (
    *(f"dp=4,sync={word}" for word in WORDS),
    "dp=4,sync=server,servers=2",
    "dp=4,sync=server,backup=1",
    "dp=4,sync=async,servers=4,damping=inverse",
    "dp=4,sync=local:8,outer=nesterov",
    "dp=4,sync=local:8,across=16",
    "dp=4,sync=local:8,sync_first=100",
    "dp=4,micro=2,sync=async",
    "dp=4,micro=2,recompute=full,sync=stale:1",
    "dp=1,sync=server",
    "dp=1,sync=local:4,outer=nesterov:0.7:0.9",
    "dp=2,sync=gossip",
)


def uneven(cluster: Cluster = CPU, *slow: str, jitter: float = 0.0) -> Cluster:
    return dataclasses.replace(cluster, step_times=StepTimeDistribution.of(slow, jitter))


@pytest.mark.parametrize("text", EVERY)
@pytest.mark.parametrize("spread", [StepTimeDistribution(), StepTimeDistribution.of(["0:4"], 0.2)], ids=str)
@pytest.mark.parametrize(
    "cluster", [CPU, HOSTS, load("dgx-h100"), load("dgx-a100").with_devices(16)], ids=lambda c: c.name
)
def test_every_plan_has_a_price_whose_parts_add_up(text: str, spread: StepTimeDistribution, cluster: Cluster) -> None:
    e = estimate(PROFILE, Plan.parse(text), dataclasses.replace(cluster, step_times=spread))
    assert e.step_seconds > 0 and sum(e.parts.values()) == pytest.approx(e.step_seconds)
    assert min(e.parts.values()) >= -1e-12 and e.memory_bytes > 0 and e.fits
    assert {"forward", "backward", "communication", "waiting", "optimizer"} <= set(e.parts)
    caveat = sync_caveat(Plan.parse(text))
    assert bool(caveat) == (not Plan.parse(text).exact or "local:1" in text) and (not caveat or caveat in e.notes)


def test_a_slice_and_a_whole_batch() -> None:
    for word, compute in (("server", C_SLICE), ("stale:2", C_SLICE), ("local:8", C_SLICE), ("gossip", C_SLICE)):
        parts = estimate(PROFILE, Plan.parse(f"dp=4,sync={word}"), CPU).parts
        assert parts["forward"] + parts["backward"] == pytest.approx(compute)
    for word in ("async", "hogwild"):
        parts = estimate(PROFILE, Plan.parse(f"dp=4,sync={word}"), CPU).parts
        assert parts["forward"] + parts["backward"] == pytest.approx(C_BATCH / 4), "four of them at once"


def test_messages_with_servers() -> None:
    """m = 1 MB: 10 ms on the link and 2 ms for each copy; all of it for every worker, or its half on each of two."""
    t = OperatorCostModel(PROFILE, CPU, "fp32").worker_times(Plan.parse("dp=4,sync=server"))
    assert (t.pull.latency, t.pull.own, t.pull.service) == pytest.approx((1e-4, 0.012, 0.012))
    assert t.message_bytes == 1e6 and t.ask == pytest.approx(2e-4 + REQUEST_SECONDS)
    half = OperatorCostModel(PROFILE, CPU, "fp32").worker_times(Plan.parse("dp=4,sync=server,servers=2"))
    assert (half.push.own, half.push.service) == pytest.approx((0.012, 0.006))
    assert half.update - UPDATE_SECONDS == pytest.approx((t.update - UPDATE_SECONDS) / 2)
    assert half.accumulate == pytest.approx(t.accumulate / 2)
    # on the wire alone, the exchange of the theory
    wire = Link(LINK.alpha, 1 / (LINK.beta + 2 / MEMORY_RATE))
    assert 4 * t.pull.service == pytest.approx(transfer_seconds(4, 1e6, wire))


def test_servers_between_hosts() -> None:
    """Two of four workers are remote: their bytes go through the network port of the server's host."""
    t = OperatorCostModel(PROFILE, HOSTS, "fp32").worker_times(Plan.parse("dp=4,sync=async"))
    assert t.pull.latency == 2e-4 and t.pull.own == pytest.approx(0.02 + 0.002)
    assert t.pull.service == pytest.approx(0.5 * 0.02 + 0.002)


def test_a_synchronous_server_adds_up() -> None:
    t = OperatorCostModel(PROFILE, CPU, "fp32").worker_times(Plan.parse("dp=4,sync=server"))
    e = estimate(PROFILE, Plan.parse("dp=4,sync=server"), CPU)
    expected = t.ask + 2 * (t.pull.latency + 4 * t.pull.service) + C_SLICE + 4 * t.accumulate + t.update
    assert e.step_seconds == pytest.approx(expected) and e.parts["waiting"] == 0.0


def test_asynchronous_workers_add_their_rates() -> None:
    plan = Plan.parse("dp=4,sync=async")
    t = OperatorCostModel(PROFILE, CPU, "fp32").worker_times(plan)
    task = t.ask + t.pull.alone + C_BATCH + t.push.alone + t.update
    e = estimate(PROFILE, plan, CPU)
    assert e.step_seconds == pytest.approx(task / 4) and e.staleness == 3
    # one of four is four times as slow: 3 + 1/4 of the rate of one, less what workers out of phase delay each other
    slow = estimate(PROFILE, plan, uneven(CPU, "3:4"))
    late = task + 3 * C_BATCH
    assert slow.step_seconds == pytest.approx(1 / (3 / task + 1 / late), rel=0.06)


def test_servers_bound_the_rate() -> None:
    """Eight times the parameters: the port of one server is busy all the time, the ports of four are not."""
    large = dataclasses.replace(
        PROFILE, layers=tuple(dataclasses.replace(x, parameters=8 * NUMBERS) for x in PROFILE.layers), batch_size=8
    )
    one = estimate(large, Plan.parse("dp=4,sync=async"), CPU)
    t = OperatorCostModel(large, CPU, "fp32").worker_times(Plan.parse("dp=4,sync=async"))
    assert one.step_seconds == pytest.approx(t.pull.service) and one.parts["waiting"] > 0
    assert any("the servers are the bottleneck" in note for note in one.notes)
    four = estimate(large, Plan.parse("dp=4,sync=async,servers=4"), CPU)
    assert four.step_seconds < 0.6 * one.step_seconds and not any("bottleneck" in note for note in four.notes)


def test_averages_are_shared_by_k_steps() -> None:
    one, eight = (estimate(PROFILE, Plan.parse(f"dp=4,sync=local:{k}"), CPU) for k in (1, 8))
    assert one.parts["communication"] == pytest.approx(8 * eight.parts["communication"])
    average = 3e6  # weights and 8 bytes of state for each
    assert one.parts["communication"] == pytest.approx(2 * 3 * (LINK.alpha + average / 4 * LINK.beta))
    outer = estimate(PROFILE, Plan.parse("dp=4,sync=local:8,outer=nesterov"), CPU)
    assert outer.parts["communication"] > eight.parts["communication"]
    first = estimate(PROFILE, Plan.parse("dp=4,sync=local:8,sync_first=100"), CPU)
    assert first.step_seconds == eight.step_seconds and any("first 100 steps" in note for note in first.notes)


def test_hosts_average_more_rarely_than_their_ranks() -> None:
    every, rarely = (estimate(PROFILE, Plan.parse(f"dp=4,sync=local:4{x}"), HOSTS) for x in ("", ",across=32"))
    assert rarely.parts["communication"] < 0.5 * every.parts["communication"]


def test_gossip_exchanges_with_two_neighbours_or_one() -> None:
    ring = estimate(PROFILE, Plan.parse("dp=4,sync=gossip"), CPU).parts["communication"]
    pair = estimate(PROFILE, Plan.parse("dp=4,sync=gossip:random"), CPU).parts["communication"]
    two = estimate(PROFILE, Plan.parse("dp=2,sync=gossip"), CPU).parts["communication"]
    assert ring == pytest.approx(LINK.alpha + 2 * 0.01 + 4e-3) and pair == two == pytest.approx(
        LINK.alpha + 0.01 + 3e-3
    )


# -- ranks that differ


def test_a_synchronous_step_waits_for_the_slowest_rank() -> None:
    plain, slow = (estimate(PROFILE, Plan(dp=4), c) for c in (CPU, uneven(CPU, "3:4")))
    compute = plain.parts["forward"] + plain.parts["backward"] + plain.parts["optimizer"]
    assert "waiting" not in plain.parts and slow.parts["waiting"] == pytest.approx(3 * compute)
    assert slow.step_seconds == pytest.approx(plain.step_seconds + 3 * compute)
    jitter = estimate(PROFILE, Plan(dp=4), uneven(jitter=0.3))
    assert jitter.parts["waiting"] == pytest.approx((expected_largest([1.0] * 4, 0.3) - 1) * compute)


@pytest.mark.parametrize(
    "name", ["dp=8,zero=3,precision=bf16", "tp=2,dp=4,precision=bf16", "pp=4,dp=2,micro=8,precision=bf16"]
)
def test_even_ranks_cost_what_they_did(name: str) -> None:
    """Also under the fitted model, one by one and in arrays; and a slow rank makes every plan slower."""
    h100, profile = load("dgx-h100").with_devices(8), zoo.profile("gpt:1.3b", batch_size=32)
    plan = Plan.parse(name)
    for make in (OperatorCostModel, cost_model):
        plain, same, slow = (make(profile, c, "bf16") for c in (h100, uneven(h100, "1:1"), uneven(h100, "1:3")))
        assert plain.estimate(plan) == same.estimate(plan)
        assert slow.estimate(plan).step_seconds > 2 * plain.estimate(plan).step_seconds
        assert slow.seconds([plan]) == pytest.approx([slow.estimate(plan).step_seconds])


def test_who_waits_for_a_slow_rank() -> None:
    """Four workers, one of them four times as slow: seconds for a batch, as multiples of those of even workers."""
    few = dataclasses.replace(PROFILE, layers=tuple(dataclasses.replace(x, parameters=250) for x in PROFILE.layers))

    def ratio(words: str) -> float:
        plan = Plan.parse(f"dp=4{words}")
        even, slow = (estimate(few, plan, c).step_seconds for c in (CPU, uneven(CPU, "3:4")))
        return slow / even

    for words in ("", ",sync=server", ",sync=stale:4", ",sync=local:8", ",sync=gossip"):
        assert 3.5 < ratio(words) < 4.05, "all wait for the slowest, sooner or later"
    assert ratio(",sync=async") == pytest.approx(4 / 3.25, rel=0.03)
    assert ratio(",sync=hogwild") == pytest.approx(4 / 3.25, rel=0.03)
    assert ratio(",sync=server,backup=1") == pytest.approx(1.0, abs=0.05)


def test_running_ahead_hides_jitter() -> None:
    fast = dataclasses.replace(uneven(jitter=0.3), node=Node(4, Link(1e-6, 1e11)))
    seconds = [
        estimate(PROFILE, Plan.parse(f"dp=4,sync={w}"), fast).step_seconds for w in ("server", "stale:1", "stale:8")
    ]
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > 1.2 * seconds[2]
    local = [estimate(PROFILE, Plan.parse(f"dp=4,sync=local:{k}"), fast).parts["waiting"] for k in (1, 4, 16)]
    assert local == sorted(local, reverse=True) and local[0] == pytest.approx(4 * local[2], rel=0.1)


def test_transformers_under_the_fitted_model_have_the_same_compute() -> None:
    h100, profile = load("dgx-h100").with_devices(8), zoo.profile("gpt:1.3b", batch_size=64)
    model = cost_model(profile, h100, "bf16")
    assert model.source
    together = model.estimate(Plan.parse("dp=8,precision=bf16")).parts
    for word in ("local:8", "server", "gossip"):
        parts = model.estimate(Plan.parse(f"dp=8,sync={word},precision=bf16")).parts
        assert parts["forward"] == pytest.approx(together["forward"])
        assert parts["backward"] == pytest.approx(together["backward"])


# -- memory


def test_workers_keep_no_optimizer_state() -> None:
    size = 4.0 * NUMBERS
    whole = estimate(PROFILE, Plan.parse("dp=4"), CPU).memory_parts
    assert whole["optimizer"] == 2 * size
    for word in ("server", "async", "stale:4"):
        parts = estimate(PROFILE, Plan.parse(f"dp=4,sync={word}"), CPU).memory_parts
        assert parts["optimizer"] == 0 and parts["parameters"] == size and parts["communication"] == size
    local = estimate(PROFILE, Plan.parse("dp=4,sync=local:8"), CPU).memory_parts
    assert local["optimizer"] == 2 * size
    assert estimate(PROFILE, Plan.parse("dp=4,sync=local:8,outer=nesterov"), CPU).memory_parts["optimizer"] == 4 * size
    shared = estimate(PROFILE, Plan.parse("dp=4,sync=hogwild"), CPU).memory_parts
    assert (shared["parameters"], shared["optimizer"]) == (size / 4, 2 * size / 4)


def test_servers_keep_weights_state_and_gradients_that_wait() -> None:
    """Weights, sum and one gradient; with slices, those of a whole step; with stale:k, of k more."""
    size = 4.0 * NUMBERS
    assert server_bytes(PROFILE, Plan.parse("dp=4,sync=async")) == (2 + 1 + 2) * size
    assert server_bytes(PROFILE, Plan.parse("dp=4,sync=server")) == (2 + 4 + 2) * size
    assert server_bytes(PROFILE, Plan.parse("dp=4,sync=stale:2,servers=2")) == (2 + 12 + 2) * size / 2
    assert server_bytes(PROFILE, Plan.parse("dp=4,sync=hogwild")) == server_bytes(PROFILE, Plan(dp=4)) == 0


def test_workers_and_servers_must_fit_their_host() -> None:
    plan = Plan.parse("dp=4,sync=server")
    roomy = estimate(PROFILE, plan, CPU)
    assert roomy.fits and roomy.host_bytes == server_bytes(PROFILE, plan) < roomy.host_limit
    # as much as the workers need, and nothing for the server
    small = dataclasses.replace(CPU, device=dataclasses.replace(DEVICE, memory=roomy.memory_bytes + 1))
    e = estimate(PROFILE, plan, small)
    assert not e.fits and e.lacks[0] == "host" and OperatorCostModel(PROFILE, small, "fp32").excess(plan) > 0
    assert estimate(PROFILE, Plan.parse("dp=4,sync=hogwild"), small).host_bytes == 0
    gpu = dataclasses.replace(CPU, device=dataclasses.replace(DEVICE, kind="cuda", curve=()))
    unknown = estimate(PROFILE, plan, gpu)
    assert unknown.host_bytes == 0 and any("not checked" in note for note in unknown.notes)
    described = dataclasses.replace(gpu, device=dataclasses.replace(gpu.device, host=HostMemory(1e6, 1e9, 1e9)))
    assert not estimate(PROFILE, plan, described).fits


def test_whole_batches_need_the_activations_of_a_batch() -> None:
    layer = dataclasses.replace(PROFILE.layers[0], live_backward=Affine(per_sample=1e3))
    profile = dataclasses.replace(PROFILE, layers=(layer,))
    sliced, whole = (estimate(profile, Plan.parse(f"dp=4,sync={w}"), CPU).memory_parts for w in ("server", "async"))
    assert whole["activations"] == pytest.approx(4 * sliced["activations"]) == pytest.approx(64e3)
