"""The fused step with prepared lists equals the optimizer's own, and steps aside where something else takes part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from drumline.torchkit.fused_adam import FusedAdam

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
KINDS: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1, fused=True),
    "decoupled": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1, decoupled_weight_decay=True, fused=True),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True, maximize=True, fused=True),
    "groups": lambda p: torch.optim.AdamW([{"params": p[:1], "lr": 0.3}, {"params": p[1:]}], fused=True),
}


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(n, generator=generator)) for n in (3, 5, 2)]


def give_gradients(values: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in values:
        p.grad = torch.randn(p.shape, generator=generator)


def step(optimizer: Any, scale: float | None = None, bad: float = 0.0) -> None:
    """As torch's own gradient scaler steps."""
    optimizer.grad_scale = None if scale is None else torch.tensor(scale)
    optimizer.found_inf = torch.tensor(bad)
    optimizer.step()
    del optimizer.grad_scale, optimizer.found_inf


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_optimizers_own_step(kind: str) -> None:
    mine, theirs = parameters(), parameters()
    a, b = KINDS[kind](mine), KINDS[kind](theirs)
    fused = FusedAdam(a)
    for i in range(6):
        give_gradients(mine, i)
        give_gradients(theirs, i)
        scale, bad = (None, 0.0) if i < 2 else (4.0, 1.0 if i == 3 else 0.0)
        if not fused.step(None if scale is None else torch.tensor(scale), torch.tensor(bad)):
            assert i == 0  # the first step is the optimizer's own: it makes the states
            step(a, scale, bad)
        step(b, scale, bad)
        for p, q in zip(mine, theirs, strict=True):
            assert torch.equal(p, q)
            for key, value in b.state[q].items():
                assert torch.equal(a.state[p][key], value), key


def ready(kind: str = "adamw") -> tuple[list[nn.Parameter], torch.optim.Optimizer, FusedAdam]:
    values = parameters()
    optimizer = KINDS[kind](values)
    give_gradients(values, 0)
    optimizer.step()
    return values, optimizer, FusedAdam(optimizer)


GOOD = torch.zeros(())


def test_replaced_states_are_noticed() -> None:
    values, optimizer, fused = ready()
    assert fused.step(None, GOOD)
    saved = {k: v.clone() for k, v in optimizer.state[values[1]].items()}
    optimizer.state[values[1]] = saved
    assert fused.step(None, GOOD)
    assert float(saved["step"]) == 3.0  # the new ones were updated
    optimizer.state[values[0]]["exp_avg"] = torch.zeros(3)
    assert fused.step(None, GOOD)
    assert optimizer.state[values[0]]["exp_avg"].abs().sum() > 0
    optimizer.load_state_dict(optimizer.state_dict())
    assert fused.step(None, GOOD)
    assert float(optimizer.state[values[2]]["step"]) == 5.0
    del optimizer.state[values[2]]
    assert not fused.step(None, GOOD)  # the optimizer makes it anew


def test_added_parameters_are_noticed() -> None:
    _, optimizer, fused = ready()
    assert fused.step(None, GOOD)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert not fused.step(None, GOOD)


def test_missing_gradient_is_left_to_the_optimizer() -> None:
    values, _, fused = ready()
    values[0].grad = None
    assert not fused.step(None, GOOD)


@pytest.mark.filterwarnings("ignore")  # of the profiler
@pytest.mark.parametrize("hook", ["before", "after", "wrapped", "profiled", "tensor"])
def test_steps_that_others_take_part_in_are_left_to_the_optimizer(hook: str) -> None:
    _, optimizer, fused = ready()
    if hook == "before":
        optimizer.register_step_pre_hook(lambda *_: None)
    elif hook == "after":
        optimizer.register_step_post_hook(lambda *_: None)
    elif hook == "wrapped":
        optimizer.step = lambda: None  # type: ignore[method-assign,assignment]  # as some libraries do
    elif hook == "tensor":
        optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    else:
        with torch.profiler.profile():
            assert not fused.step(None, GOOD)
        return
    assert not fused.step(None, GOOD)


def test_schedulers_wrapper_is_no_obstacle() -> None:
    _, optimizer, fused = ready()
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.step()
    schedule.step()
    assert fused.step(None, GOOD)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.RMSprop])
def test_other_optimizers_step_themselves(kind: Any) -> None:
    values = parameters()
    optimizer = kind(values, lr=0.1)
    give_gradients(values, 0)
    optimizer.step()
    assert not FusedAdam(optimizer).step(None, GOOD)
