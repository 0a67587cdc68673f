"""Every value of `sync` is predicted before it is trained: the estimate, and the timeline that the report draws."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

import drumline as dl
from drumline.clusters import Cluster, DeviceSpec, Link, Network, Node
from drumline.clusters.corrections import CorrectionFactor, Corrections
from drumline.costs import estimate
from drumline.loop.corrections import predicted_timeline
from drumline.loop.forecast import forecast

DEVICE = DeviceSpec("core", "cpu", 1e10, 1e10, {"fp32": 1e10}, 1e-5, threads=1)
MACHINE = Cluster("here", DEVICE, Node(4, Link(1e-4, 1e9)), origin={"": "measured", "device": "measured"})
HOSTS = dataclasses.replace(MACHINE, node=Node(2, Link(1e-4, 1e9)), network=Network(2, Link(2e-4, 1e8)))
PLANS = (
    *(f"sync={w}" for w in ("server", "async", "stale:0", "stale:3", "hogwild", "local:1", "local:8")),
    *(f"sync={w}" for w in ("gossip", "gossip:random", "server,servers=2", "server,backup=1", "async,damping=inverse")),
    "sync=local:4,outer=nesterov",
    "sync=local:4,sync_first=10",
    "sync=local:4,across=8",
    "micro=2,sync=async,servers=2",
)


def job() -> dl.Job:
    return dl.Job(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 4)),
        loss=F.cross_entropy,
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
        data=lambda: [(torch.full((8,), float(i % 4)), i % 4) for i in range(40)],
        batch_size=10,
        steps=6,
    )


@pytest.mark.parametrize("words", PLANS)
def test_a_training_has_a_prediction(words: str) -> None:
    for ranks, cluster in ((2, MACHINE), (4, HOSTS)):
        planned = forecast(job(), f"dp={ranks},{words}", None, cluster, corrections=False)
        e = planned.estimate
        assert e.step_seconds > 0 and sum(e.parts.values()) == pytest.approx(e.step_seconds) and e.fits
        slower = e.at_speed(0.5)
        timeline = predicted_timeline(planned.profile, planned.plan, planned.cluster, slower, 0.5)
        assert set(range(ranks)) <= set(timeline.ranks) and timeline.seconds > 0
        assert planned.speed_of({"speed": 0.5}) == 0.5


def test_corrections_of_one_kind_of_plan_do_not_apply_to_another() -> None:
    """Runs of replicas that meet correct their communication, not that of workers; their compute corrects both."""
    factors = (
        CorrectionFactor(kind="replicas", ranks=4, precision="fp32", part="communication", value=3.0, runs=5),
        CorrectionFactor(kind="", ranks=0, precision="fp32", part="forward", value=2.0, runs=5),
    )
    profile = forecast(job(), "dp=4", None, MACHINE, corrections=False).profile
    corrected = dataclasses.replace(MACHINE, corrections=Corrections(factor=factors))
    for text, times in (("dp=4", 3.0), ("dp=4,sync=async", 1.0), ("dp=4,sync=local:8", 1.0)):
        before, after = (estimate(profile, dl.Plan.parse(text), c).parts for c in (MACHINE, corrected))
        assert after["communication"] == pytest.approx(times * before["communication"])
        assert after["forward"] == pytest.approx(2 * before["forward"])
