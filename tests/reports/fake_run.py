"""Made-up runs: a small GPT on two ranks, and a minimal one whose names are all markup."""

from __future__ import annotations

import dataclasses
import math
import random

from drumline.clusters.spec import Cluster, CollectiveTable, DeviceSpec, KernelCurve, Link, Node
from drumline.core.timeline import Span, Timeline
from drumline.costs.estimate import Estimate
from drumline.models.profile import Affine, Layer, Profile, ProfiledOp
from drumline.planner.answer import Answer, Candidate
from drumline.plans.plan import Plan
from drumline.reports import Run, StepRecord

EVIL = '<script>alert("x")</script><img src=x onerror=alert(1)>'
MIB = 2.0**20


def make_cluster() -> Cluster:
    when = "measured 2026-01-12 on this machine"
    return Cluster(
        name="laptop",
        device=DeviceSpec(
            name="cpu core",
            kind="cpu",
            memory=4 * 2.0**30,
            bandwidth=11.2e9,
            peak={"fp32": 71.5e9, "bf16": 30e9},
            launch=4.1e-6,
            curve=(
                KernelCurve("matmul", "fp32", (1e6, 1e8, 1e10), (21e9, 58e9, 71e9)),
                KernelCurve("pointwise", "fp32", (1e4, 1e6, 1e8), (3e9, 11e9, 9e9)),
            ),
        ),
        node=Node(devices=2, link=Link(alpha=38e-6, bandwidth=2.1e9)),
        overlap=0.62,
        measurement_spread=0.031,
        collective=(CollectiveTable("all_reduce", "gloo", 2, (1024.0, 2.0**20, 2.0**24), (9e-5, 8e-4, 1.1e-2)),),
        origin={"device": when, "node.link": when, "collective": when, "overlap": when, "device.memory": "psutil"},
    )


def _ops(flops: float, size: float) -> tuple[ProfiledOp, ...]:
    return (
        ProfiledOp("addmm", "matmul", "forward", Affine(0, flops), Affine(size, size / 8), count=4),
        ProfiledOp("gelu", "special", "forward", Affine(0, flops / 500), Affine(0, size / 4)),
        ProfiledOp("mm", "matmul", "backward", Affine(0, 2 * flops), Affine(size, size / 8), count=4),
    )


def make_profile() -> Profile:
    block = Layer(
        "blocks.0",
        "Block",
        1_774_464,
        tensors=12,
        largest=589_824,
        ops=_ops(1.1e8, 2.4e6),
        saved=Affine(0, 5.3 * MIB),
        output=Affine(0, 0.38 * MIB),
    )
    return Profile(
        name="gpt-6x384",
        batch_size=16,
        origin="traced",
        notes=("Dropout is traced as if it were off.",),
        layers=(
            Layer("embed", "Embedding", 98_304, tensors=1, ops=(), saved=Affine(0, 0.4 * MIB)),
            *(dataclasses.replace(block, name=f"blocks.{i}") for i in range(6)),
            Layer("norm", "LayerNorm", 768, tensors=2, saved=Affine(0, 0.38 * MIB)),
            Layer("head", "Linear", 98_304, tensors=1, ops=_ops(2.5e7, 4e5), saved=Affine(0, 0.6 * MIB)),
        ),
    )


def make_timeline(origin: str, *, slow: float = 1.0, jitter: float = 0.0, ranks: int = 2) -> Timeline:
    """Forward, backward with overlapped gradient reduction, and optimizer, on each rank."""
    rng = random.Random(7)
    spans: list[Span] = []
    for rank in range(ranks):

        def took(seconds: float) -> float:
            return seconds * slow * (1 + jitter * rng.uniform(-1, 1))

        t, free = (0.0004 * rank if jitter else 0.0), 0.0
        if jitter:
            spans.append(Span(rank, "data", "load batch", 0.0, t + 0.0006))
            t += 0.0006
        layers = ["embed", *(f"blocks.{i}" for i in range(6)), "norm", "head"]
        cost = {"embed": 0.0004, "norm": 0.0002, "head": 0.0011}
        for name in layers:
            end = t + took(cost.get(name, 0.0017))
            spans.append(Span(rank, "compute", f"forward {name}", t, end))
            t = end
        for name in reversed(layers):
            end = t + took(2.05 * cost.get(name, 0.0017))
            spans.append(Span(rank, "compute", f"backward {name}", t, end))
            t = end
            if name.startswith("blocks"):
                begin = max(t, free)
                free = begin + took(0.0033)
                spans.append(Span(rank, "communication", f"all_reduce bucket {name}", begin, free, bytes=7.1e6))
        t = max(t, free)
        spans.append(Span(rank, "compute", "optimizer AdamW", t, t + took(0.0024)))
    return Timeline(origin, tuple(spans))


def make_answer(plan: str, n: int = 20) -> Answer:
    candidates = [Candidate(Plan.parse(plan), 0.0412, 158 * MIB, True, "wins: the fastest that fits")]
    for i in range(1, n):
        fits = i < n * 0.8
        micro = 2 ** (i % 4)
        text = f"dp={2 if i % 3 else 1},zero={3 if i % 2 else 0},micro={micro}"
        text += ",recompute=full" if i % 5 == 0 else ""
        text += f",bucket={i}000000"
        reason = (
            f"{2.5 * i:.1f}% slower: {i % 4 + 1} more messages a step of 38 us each"
            if fits
            else ("does not fit: 5.1 GiB of 4 GiB")
        )
        size = (150 + 12 * i) * MIB * (1 if fits else 25)
        candidates.append(Candidate(Plan.parse(text), 0.0412 * (1 + 0.025 * i), size, fits, reason))
    return Answer(
        tuple(candidates),
        0.37,
        (
            "The step is bound by computation: 88% of it. Replication with two ranks halves the computation and hides "
            "6 of 9 messages behind the backward. The runner-up, zero=3, saves 41 MiB but gathers parameters twice, "
            "which costs 1.0 ms that nothing hides."
        ),
    )


def make_run() -> Run:
    """Two ranks, six blocks, 40 steps, 20 candidates, both timelines."""
    rng = random.Random(3)
    plan = Plan.parse("dp=2,micro=1,bucket=8000000")
    steps = tuple(
        StepRecord(
            i,
            1.6 + 2.6 * math.exp(-i / 11) + rng.gauss(0, 0.03),
            0.9 + rng.random() * 0.3,
            0.31 if i == 1 else 0.0440 * (1 + abs(rng.gauss(0, 0.03))),
            16,
            170 * MIB,
        )
        for i in range(1, 41)
    )
    memory = {"parameters": 41.5, "gradients": 41.5, "optimizer": 0.0, "activations": 60.0, "communication": 15.0}
    parts = {"forward": 0.0128, "backward": 0.0236, "communication": 0.0014, "optimizer": 0.0031, "overhead": 0.0003}
    return Run(
        name="2026-01-12-gpt-dp2",
        job="examples/gpt.py:job",
        digest="9f86d081884c7d659a2feaa0c55ad015a3bf4f1b",
        command=("drumline", "train", "examples/gpt.py:job", "--ranks", "2", "--steps", "40"),
        started="2026-01-12T14:03:22+00:00",
        machine="Linux 6.1, 2 x Intel Xeon at 2.8 GHz, 8 GiB",
        versions={"drumline": "0.1.0", "python": "3.11.9", "torch": "2.13.0"},
        ranks=2,
        device="cpu",
        batch_size=16,
        plan=plan,
        cluster=make_cluster(),
        profile=make_profile(),
        estimate=Estimate(
            str(plan),
            0.0412,
            parts,
            158 * MIB,
            {k: v * MIB for k, v in memory.items()},
            4 * 2.0**30,
            hidden_seconds=0.0182,
            error=0.12,
            origin="rates measured on this machine",
        ),
        answer=make_answer(str(plan)),
        steps=steps,
        predicted=make_timeline("predicted"),
        measured=make_timeline("measured", slow=1.04, jitter=0.12),
        step_seconds=0.0440,
        peak_bytes=171 * MIB,
        memory_parts={
            "parameters": 41.6 * MIB,
            "gradients": 41.6 * MIB,
            "activations": 66.8 * MIB,
            "communication": 16 * MIB,
            "other": 5 * MIB,
        },
        evaluation={"loss": 1.7312, "accuracy": 0.4821},
    )


def make_bare_run() -> Run:
    """One rank, one step, nothing recorded, no answer; every name is markup."""
    plan = Plan.parse("dp=1")
    cluster = dataclasses.replace(make_cluster(), name=EVIL, collective=(), origin={"device": EVIL}).with_devices(1)
    profile = dataclasses.replace(make_profile(), name=EVIL, notes=(EVIL,), layers=(Layer(EVIL, EVIL, 10),))
    return Run(
        name=EVIL,
        job=EVIL * 4,
        digest=EVIL,
        command=("drumline", EVIL, "--note", "a\u202eb\x00"),
        started=EVIL,
        machine=EVIL,
        versions={EVIL: EVIL},
        ranks=1,
        device=EVIL,
        batch_size=1,
        plan=plan,
        cluster=cluster,
        profile=profile,
        estimate=Estimate(
            "dp=1",
            0.002,
            {"forward": 0.002},
            100.0,
            {"parameters": 80.0, "activations": 20.0},
            120.0,
            origin=EVIL,
            notes=(EVIL,),
        ),
        predicted=Timeline("predicted", (Span(0, "compute", EVIL, 0.0, 0.002),), notes=(EVIL,)),
        steps=(StepRecord(1, 2.5, 1.0, 0.0031, 1),),
        step_seconds=0.0031,
        evaluation={EVIL: 0.5},
    )


def make_waiting_run(kind: str, seed: int = 0, *, steps: int = 400) -> Run:
    """A run on four ranks, of which rank 2 is slower: `sync`, `async` (every gradient is an update) or `local`."""
    rng = random.Random(f"{kind}/{seed}")
    slow = {"sync": 0.08, "async": 0.03, "local": 0.045}[kind]
    records, elapsed = [], 0.0
    for i in range(steps):
        seconds = slow * (1 + abs(rng.gauss(0, 0.05)))
        elapsed += seconds
        stale = min(9, int(rng.expovariate(0.4))) if kind == "async" else 0
        waits = [0.6 * slow * rng.uniform(0.8, 1.1) if r != 2 else 0.01 * slow for r in range(4)]
        measured = kind == "async" or i % 10 == 9
        records.append(
            StepRecord(
                i,
                1.2 + 3.1 * math.exp(-i / (70 if kind != "async" else 90)) + rng.gauss(0, 0.05),
                1.0,
                seconds,
                16,
                elapsed=elapsed,
                staleness=(stale,) if kind == "async" else (),
                worker=rng.choices(range(4), (3, 3, 1, 3))[0] if kind == "async" else None,
                wait_seconds=tuple((1 if kind == "async" else 10) * (0.1 if kind != "sync" else 1) * w for w in waits)
                if measured
                else (),
                network_share=0.14 if kind == "sync" else None,
                slowest_rank=2 if kind == "sync" else None,
                slowest_phase="backward" if kind == "sync" else "",
                slowest_factor=1.94 if kind == "sync" else None,
                dropped=i // 100 if kind == "async" else 0,
            )
        )
    plans = {"sync": "dp=4", "async": "dp=4,sync=async", "local": "dp=4,sync=local:8"}
    plan = Plan.parse(plans[kind])
    run = make_run()
    return dataclasses.replace(
        run,
        name=f"gpt-{kind}",
        ranks=4,
        plan=plan,
        steps=tuple(records),
        step_seconds=slow,
        estimate=dataclasses.replace(run.estimate, plan=str(plan), step_seconds=slow * 0.93),
    )
