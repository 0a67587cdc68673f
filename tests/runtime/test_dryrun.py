"""The dry run against what ranks really send and hold, plan by plan; and at sizes that nobody has here."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import dry_functions as functions
import pytest
import small_jobs
import torch
import torch.distributed as dist
from torch import nn
from world import World

import drumline as dl
from drumline.core.errors import InputError, PlanError, TraceError
from drumline.plans import Plan
from drumline.runtime.dry_run import DryRun, dry_run, kinds_of_ranks
from drumline.runtime.dry_run.kernels import Kernels

Worlds = Callable[[int], World]

TWO = [
    ("gpt", "dp=2"),
    ("gpt", "dp=2,micro=2"),
    ("cnn", "dp=2"),
    ("partial", "dp=2"),
    ("partial", "dp=2,zero=2"),
    ("partial", "dp=2,zero=3"),
    ("gpt", "dp=2,zero=1"),
    ("gpt", "dp=2,zero=2,micro=2"),
    ("gpt", "dp=2,zero=3,precision=bf16"),
    ("cnn", "dp=2,precision=fp16,micro=2"),
    ("huge", "dp=2,zero=3,chunk=2"),
    ("gpt", "dp=2,zero=3,recompute=full"),
    ("gpt", "dp=2,zero=1,recompute=selective"),
    ("gpt", "tp=2"),
    ("gpt", "pp=2,micro=3"),
    ("gpt", "pp=2,micro=4,schedule=zero-bubble"),
    ("gpt", "pp=2,micro=4,virtual=2,schedule=interleaved"),
    ("llama", "cp=2"),
    ("unet", "tile=1x2"),
]
FOUR = [
    ("gpt", "dp=4,zero=2,shard=2"),
    ("mlp", "dp=4,zero=3,shard=2"),
    ("gpt", "dp=2,tp=2,zero=1"),
    ("gpt", "pp=2,dp=2,micro=2,recompute=full"),
    ("words", "cp=2,tp=2"),
    ("unet", "tile=2x2"),
    ("gpt", "pp=4,micro=4,schedule=gpipe"),
]


LONG = (
    "cnn dp=2,precision=fp16,micro=2",
    "partial dp=2,zero=3",
    "gpt pp=2,micro=4,virtual=2,schedule=interleaved",
    "llama cp=2",
    "gpt dp=2,micro=2",
    "unet tile=2x2",
    "gpt pp=4,micro=4,schedule=gpipe",
    "mlp dp=4,zero=3,shard=2",
)
"""What takes long, or has a neighbour that is like it."""


def marked(cases: list[tuple[str, str]]) -> list[Any]:
    names = [f"{name} {plan}" for name, plan in cases]
    return [
        pytest.param(*case, id=name, marks=[pytest.mark.slow] if name in LONG else [])
        for name, case in zip(names, cases, strict=True)
    ]


def messages(found: DryRun, index: int) -> Counter[tuple[str, int, tuple[int, ...]]]:
    return Counter((m.name, m.bytes, m.ranks) for m in found.ranks[index].messages)


def compare(world: World, name: str, plan: str) -> None:
    """Messages by name, bytes and ranks, states to the byte, and the peak."""
    if small_jobs.missing(name):
        pytest.skip(small_jobs.missing(name))
    found = dry_run(functions.job_of(name), plan, backend="gloo")
    ranks = world.run(functions.real, name, plan)
    for i, seen in enumerate(found.ranks):
        real = ranks[seen.rank]
        assert messages(found, i) == Counter(real["messages"])
        assert (seen.parameters, seen.buffers, seen.optimizer) == (
            real["parameters"],
            real["buffers"],
            real["optimizer"],
        )
        assert seen.peak == pytest.approx(real["counted"], rel=0.05)


@pytest.mark.parametrize(("name", "plan"), marked(TWO))
def test_two_ranks_do_what_the_dry_run_does(world: Worlds, name: str, plan: str) -> None:
    compare(world(2), name, plan)


@pytest.mark.parametrize(("name", "plan"), marked(FOUR))
def test_four_ranks_do_what_the_dry_run_does(world: Worlds, name: str, plan: str) -> None:
    compare(world(4), name, plan)


@pytest.mark.parametrize("plan", ["dp=2,ep=2", "dp=2,ep=2,zero=1"])
def test_experts_are_counted_at_uniform_load(world: Worlds, plan: str) -> None:
    """Where tokens go depends on values: the messages have the right names, ranks and number, and uniform bytes."""
    name = "mixture of experts"
    found = dry_run(functions.job_of(name), plan, backend="gloo")
    real = world(2).run(functions.real, name, plan)[0]
    mine = Counter((m.name, m.ranks) for m in found.ranks[0].messages)
    theirs: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for (kind, _, ranks), n in real["messages"].items():
        theirs[kind, ranks] += n
    assert mine == theirs
    assert (found.ranks[0].parameters, found.ranks[0].optimizer) == (real["parameters"], real["optimizer"])
    assert any("uniform load" in note for note in found.notes)


ALLOCATED = [
    "dp=2",
    "dp=2,zero=1,micro=2",
    "dp=2,zero=2",
    "dp=2,zero=3",
    "dp=2,recompute=full",
    "dp=2,precision=bf16",
    "pp=2,micro=4",
]
"""Plans whose kernels take little memory of their own, which is no tensor's."""


@pytest.mark.parametrize(
    "plan", [pytest.param(p, marks=[] if p in ("dp=2", "dp=2,zero=3") else [pytest.mark.slow]) for p in ALLOCATED]
)
def test_the_peak_is_the_allocators(world: Worlds, plan: str) -> None:
    """An independent count: what the allocator tells the profiler, beyond what was there before the step."""
    found = dry_run(functions.job_of("words"), plan, backend="gloo")
    ranks = world(2).run(functions.real, "words", plan)
    beyond = world(2).run(functions.allocated, "words", plan)
    for seen in found.ranks:
        assert seen.peak == pytest.approx(ranks[seen.rank]["before"] + beyond[seen.rank], rel=0.05)


# -- sizes that nobody has here


class Wide(nn.Module):
    """16 GiB of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(2**15, 2**15, bias=False)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def wide(batch: int = 1024) -> dl.Job:
    def adam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters)

    sample = torch.zeros(2**15), torch.zeros(2**15)
    return dl.Job(
        model=Wide, loss=nn.functional.mse_loss, optimizer=adam, data=lambda: [sample] * batch, batch_size=batch
    )


def test_a_thousand_ranks_in_one_process() -> None:
    start = time.process_time()
    found = dry_run(wide(), "dp=1024,zero=3")
    numbers = 4 * 2**30
    (rank,) = found.ranks
    assert found.world == 1024
    assert rank.parameters == rank.gradients == 4 * numbers // 1024
    assert rank.optimizer == pytest.approx(2 * rank.parameters, rel=1e-6)
    gathered = [m for m in rank.messages if m.name == "all_gather"]
    assert {m.bytes for m in gathered} == {4 * 2**30} and all(m.ranks == tuple(range(1024)) for m in gathered)
    assert rank.peak > 2 * 4 * 2**30  # a layer is gathered into one buffer, and copied out of it
    assert time.process_time() - start < 60.0  # some on a quiet machine


def test_every_stage_is_looked_at() -> None:
    found = dry_run(wide(64), "pp=4,dp=4,tp=2,micro=4")
    assert [r.rank for r in found.ranks] == [0, 8, 16, 24]
    assert {m.ranks for m in found.ranks[1].messages if m.name == "send"} == {(8, 0), (8, 16)}
    assert all(r.parameters == 4 * 2**30 // 2 for r in found.ranks)


# -- what it refuses, and says


def test_a_model_that_asks_for_values_is_named() -> None:
    class Asks(small_jobs.MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * float(x.sum())

    with pytest.raises(TraceError, match="Asks cannot be traced"):
        dry_run(small_jobs.make("mlp", model=Asks), "dp=2")


def test_a_plan_that_fails_says_where() -> None:
    with pytest.raises(PlanError, match="tp=3 cannot share"):
        dry_run(small_jobs.make("gpt"), "tp=3")
    with pytest.raises(PlanError, match="the engine does not run"):
        dry_run(small_jobs.make("gpt"), "dp=2,ep=2,tp=2")

    def broken(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        optimizer.step = lambda: torch.zeros(2) + torch.zeros(3)  # type: ignore[method-assign,assignment]
        return optimizer

    with pytest.raises(PlanError, match="the dry run of dp=2 failed on rank 0: RuntimeError"):
        dry_run(small_jobs.make("mlp", optimizer=broken), "dp=2")
    assert not dist.is_initialized()  # whatever happens, the world that is not there is gone


def test_not_inside_of_a_world(world: Worlds) -> None:
    with pytest.raises(InputError, match="a process that has a process group"):
        world(2).run(functions.dry_inside)


def test_as_on_a_gpu_without_one() -> None:
    """Autocast of a GPU computes norms and losses in fp32, and so keeps other things than a CPU's."""
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    job = functions.job_of("words")
    cpu, gpu = (dry_run(job, "dp=2,precision=bf16", device=kind) for kind in ("cpu", "cuda"))
    assert gpu.device == "cuda" and "as on a GPU" in gpu.notes[0] and not cpu.notes
    assert gpu.peak != cpu.peak
    assert gpu.ranks[0].parameters == cpu.ranks[0].parameters


def test_recurrent_layers_of_a_gpu_keep_more() -> None:
    """Their gates and states, until the backward: five values for each that they give."""
    job = small_jobs.make("lstm")
    cpu, gpu = (dry_run(job, "", device=kind) for kind in ("cpu", "cuda"))
    assert torch.cuda.is_available() or any("as on a GPU" in note for note in gpu.notes)
    assert gpu.peak > cpu.peak and gpu.ranks[0].optimizer == cpu.ranks[0].optimizer


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: only it knows what its kernels take")
def test_what_kernels_take_is_asked() -> None:
    kernels = Kernels(torch.device("cuda", 0))
    x, w = torch.empty(256, 64, 32, 32, device="cuda"), torch.empty(64, 64, 3, 3, device="cuda")
    args = (x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    assert kernels.takes(torch.ops.aten.convolution.default, args, {}) >= 0 and not kernels.refused
    assert kernels.takes(torch.ops.aten.add.Tensor, (x, x), {}) == 0
    assert len(kernels._known) == 1


def test_what_a_cpu_cannot_offload_is_said() -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    plain, moved = (dry_run(small_jobs.make("mlp"), plan) for plan in ("", "offload=optimizer"))
    assert not plain.notes and "nowhere to take it" in moved.notes[0]
    assert moved.ranks[0].optimizer == plain.ranks[0].optimizer


def test_file_form(tmp_path: Any) -> None:
    found = dry_run(small_jobs.make("mlp"), "dp=2,zero=1")
    found.save(tmp_path / "dry.json")
    assert DryRun.load(tmp_path / "dry.json") == found
    assert str(found).startswith("dry run of dp=2,zero=1 on 2 ranks: peak ")
    assert {m.phase for m in found.ranks[0].messages} == {"backward", "communication", "optimizer"}


def test_the_first_rank_of_every_stage_stands_for_all() -> None:
    assert kinds_of_ranks(Plan.parse("dp=8,zero=3")) == [0]
    assert kinds_of_ranks(Plan.parse("pp=2,dp=4,tp=2")) == [0, 8]
