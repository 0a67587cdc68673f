"""Replays of workers: the update rules in predicted times, against the closed form, and what they show."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest

from drumline.clusters import Cluster, DeviceSpec, KernelCurve, Link, Network, Node, StepTimeDistribution, load
from drumline.costs import estimate
from drumline.models import zoo
from drumline.models.profile import Affine, Layer, Profile, ProfiledOp
from drumline.plans import Plan
from drumline.simulator.step import simulate_step
from drumline.simulator.worker_replay import ReplayLog, WorkerReplay
from drumline.simulator.workers import plan_timeline, replay_workers

DEVICE = DeviceSpec(
    "core",
    "cpu",
    1e9,
    1e10,
    {"fp32": 1e9},
    0.0,
    curve=(KernelCurve("matmul", "fp32", (1.0,), (1e9,)), KernelCurve("pointwise", "fp32", (1.0,), (1e9,))),
)
CPU = Cluster("cpu", DEVICE, Node(4, Link(1e-4, 1e8)))
HOSTS = dataclasses.replace(CPU, node=Node(2, Link(1e-4, 1e8)), network=Network(2, Link(2e-4, 5e7)))
OPS = (
    ProfiledOp("mm", "matmul", "forward", Affine(per_sample=1e6), Affine()),
    ProfiledOp("mm", "matmul", "backward", Affine(per_sample=2e6), Affine()),
)


def model(numbers: int) -> Profile:
    layer = Layer("a", "Linear", numbers, tensors=2, largest=numbers, ops=OPS)
    return Profile("small", 64, (layer,), optimizer_bytes=16.0, optimizer_ops=1.0)


COMPUTE_BOUND, MESSAGE_BOUND = model(10_000), model(2_000_000)
WORDS = ("server", "stale:1", "stale:4", "async", "hogwild", "local:1", "local:8", "gossip", "gossip:random")


def uneven(*slow: str, jitter: float = 0.0, seed: int = 0, cluster: Cluster = CPU) -> Cluster:
    return dataclasses.replace(cluster, step_times=StepTimeDistribution.of(slow, jitter, seed))


def both(profile: Profile, text: str, cluster: Cluster) -> tuple[float, WorkerReplay]:
    plan = Plan.parse(text)
    return estimate(profile, plan, cluster).step_seconds, replay_workers(profile, plan, cluster)


@pytest.mark.parametrize(
    "word", [*WORDS, "server,servers=2", "server,servers=4", "async,servers=2", "local:4,across=8"]
)
@pytest.mark.parametrize("cluster", [CPU, HOSTS], ids=["one host", "two hosts"])
def test_even_workers_take_as_long_as_the_closed_form_says(word: str, cluster: Cluster) -> None:
    seconds, replay = both(COMPUTE_BOUND, f"dp=4,sync={word}", cluster)
    # workers that may run ahead drift out of phase, which the closed form knows on average
    assert replay.step_seconds == pytest.approx(seconds, rel=0.01 if word.startswith("stale") else 1e-9)
    assert replay.samples_per_second == pytest.approx(64 / seconds, rel=0.01)


@pytest.mark.parametrize(
    "word", ["server", "server,servers=4", "async", "async,servers=4", "hogwild", "local:8", "gossip"]
)
def test_so_do_even_workers_with_long_messages(word: str) -> None:
    seconds, replay = both(MESSAGE_BOUND, f"dp=4,sync={word}", CPU)
    assert replay.step_seconds == pytest.approx(seconds, rel=1e-6)


@pytest.mark.parametrize("word", [*WORDS, "server,backup=1"])
def test_a_slow_worker_takes_as_long_as_the_closed_form_says(word: str) -> None:
    seconds, replay = both(COMPUTE_BOUND, f"dp=4,sync={word}", uneven("2:4"))
    assert replay.step_seconds == pytest.approx(seconds, rel=0.02)


@pytest.mark.parametrize("profile", [COMPUTE_BOUND, MESSAGE_BOUND], ids=["compute", "messages"])
@pytest.mark.parametrize("word", [*WORDS, "server,backup=1", "server,servers=4", "async,servers=4"])
def test_jitter_is_near_the_closed_form(word: str, profile: Profile) -> None:
    """Within a tenth; within a fifth where workers out of phase queue for busy ports, more regularly than at random."""
    seconds, replay = both(profile, f"dp=4,sync={word}", uneven(jitter=0.2))
    queues = profile is MESSAGE_BOUND and word.startswith("stale")
    assert replay.step_seconds == pytest.approx(seconds, rel=0.2 if queues else 0.1)


def test_replicas_that_meet_wait_for_the_slowest() -> None:
    seconds, replay = both(COMPUTE_BOUND, "dp=4", uneven("2:4"))
    assert replay.step_seconds == pytest.approx(seconds)
    assert replay.waiting[2] == 0 and replay.slowest == 2
    assert [replay.waiting[w] for w in (0, 1, 3)] == pytest.approx([0.75] * 3, abs=0.02)
    jitter, replay = both(COMPUTE_BOUND, "dp=4", uneven(jitter=0.3))
    assert replay.step_seconds == pytest.approx(jitter, rel=0.02) and min(replay.waiting) > 0.15


def test_who_waits_and_how_stale() -> None:
    slow = uneven("3:4")
    replays = {w: both(COMPUTE_BOUND, f"dp=4,sync={w}", slow)[1] for w in ("server", "stale:4", "async", "local:8")}
    for word in ("server", "stale:4", "local:8"):
        assert replays[word].slowest == 3 and min(replays[word].waiting[:3]) > 0.7, word
    assert max(replays["async"].waiting) < 0.02, "nobody waits"
    assert set(replays["server"].staleness) == {0}
    assert max(replays["stale:4"].staleness) == 4, "the others run ahead as far as they may"
    assert replays["async"].mean_staleness == pytest.approx(3, rel=0.05)
    assert max(replays["async"].staleness) >= 9, "a slow worker's gradients are the oldest"


def test_backup_workers_are_dropped() -> None:
    _, replay = both(COMPUTE_BOUND, "dp=4,sync=server,backup=1", uneven("3:4"))
    assert replay.dropped > 0 and set(replay.staleness) == {0}
    assert replay.samples_per_second == pytest.approx(0.75 * 64 / replay.step_seconds)
    _, even = both(COMPUTE_BOUND, "dp=4,sync=server,backup=1", CPU)
    assert even.step_seconds == pytest.approx(replay.step_seconds, rel=0.1)


def test_the_busy_servers_are_seen() -> None:
    _, one = both(MESSAGE_BOUND, "dp=4,sync=async", CPU)
    _, four = both(MESSAGE_BOUND, "dp=4,sync=async,servers=4", CPU)
    assert set(one.server_use) == {"receive", "update", "send"} and max(one.server_use.values()) > 0.85
    assert max(four.server_use.values()) < 0.3 and four.step_seconds < 0.95 * one.step_seconds
    _, shared = both(COMPUTE_BOUND, "dp=4,sync=hogwild", CPU)
    assert not shared.server_use


def test_the_same_seed_gives_the_same_replay() -> None:
    plan = Plan.parse("dp=4,sync=stale:2")
    first, again, other = (
        replay_workers(COMPUTE_BOUND, plan, uneven("1:2", jitter=0.3, seed=seed)) for seed in (1, 1, 2)
    )
    assert first == again and first.step_seconds != other.step_seconds
    pairs = [replay_workers(COMPUTE_BOUND, Plan.parse("dp=4,sync=gossip:random"), uneven(jitter=0.3)) for _ in range(2)]
    assert pairs[0] == pairs[1]


@pytest.mark.parametrize("text", ["dp=4", *(f"dp=4,sync={w}" for w in WORDS), "dp=4,sync=local:4,across=8"])
def test_timelines_are_whole_and_do_not_overlap(text: str) -> None:
    for cluster in (uneven("3:2", jitter=0.1), uneven("3:2", jitter=0.1, cluster=HOSTS)):
        timeline = plan_timeline(COMPUTE_BOUND, Plan.parse(text), cluster)
        assert timeline.origin == "predicted" and set(range(4)) <= set(timeline.ranks)
        assert min(s.start for s in timeline.spans) >= 0 and all(s.end > s.start for s in timeline.spans)
        for rank in timeline.ranks:
            spans = sorted((s for s in timeline.spans if s.rank == rank and s.lane == "compute"), key=lambda s: s.start)
            assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(spans))
        twice = plan_timeline(COMPUTE_BOUND, Plan.parse(text), cluster, speed=0.5)
        assert twice.seconds == pytest.approx(2 * timeline.seconds)


def test_a_step_of_even_ranks_is_drawn_as_before() -> None:
    h100, profile = load("dgx-h100").with_devices(4), zoo.profile("resnet50", batch_size=64)
    for text in ("dp=4", "dp=4,zero=3"):
        plan = Plan.parse(text)
        assert plan_timeline(profile, plan, h100) == simulate_step(profile, plan, h100)
    with pytest.raises(AssertionError):
        simulate_step(profile, Plan.parse("dp=4,sync=async"), h100)


def test_a_straggling_step_is_as_long_as_its_estimate() -> None:
    h100, profile = load("dgx-h100").with_devices(4), zoo.profile("resnet50", batch_size=64)
    cluster = dataclasses.replace(h100, step_times=StepTimeDistribution.of(["3:3"]))
    for text in ("dp=4", "dp=4,zero=1", "dp=2,pp=2,micro=4"):
        plan = Plan.parse(text)
        timeline = plan_timeline(profile, plan, cluster)
        assert timeline.seconds == pytest.approx(estimate(profile, plan, cluster).step_seconds, rel=0.05)
        waits = {s.rank for s in timeline.spans if s.name == "waiting for the slowest rank"}
        assert waits == ({2} if plan.pp > 1 else {0, 1, 2}), "other stages wait for their inputs"


def test_one_worker_waits_for_nobody() -> None:
    for word in ("server", "async", "stale:3", "hogwild", "local:4", "gossip", "gossip:random"):
        seconds, replay = both(COMPUTE_BOUND, f"dp=1,sync={word}", CPU)
        assert replay.step_seconds == pytest.approx(seconds) and set(replay.staleness) <= {0}


def test_many_workers_are_replayed_quickly() -> None:
    wide = dataclasses.replace(uneven("3:4", jitter=0.2), node=Node(64, CPU.node.link))
    replay = replay_workers(COMPUTE_BOUND, Plan.parse("dp=64,sync=stale:4"), wide)
    assert replay.updates > 32 and len(replay.waiting) == 64 and math.isfinite(replay.step_seconds)


def test_windows_cut_spans() -> None:
    log = ReplayLog(1)
    log.add(0, "compute", "a", 0.0, 2.0)
    log.add(0, "compute", "b", 2.0, 3.0)
    log.add(0, "compute", "nothing", 3.0, 3.0)
    (a, b) = log.window(1.0, 2.5).spans
    assert (a.start, a.end, b.start, b.end) == (0.0, 1.0, 1.0, 1.5)
    assert log.waiting(0.0, 4.0) == (0.25,)
