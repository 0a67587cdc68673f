"""Models whose GPU waits for its host, against a bare loop: what the engine adds, and what a CUDA graph saves.

All contestants take turns of a few steps, in an order that changes from round to round. Ratios are medians of the
ratios within a round, in which a shared host has about one speed, with the interval in which 95% of redrawn rounds have
them.
"""

from __future__ import annotations

import functools
import gc
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import drumline as dl
from drumline.clusters import Cluster
from drumline.core.units import format_seconds
from drumline.costs import estimate
from drumline.costs.what_if import with_host_slowdown
from drumline.measurement.host_overhead import host_slowdown
from drumline.runtime.engine import initialize
from drumline.tracing import trace

from . import own
from .table import Entry, _bert, _vision, images, tokens, vectors

BF16 = "dp=1,precision=bf16"
HOST_BOUND = (
    Entry("BERT base", _bert, tokens(30522, 512), 8, BF16, library="transformers"),
    Entry("ViT base", lambda: own.ViT(768, 12), images, 32, BF16),
    Entry("ResNet-50", _vision("resnet50"), images, 32, BF16, library="torchvision"),
    Entry("DenseNet-121", _vision("densenet121"), images, 64, BF16, library="torchvision"),
    Entry("MLP 512x32", lambda: own.wide(512, 32), vectors, 128, BF16),
)
AIMS = {"ResNet-50": 0.65, "ViT base": 0.65, "MLP 512x32": 0.25}
"""The largest share of a bare loop's time that `graph=true` is meant to take."""
BARE = "bare loop"
TURN = 4
"""Steps in a row: a loop runs nothing else in between."""

Rounds = list[dict[str, float]]


def bare_loop(job: dl.Job, batch: Any, precision: str = "bf16") -> Callable[[], None]:
    """Build the step of a careful handwritten loop: autocast, the fused optimizer, the parameter list made once."""
    torch.manual_seed(job.seed)
    model = job.model().to("cuda").train()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True)
    x, y = batch

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=precision == "bf16"):
            loss = job.loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step


def placed(entry: Entry) -> Any:
    """Put a batch on the GPU."""
    return tuple(t.cuda() for t in entry.sample(entry.batch))


def contest(contestants: dict[str, Callable[[], Any]], seconds: float, warm: int = 6) -> Rounds:
    """Time rounds of some steps each, for some seconds."""
    for step in contestants.values():
        for _ in range(warm):
            step()
    rounds: Rounds = []
    order, end = list(contestants), time.perf_counter() + seconds
    gc.collect()
    while len(rounds) < 12 or time.perf_counter() < end:
        random.shuffle(order)
        rounds.append({name: timed(contestants[name]) for name in order})
    return rounds


def timed(step: Callable[[], Any]) -> float:
    """Time some consecutive steps; the GPU is idle before and after. Returns seconds per step."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(TURN):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / TURN


def median(rounds: Rounds, name: str) -> float:
    """Median seconds of one contestant."""
    return statistics.median(r[name] for r in rounds)


def ratio(rounds: Rounds, name: str, other: str) -> float:
    """Median ratio of two contestants in the same round."""
    return statistics.median(r[name] / r[other] for r in rounds)


def interval(rounds: Rounds, name: str, other: str) -> tuple[float, float]:
    """Bootstrap the 95% interval of that ratio over the rounds."""
    draw = random.Random(0)
    ratios = sorted(ratio(draw.choices(rounds, k=len(rounds)), name, other) for _ in range(400))
    return ratios[10], ratios[389]


def free() -> None:
    """Drop the memory of the last model."""
    gc.collect()
    torch.cuda.empty_cache()


def overhead(seconds: float = 10.0) -> None:
    """Compare the engine with the bare loop on all models; the target is at most 1.02."""
    for entry in HOST_BOUND:
        batch, job = placed(entry), entry.job()
        contestants = {
            BARE: bare_loop(job, batch),
            entry.plan: functools.partial(initialize(job, entry.plan).step, batch),
        }
        rounds = contest(contestants, seconds)
        low, high = interval(rounds, entry.plan, BARE)
        print(
            f"overhead: {entry.name}, batch {entry.batch}: {BARE} {format_seconds(median(rounds, BARE))}, engine "
            f"{format_seconds(median(rounds, entry.plan))}, {len(rounds)} rounds: "
            f"{ratio(rounds, entry.plan, BARE):.3f} (95% interval {low:.3f} to {high:.3f})",
            flush=True,
        )
        del contestants
        free()


def graph(cluster: Cluster | None, seconds: float = 8.0) -> None:
    """Compare the captured step, the plain engine and the bare loop with the predictions made before."""
    for entry in HOST_BOUND:
        batch, job = placed(entry), entry.job()
        plans = {"plain": entry.plan, "graph": f"{entry.plan},graph=true"}
        predicted = _predictions(entry, plans, cluster) if cluster is not None else {}
        contestants: dict[str, Callable[[], Any]] = {BARE: bare_loop(job, batch)}
        for name, plan in plans.items():
            contestants[name] = functools.partial(initialize(job, plan).step, batch)
        rounds = contest(contestants, seconds)
        aim = f"; aim of a captured step: {AIMS[entry.name]}" if entry.name in AIMS else ""
        print(f"graph: {entry.name}, batch {entry.batch}: {BARE} {format_seconds(median(rounds, BARE))}{aim}")
        for name, plan in plans.items():
            low, high = interval(rounds, name, BARE)
            seconds_ = median(rounds, name)
            says = ""
            if name in predicted:
                says = f"; predicted {format_seconds(predicted[name])} ({100 * (predicted[name] / seconds_ - 1):+.1f}%)"
            print(
                f"   {plan}: {format_seconds(seconds_)}, {ratio(rounds, name, BARE):.3f} of it "
                f"(95% interval {low:.3f} to {high:.3f}){says}",
                flush=True,
            )
        del contestants
        free()


def _predictions(entry: Entry, plans: dict[str, str], cluster: Cluster) -> dict[str, float]:
    """Predict the seconds of every plan from a trace, at the host's current speed."""
    profile = trace(entry.job(), precision="bf16", device="cuda")
    now = with_host_slowdown(cluster, host_slowdown(cluster.device, torch.device("cuda")) or 1.0)
    return {name: estimate(profile, dl.Plan.parse(plan), now).step_seconds for name, plan in plans.items()}
