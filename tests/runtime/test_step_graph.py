"""`graph=true` without a GPU: what is refused, by name, and the price of the rest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

import drumline as dl
from drumline.clusters import load
from drumline.comm.environment import disconnect
from drumline.core.errors import PlanError
from drumline.costs import cost_model
from drumline.planner.space import candidates
from drumline.plans import Plan, check
from drumline.runtime.core.step_graph import check_batches, prefer_fused_kernel
from drumline.runtime.engine import initialize
from drumline.tracing import trace


@pytest.fixture(autouse=True)
def _leaves() -> Iterator[None]:
    yield
    disconnect()


def job(batch: int = 4, width: int = 32) -> dl.Job:
    data = [(torch.ones(width), torch.ones(width)) for _ in range(16)]
    return dl.Job(
        model=lambda: nn.Sequential(*(nn.Linear(width, width) for _ in range(20))),
        loss=nn.functional.mse_loss,
        optimizer=lambda p: torch.optim.AdamW(p),
        data=lambda: data,
        batch_size=batch,
    )


@pytest.mark.parametrize(
    ("plan", "named"),
    [
        ("dp=2", "dp=2: a CUDA graph"),
        ("tp=2", "tp=2"),
        ("pp=2,micro=2", "pp=2"),
        ("tile=1x2", "tile=1x2"),
        ("dp=1,zero=3", "zero=3"),
        ("dp=1,offload=optimizer", "offload=optimizer"),
        ("dp=1,recompute=full", "recompute=full"),
        ("dp=1,chunk=2", "chunk=2"),
        ("dp=2,ep=2", "ep=2"),
        ("dp=1,backend=threads", "backend=threads"),
    ],
)
def test_plans_that_are_not_captured_are_refused_by_name(plan: str, named: str) -> None:
    with pytest.raises(PlanError, match="graph with keys that are not captured") as error:
        check(Plan.parse(f"{plan},graph=true"))
    assert named in error.value.rule
    assert error.value.fix == f"the nearest plan that runs: {Plan.parse(plan)}"
    check(Plan.parse(plan))


@pytest.mark.parametrize("plan", ["dp=1", "micro=4,precision=fp16", "precision=bf16,compile=true", "zero=1"])
def test_plans_of_one_gpu_are_captured(plan: str) -> None:
    check(Plan.parse(f"{plan},graph=true"))


def test_asynchronous_replicas_are_refused() -> None:
    with pytest.raises(PlanError, match="graph"):
        check(Plan.parse("dp=2,sync=local:4,graph=true"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cpu_is_refused() -> None:
    with pytest.raises(PlanError, match="graph=true on a cpu") as error:
        initialize(job(), "dp=1,micro=2,graph=true")
    assert error.value.fix == "the nearest plan that runs: dp=1,micro=2"


def test_users_choice_of_kernel_is_kept() -> None:
    weight = nn.Parameter(torch.ones(2))
    chosen = torch.optim.SGD([weight], lr=0.1, foreach=True)
    prefer_fused_kernel(chosen)
    assert chosen.param_groups[0]["fused"] is None
    free = torch.optim.SGD([weight], lr=0.1)
    prefer_fused_kernel(free)
    assert free.param_groups[0]["fused"] is True


def test_price_is_that_of_the_kernels() -> None:
    """A small model waits for its host without a graph; a large one does not, and gains nothing."""
    cluster = load("dgx-h200").with_devices(1)
    small = trace(job(), precision="bf16", device="cuda")
    model = cost_model(small, cluster, "bf16")
    plan = Plan(precision="bf16")
    plain, graph = model.seconds([plan, replace(plan, graph=True)])
    assert graph < 0.5 * plain
    workspace = cluster.device.workspace
    assert model.memory(replace(plan, graph=True)).total == model.memory(plan).total + workspace
    large = trace(job(batch=16, width=8192), precision="bf16", device="cuda")
    model = cost_model(replace(large, batch_size=16384), cluster, "bf16")
    plain, graph = model.seconds([plan, replace(plan, graph=True)])
    assert 0.9 * plain < graph <= plain


def test_compiled_code_takes_its_host_longer_unless_captured() -> None:
    cluster, plan = load("dgx-h200").with_devices(1), Plan(precision="bf16")
    model = cost_model(trace(job(), precision="bf16", device="cuda"), cluster, "bf16")
    alone = replace(plan, compile=True)
    plain, compiled, both = model.seconds([plan, alone, replace(alone, graph=True)])
    assert plain < compiled < 1.2 * plain
    assert both == model.seconds([replace(plan, graph=True)])[0]
    assert "a host that takes 1.15 times as long" in " ".join(model.estimate(alone).notes)
    cpu = replace(cluster, device=replace(cluster.device, kind="cpu"))
    priced = cost_model(trace(job()), cpu, "fp32").seconds([Plan(), Plan(compile=True)])
    assert priced[0] == priced[1]


@pytest.mark.parametrize(
    ("batch", "micro", "steps", "words", "fix"),
    [
        (6, 1, 3, "16 samples in batches of 6", "a dataset of 12 samples"),
        (8, 3, 3, "micro=3 for batches of 8", "micro=2"),
        (32, 1, 3, "16 samples in batches of 32", "batches of 16"),
    ],
)
def test_jobs_with_batches_of_several_shapes_are_refused(
    batch: int, micro: int, steps: int, words: str, fix: str
) -> None:
    plan = Plan(micro=micro, graph=True)
    with pytest.raises(PlanError, match=words) as error:
        check_batches(replace(job(batch), steps=steps), plan, 16)
    assert error.value.fix == f"{fix}, or the nearest plan that runs: {replace(plan, graph=False)}"


def test_short_run_does_not_reach_the_last_batch() -> None:
    check_batches(replace(job(6), steps=2), Plan(graph=True), 16)


def test_planner_offers_it_where_it_wins() -> None:
    one = load("dgx-h200").with_devices(1)
    base = Plan(precision="bf16")
    small = trace(job(), precision="bf16", device="cuda")
    assert any(p.graph for p in candidates(small, one, base))
    large = replace(trace(job(batch=16, width=8192), precision="bf16", device="cuda"), batch_size=16384)
    assert not any(p.graph for p in candidates(large, one, base))
    assert not any(p.graph for p in candidates(replace(small, optimizer="LAMB"), one, base))
    assert not any(p.graph and p.ranks > 1 for p in candidates(small, load("dgx-h200").with_devices(4), base))


def test_dry_run_counts_the_plain_step() -> None:
    from drumline.runtime.dry_run import dry_run

    assert "graph=true" in dry_run(job(), "dp=1,graph=true", device="cuda").plan
