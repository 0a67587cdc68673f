"""Made-up predictions: a search with its maps and curves, and a simulation of a pipeline."""

from __future__ import annotations

import dataclasses

from fake_run import EVIL, MIB, make_cluster, make_profile, make_timeline

from drumline.core.timeline import Span, Timeline
from drumline.costs.estimate import Estimate
from drumline.costs.link_traffic import LinkLoad
from drumline.planner.answer import Answer, Candidate
from drumline.planner.plan_families import PlanFamily
from drumline.planner.scaling_curve import ScalingPoint
from drumline.planner.strategy_map import candidate_maps
from drumline.plans.plan import Plan
from drumline.reports.plan_report import PlanReport
from drumline.reports.simulation_page import SimulationReport
from drumline.simulator.critical_path import PathPart
from drumline.simulator.memory_curve import StageMemory

GIB = 2.0**30


def make_estimate(plan: str, seconds: float, size: float) -> Estimate:
    parts = {"forward": 0.3, "backward": 0.5, "communication": 0.15, "optimizer": 0.05}
    memory = {"parameters": 0.3, "gradients": 0.2, "optimizer": 0.1, "activations": 0.4}
    return Estimate(
        plan,
        seconds,
        {k: v * seconds for k, v in parts.items()},
        size,
        {k: v * size for k, v in memory.items()},
        4 * GIB,
        error=0.15,
    )


def make_plan_report() -> PlanReport:
    """All plans of tp, pp, zero and micro up to 4 on four devices; the small micro-batches do not fit without ZeRO."""
    estimates: dict[str, Estimate] = {}
    for tp in (1, 2, 4):
        for pp in (1, 2, 4):
            if tp * pp > 4:
                continue
            dp = 4 // (tp * pp)
            for zero in (0, 1, 2, 3) if dp > 1 and tp * pp == 1 else (0,):
                for micro in (1, 2, 4, 8):
                    plan = str(Plan.parse(f"dp={dp},tp={tp},pp={pp},zero={zero},micro={micro}"))
                    seconds = 0.1 * (1 + 0.2 * (tp - 1) + 0.15 * (pp - 1) + 0.04 * zero + 0.02 * micro)
                    size = GIB * (9 / (tp * pp * (1 + zero)) + 4 / micro)
                    estimates[plan] = make_estimate(plan, seconds, size)
    ranked = sorted(estimates.values(), key=lambda e: (not e.fits, e.step_seconds if e.fits else e.memory_bytes))
    best = ranked[0]
    candidates = tuple(
        Candidate(
            Plan.parse(e.plan),
            e.step_seconds,
            e.memory_bytes,
            e.fits,
            "fastest plan that fits" if e is best else f"{100 * (e.step_seconds / best.step_seconds - 1):.0f}% slower",
        )
        for e in ranked
    )
    families = (
        PlanFamily(
            "sharded", best.plan, best.step_seconds, best.memory_bytes, True, 0.0, 0.0, "fastest plan that fits"
        ),
        PlanFamily(
            "tensor", "dp=2,tp=2", 0.13, 3 * GIB, True, 0.2, 0.0, "20% slower", ("if the link is faster than 9 GB/s",)
        ),
        PlanFamily("tiles", "", 0.0, 0.0, False, 0.0, 0.0, "the model has no convolutions"),
    )
    explanation = (
        f"{best.plan} takes 112 ms per step on 4 of 4 cpu cores. It is bound by matmuls: 80% of the step. "
        "Optimizer state, gradients and parameters are sharded over 4 ranks. The best alternative is dp=2,tp=2: 20% "
        "slower, because messages take 20 ms more."
    )
    plans = [(c.plan, c.step_seconds, c.memory_bytes, c.fits) for c in candidates]
    return PlanReport(
        answer=Answer(candidates, 0.42, explanation, families=families, scored=len(candidates)),
        profile=make_profile(),
        cluster=make_cluster().with_devices(2),
        estimates=estimates,
        given=Plan.parse("dp=4,zero=3,micro=8"),
        maps=tuple(candidate_maps(plans)),
        scaling=tuple(
            ScalingPoint(
                n, f"dp={n}" if n > 1 else "", 16, 0.4 / n**0.9, 40 * n**0.9, n**-0.1, "" if n > 1 else "2 GiB more"
            )
            for n in (1, 2, 4, 8)
        ),
    )


def make_simulation_report(*, markup: bool = False) -> SimulationReport:
    """A step of two ranks with all that a page can show; with `markup` every name is an attack."""
    name = EVIL if markup else "forward blocks"
    timeline = make_timeline("predicted")
    if markup:
        timeline = Timeline(
            "predicted", tuple(dataclasses.replace(s, name=EVIL) for s in timeline.spans), notes=(EVIL,)
        )
    times = tuple(0.004 * i for i in range(12))
    curve = tuple(MIB * (100 + 20 * min(i, 11 - i)) for i in range(12))
    return SimulationReport(
        title=EVIL if markup else "gpt-6x384 with dp=2 on laptop",
        timeline=timeline,
        step_seconds=0.0415,
        parts={"forward": 0.013, "backward": 0.025, "communication": 0.0035},
        estimate=make_estimate("dp=2", 0.0412, 0.3 * GIB),
        planned_seconds=0.0412,
        planned_by=EVIL if markup else "",
        memory=tuple(StageMemory(stage, times, tuple(b / (stage + 1) for b in curve)) for stage in range(3)),
        links=(LinkLoad(EVIL if markup else "node", 2e8, 3e11, 0.34), LinkLoad("network", 3e7, 2e10, 0.12)),
        path=tuple(PathPart(f"{name}.{i}", i % 2, 0.004) for i in range(10)),
        facts=(("Throughput", EVIL if markup else "386 samples/s"),),
        notes=(EVIL,) if markup else ("Ranks are assumed to be alike.",),
    )


def make_spans(origin: str, count: int, ranks: int = 4) -> Timeline:
    """A long step, with names as long as those of real models."""
    spans = []
    for r in range(ranks):
        t = 0.0
        for i in range(count // ranks):
            phase = "forward" if i < count // ranks // 3 else "backward"
            name = f"{phase} model.decoder.layers.{i % 96}.attention.projection"
            lane = "communication" if i % 3 == 2 else "compute"
            spans.append(Span(r, lane, name if lane == "compute" else "all_reduce bucket", t, t + 1e-3, 1e6))
            t += 1.1e-3
    return Timeline(origin, tuple(spans))
