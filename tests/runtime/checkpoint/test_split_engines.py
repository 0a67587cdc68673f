"""Engines of split models save and load: passed from plan to plan and back, the state stays bitwise equal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import on_ranks
import pytest
import safetensors.torch
import small_jobs
import torch
from world import World

from drumline.plans import Plan
from drumline.runtime.checkpoint.export import export

Worlds = Callable[[int], World]

CHAINS = {
    "gpt": ["dp=1", "tp=2", "dp=2,zero=3", "pp=2,micro=2", "cp=2", "dp=2,zero=1,tp=2", "dp=1"],
    "partial": ["tp=2", "pp=2,micro=2", "dp=2,zero=1", "tp=2"],
    "images": ["pp=2,micro=2", "tile=2x1", "dp=2", "dp=2,tile=2x1", "pp=2,micro=2"],
}
"""Jobs, and the plans they pass through."""
LONG = ["tp=2", "dp=2,zero=1", "dp=2,tp=2", "pp=2,tp=2,micro=2", "dp=2,zero=3", "dp=2,pp=2,micro=2", "tp=2"]


def run(world: Worlds, plan: str, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    return world(Plan.parse(plan).ranks).run(function, *arguments)


def equal(state: dict[str, Any], result: dict[str, Any]) -> None:
    """Bitwise equal; a pipeline rank has only the buffers of its own stages."""
    assert {k for k in state if not k.startswith("buffer/")} <= result.keys() <= state.keys()
    for name, value in result.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == state[name].dtype and torch.equal(value, state[name]), name
        else:
            assert value == state[name], name


@pytest.mark.parametrize(
    ("name", "chain"),
    [
        *CHAINS.items(),
        pytest.param("gpt", LONG, marks=pytest.mark.slow),
    ],
    ids=lambda x: x if isinstance(x, str) else len(x),
)
def test_from_plan_to_plan(world: Worlds, tmp_path: Path, name: str, chain: list[str]) -> None:
    """Parameters, buffers, optimizer state, rates and schedule; every rank of every plan."""
    first, *others = chain
    parts = run(world, first, on_ranks.save, name, first, str(tmp_path / "0"), 2)
    state = {k: v for part in parts for k, v in part.items()}
    for i, plan in enumerate(others):
        for result in run(
            world, plan, on_ranks.passed_on, name, plan, str(tmp_path / str(i)), str(tmp_path / str(i + 1))
        ):
            equal(state, result)


@pytest.mark.parametrize("plan", ["tp=2", "pp=2,micro=2", pytest.param("dp=2,tp=2", marks=pytest.mark.slow)])
def test_restart_is_exact(world: Worlds, tmp_path: Path, plan: str) -> None:
    """Two steps, a restart and two more equal four steps bit for bit, with dropout and a background save."""
    run(world, plan, on_ranks.save, "dropout", plan, str(tmp_path), 2, False)
    straight = run(world, plan, on_ranks.straight, "dropout", plan, 4)
    for a, b in zip(straight, run(world, plan, on_ranks.loaded, "dropout", plan, str(tmp_path), 2), strict=True):
        equal(a, b)


@pytest.mark.parametrize("plan", ["tp=2", "pp=2,micro=2"])
def test_weights_export_and_import(world: Worlds, tmp_path: Path, plan: str) -> None:
    """Exported under the user's names, and loaded again."""
    [state, *_] = run(world, plan, on_ranks.save, "gpt", plan, str(tmp_path / "c"), 2)
    [path] = export(tmp_path / "c", tmp_path / "out")
    plain = small_jobs.GPT()
    safetensors.torch.load_model(plain, path, strict=True)
    for name, p in plain.named_parameters():
        assert torch.equal(p, state[f"model/{name}"]), name
    for result in run(world, plan, on_ranks.weights, "gpt", plan, str(path)):
        assert all(torch.equal(result[name], p) for name, p in plain.named_parameters())


@pytest.mark.parametrize("plan", ["tp=2", "pp=2,micro=2"])
def test_extra_state_is_refused(world: Worlds, tmp_path: Path, plan: str) -> None:
    for error in run(world, plan, on_ranks.refused_to_save, plan, str(tmp_path)):
        assert error.startswith("InputError: module 'counter' has extra state (get_extra_state())\n  where: plan")
        assert "try:   move it to a buffer" in error
