"""Offload: pieces in host memory, gradients copied down, values copied up. On a CPU nothing is copied."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import small_jobs
import torch
from torch import nn
from world import World

from drumline.runtime.engine import initialize
from drumline.runtime.memory.offload import HostCopy
from drumline.runtime.state.pieces import Piece

Worlds = Callable[[int], World]


def pieces() -> list[Piece]:
    """A whole parameter and a run of another."""
    whole, flat = nn.Parameter(torch.arange(6.0).view(2, 3)), nn.Parameter(torch.arange(4.0))
    return [Piece("a", (2, 3), 0, whole, replicated=True), Piece("b", (5, 2), 3, flat)]


def test_host_piece_is_a_copy() -> None:
    here = pieces()
    for piece, twin in zip(here, HostCopy(here).pieces, strict=True):
        assert (twin.name, twin.shape, twin.start, twin.stop) == (piece.name, piece.shape, piece.start, piece.stop)
        assert torch.equal(twin.value, piece.value)
        assert twin.value.data_ptr() != piece.value.data_ptr()
        assert twin.device_value is not None
        assert twin.device_value.data_ptr() == piece.value.data_ptr()
        assert not twin.device_value.requires_grad


def test_offloaded_step_equals_device_step() -> None:
    here, there = pieces(), pieces()
    host = HostCopy(here)
    through = torch.optim.AdamW([t.value for t in host.pieces], lr=0.1)
    direct = torch.optim.AdamW([p.value for p in there], lr=0.1)
    for step in range(3):
        gradients = [torch.full_like(p.value, 0.5 + step) for p in here]
        for p, g in zip(there, gradients, strict=True):
            p.value.grad = g.clone()
        host.gradients_down(gradients)
        for twin, g in zip(host.pieces, gradients, strict=True):
            assert twin.value.grad is not None
            assert twin.value.grad.data_ptr() != g.data_ptr()
            assert torch.equal(twin.value.grad, g)
        through.step()
        assert not torch.equal(host.pieces[0].value, here[0].value)  # not before they are brought up
        host.values_up()
        direct.step()
        assert all(twin.value.grad is None for twin in host.pieces)
        for a, b in zip(here, there, strict=True):
            assert torch.equal(a.value, b.value)


def test_parameter_without_a_gradient() -> None:
    host = HostCopy(pieces())
    host.gradients_down([torch.ones(2, 3), torch.ones(4)])
    host.gradients_down([None, torch.ones(4)])
    assert host.pieces[0].value.grad is None
    assert host.pieces[1].value.grad is not None


def moved(plan: str) -> tuple[bool, bool]:
    """Check that the optimizer works on other memory than the model's."""
    engine = initialize(small_jobs.make("mlp"), plan)
    engine.step(next(engine.data(1)))
    kept = {p.untyped_storage().data_ptr() for p in engine.model.parameters()} if "zero=3" not in plan else set()
    return all(p.device_value is None for p in engine.pieces), all(
        p.value.untyped_storage().data_ptr() in kept for p in engine.pieces
    )


@pytest.mark.parametrize("plan", ["dp=2,offload=optimizer", "dp=2,zero=1,offload=optimizer"])
def test_no_copies_on_a_cpu(world: Worlds, plan: str) -> None:
    assert world(2).run(moved, plan) == [(True, True)] * 2


def test_no_shard_copies_on_a_cpu(world: Worlds) -> None:
    assert [home for home, _ in world(2).run(moved, "dp=2,zero=3,offload=all")] == [True] * 2
