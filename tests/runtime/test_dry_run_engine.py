"""The dry run against the messages and memory of real ranks, plan by plan; and at large world sizes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import dry_run_functions as functions
import pytest
import small_jobs
import torch
import torch.distributed as dist
from torch import nn
from world import World

import drumline as dl
from drumline.core.errors import InputError, PlanError, TraceError
from drumline.plans import Plan
from drumline.runtime.dry_run import DryRun, dry_run, representative_ranks
from drumline.runtime.dry_run.kernel_memory import KernelWorkspaces

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
"""Cases that are slow or similar to another."""


def marked(cases: list[tuple[str, str]]) -> list[Any]:
    names = [f"{name} {plan}" for name, plan in cases]
    return [
        pytest.param(*case, id=name, marks=[pytest.mark.slow] if name in LONG else [])
        for name, case in zip(names, cases, strict=True)
    ]


def messages(result: DryRun, index: int) -> Counter[tuple[str, int, tuple[int, ...]]]:
    return Counter((m.name, m.bytes, m.ranks) for m in result.ranks[index].messages)


def compare(world: World, name: str, plan: str) -> None:
    """Compare messages by name, bytes and ranks, states exactly, and the peak."""
    if small_jobs.missing(name):
        pytest.skip(small_jobs.missing(name))
    result = dry_run(functions.job_of(name), plan, backend="gloo")
    ranks = world.run(functions.real, name, plan)
    for i, rank in enumerate(result.ranks):
        real = ranks[rank.rank]
        assert messages(result, i) == Counter(real["messages"])
        assert (rank.parameters, rank.buffers, rank.optimizer) == (
            real["parameters"],
            real["buffers"],
            real["optimizer"],
        )
        counted = real["counted"]
        for _ in range(2):  # gloo's threads release a buffer late now and then, which is not the step's memory
            if counted <= 1.05 * rank.peak:
                break
            counted = min(counted, world.run(functions.real, name, plan)[rank.rank]["counted"])
        assert rank.peak == pytest.approx(counted, rel=0.05)


@pytest.mark.parametrize(("name", "plan"), marked(TWO))
def test_two_ranks_match_the_dry_run(world: Worlds, name: str, plan: str) -> None:
    compare(world(2, "plain gloo"), name, plan)


@pytest.mark.parametrize(("name", "plan"), marked(FOUR))
def test_four_ranks_match_the_dry_run(world: Worlds, name: str, plan: str) -> None:
    compare(world(4, "plain gloo"), name, plan)


@pytest.mark.parametrize("plan", ["dp=2,ep=2", "dp=2,ep=2,zero=1"])
def test_experts_assume_uniform_load(world: Worlds, plan: str) -> None:
    """Routing depends on values: the messages have the right names, ranks and number, and uniform bytes."""
    name = "mixture of experts"
    result = dry_run(functions.job_of(name), plan, backend="gloo")
    real = world(2, "plain gloo").run(functions.real, name, plan)[0]
    mine = Counter((m.name, m.ranks) for m in result.ranks[0].messages)
    theirs: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for (kind, _, ranks), n in real["messages"].items():
        theirs[kind, ranks] += n
    assert mine == theirs
    assert (result.ranks[0].parameters, result.ranks[0].optimizer) == (real["parameters"], real["optimizer"])
    assert any("uniform load" in note for note in result.notes)


ALLOCATED = [
    "dp=2",
    "dp=2,zero=1,micro=2",
    "dp=2,zero=2",
    "dp=2,zero=3",
    "dp=2,recompute=full",
    "dp=2,precision=bf16",
    "pp=2,micro=4",
]
"""Plans whose kernels use little workspace memory, which belongs to no tensor."""


@pytest.mark.parametrize(
    "plan", [pytest.param(p, marks=[] if p in ("dp=2", "dp=2,zero=3") else [pytest.mark.slow]) for p in ALLOCATED]
)
def test_peak_matches_the_allocator(world: Worlds, plan: str) -> None:
    """An independent count: the profiler's allocator events, plus what was allocated before the step."""
    result = dry_run(functions.job_of("words"), plan, backend="gloo")
    ranks = world(2, "plain gloo").run(functions.real, "words", plan)
    beyond = world(2).run(functions.allocated, "words", plan)
    for rank in result.ranks:
        assert rank.peak == pytest.approx(ranks[rank.rank]["before"] + beyond[rank.rank], rel=0.05)


# -- large world sizes


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
    result = dry_run(wide(), "dp=1024,zero=3")
    numbers = 4 * 2**30
    (rank,) = result.ranks
    assert result.world == 1024
    assert rank.parameters == rank.gradients == 4 * numbers // 1024
    assert rank.optimizer == pytest.approx(2 * rank.parameters, rel=1e-6)
    gathered = [m for m in rank.messages if m.name == "all_gather"]
    assert {m.bytes for m in gathered} == {4 * 2**30} and all(m.ranks == tuple(range(1024)) for m in gathered)
    assert rank.peak > 2 * 4 * 2**30  # a layer is gathered into one buffer and copied out of it
    assert time.process_time() - start < 60.0  # much less on a quiet machine


def test_every_stage_is_run() -> None:
    result = dry_run(wide(64), "pp=4,dp=4,tp=2,micro=4")
    assert [r.rank for r in result.ranks] == [0, 8, 16, 24]
    assert {m.ranks for m in result.ranks[1].messages if m.name == "send"} == {(8, 0), (8, 16)}
    assert all(r.parameters == 4 * 2**30 // 2 for r in result.ranks)


# -- errors and notes


def test_model_that_reads_values_is_named() -> None:
    class ReadsValues(small_jobs.MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * float(x.sum())

    with pytest.raises(TraceError, match="ReadsValues cannot be traced"):
        dry_run(small_jobs.make("mlp", model=ReadsValues), "dp=2")


def test_failing_plan_names_the_place() -> None:
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
    assert not dist.is_initialized()  # the simulated world is always removed


def test_not_inside_a_world(world: Worlds) -> None:
    with pytest.raises(InputError, match="a process that already has a process group"):
        world(2).run(functions.dry_inside)


def test_gpu_emulation() -> None:
    """A GPU's autocast computes norms and losses in fp32, and so saves other tensors than a CPU's."""
    if torch.cuda.is_available():
        pytest.skip("a GPU is available")
    job = functions.job_of("words")
    cpu, gpu = (dry_run(job, "dp=2,precision=bf16", device=kind) for kind in ("cpu", "cuda"))
    assert gpu.device == "cuda" and "GPU emulated" in gpu.notes[0] and not cpu.notes
    assert gpu.peak != cpu.peak
    assert gpu.ranks[0].parameters == cpu.ranks[0].parameters


def test_recurrent_layers_of_a_gpu_save_more() -> None:
    """They save gates and states for the backward: five values per output value."""
    job = small_jobs.make("lstm")
    cpu, gpu = (dry_run(job, "", device=kind) for kind in ("cpu", "cuda"))
    assert torch.cuda.is_available() or any("GPU emulated" in note for note in gpu.notes)
    assert gpu.peak > cpu.peak and gpu.ranks[0].optimizer == cpu.ranks[0].optimizer


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU to measure its kernels")
def test_kernel_workspaces_are_measured() -> None:
    workspaces = KernelWorkspaces(torch.device("cuda", 0))
    x, w = torch.empty(256, 64, 32, 32, device="cuda"), torch.empty(64, 64, 3, 3, device="cuda")
    args = (x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    assert workspaces.workspace_bytes(torch.ops.aten.convolution.default, args, {}) >= 0 and not workspaces.refused
    assert workspaces.workspace_bytes(torch.ops.aten.add.Tensor, (x, x), {}) == 0
    assert len(workspaces._cache) == 1


def test_note_on_offloading_on_a_cpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is available")
    plain, offloaded = (dry_run(small_jobs.make("mlp"), plan) for plan in ("", "offload=optimizer"))
    assert not plain.notes and "no other memory to offload to" in offloaded.notes[0]
    assert offloaded.ranks[0].optimizer == plain.ranks[0].optimizer


def test_the_sampler_of_a_loader_runs_on_real_numbers() -> None:
    job = small_jobs.make("mlp")
    shuffled = small_jobs.make(
        "mlp", data=lambda: torch.utils.data.DataLoader(job.data(), batch_size=job.batch_size, shuffle=True)
    )
    assert dry_run(shuffled, "dp=2").peak == dry_run(job, "dp=2").peak


def test_file_form(tmp_path: Any) -> None:
    result = dry_run(small_jobs.make("mlp"), "dp=2,zero=1")
    result.save(tmp_path / "dry.json")
    assert DryRun.load(tmp_path / "dry.json") == result
    assert str(result).startswith("dry run of dp=2,zero=1 on 2 ranks: peak ")
    assert {m.phase for m in result.ranks[0].messages} == {"backward", "communication", "optimizer"}


def test_first_rank_of_every_stage_is_representative() -> None:
    assert representative_ranks(Plan.parse("dp=8,zero=3")) == [0]
    assert representative_ranks(Plan.parse("pp=2,dp=4,tp=2")) == [0, 8]
