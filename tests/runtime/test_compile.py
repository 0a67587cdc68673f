"""compile=true: layers are compiled where they stand, and the result equals one device. The quick tests let torch trace
the graphs and run them as they are; the slow ones let it write and build code, which takes minutes.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import parity
import pytest
import small_jobs
import torch
from torch import nn
from world import World

from drumline.plans import Plan
from drumline.runtime.core.compiling import compile_layers, compiles_whole, inside_compiled
from drumline.runtime.verification.verify import Verification

Worlds = Callable[[int], World]


def traced(job: str, plan: str, backend: str) -> tuple[Verification | None, int]:
    """Verify with graphs of torch's compiler, and how many of them there were."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    if hasattr(torch.hub.tqdm, "set_lock"):  # its own lock is a semaphore that lives as long as the rank
        torch.hub.tqdm.set_lock(threading.RLock())
    with (
        mock.patch("torch.compile", functools.partial(torch.compile, backend=backend)),
        mock.patch("torch._dynamo.config.fail_on_recompile_limit_hit", True),  # or it would go on without compiling
        # Compilers in processes of their own would live as long as the rank, and so would their semaphores.
        mock.patch("torch._inductor.config.compile_threads", 1) if backend == "inductor" else nullcontext(),
    ):
        result = parity.run_verify(job, plan, 3)
    return result, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    ("job", "plan"),
    [
        ("mlp", "dp=2"),
        ("gpt", "dp=2,zero=3"),
        ("gpt", "dp=2,recompute=full"),
        ("mlp", "dp=2,zero=2,micro=2"),
    ],
)
def test_graphs_equal_one_device(world: Worlds, job: str, plan: str) -> None:
    results = world(2).run(traced, job, f"{plan},compile=true", "eager")
    parity.check(results[0][0])
    assert all(graphs > 0 for _, graphs in results)


@pytest.mark.slow
def test_rank_without_samples_stays_in_step(world: Worlds) -> None:
    """Its backward sends zeros, which depend on the gradient: else a compiler moves that message to the forward."""
    results = world(2).run(traced, "cnn", "dp=2,micro=2,compile=true", "aot_eager_decomp_partition")
    parity.check(results[0][0])


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1", "dp=2,zero=3", "dp=2,precision=bf16", "dp=2,recompute=full"])
@pytest.mark.parametrize("job", ["mlp", "gpt", "cnn"])
def test_compiled_code_equals_one_device(world: Worlds, job: str, plan: str) -> None:
    results = world(2).run(traced, job, f"{plan},compile=true", "inductor", timeout=280)
    parity.check(results[0][0])
    assert all(graphs > 0 for _, graphs in results)


def test_layers_are_compiled_in_place() -> None:
    """Names stay; blocks are compiled, without their wrappers; modules inside them are not observed."""
    made: list[Any] = []

    def compiled(forward: Any) -> Any:
        made.append(forward.__self__)
        return forward

    model = small_jobs.GPT()
    names = [name for name, _ in model.named_modules()], list(model.state_dict())
    with mock.patch("torch.compile", compiled):
        compile_layers(model)
    assert made == list(model.blocks)
    assert ([name for name, _ in model.named_modules()], list(model.state_dict())) == names
    assert inside_compiled(model) == {m for b in model.blocks for m in b.modules()} - set(model.blocks)


class Scaled(nn.Module):
    """A block with a number of its own, for which torch compiles it anew."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, width), nn.Linear(width, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def test_recompile_limit_is_raised() -> None:
    """Without a higher limit torch continues uncompiled after the eighth."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = nn.Sequential(*(Scaled(width) for width in range(3, 15)))
    limits = {"recompile_limit": 8, "fail_on_recompile_limit_hit": True, "automatic_dynamic_shapes": False}
    eager = mock.patch("torch.compile", functools.partial(torch.compile, backend="eager"))
    with torch._dynamo.config.patch(limits), eager, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's compiler reads what it warns of
        compile_layers(model)
        model(torch.randn(2, 6)).sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 12


@pytest.mark.parametrize(
    ("plan", "whole"),
    [("dp=1", True), ("dp=1,zero=1,micro=2", True), ("dp=2", False), ("dp=1,recompute=full", False), ("zero=3", False)],
)
def test_one_rank_compiles_the_model_as_one(plan: str, whole: bool) -> None:
    assert compiles_whole(Plan.parse(plan)) == whole


def test_model_without_blocks_is_compiled_whole() -> None:
    made: list[Any] = []
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    with mock.patch("torch.compile", lambda forward: made.append(forward.__self__) or forward):
        compile_layers(model)
    assert made == [model]
    assert inside_compiled(model) == set(model.children())
