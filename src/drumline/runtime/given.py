"""What a user has made already: a model, an optimizer, a scheduler. They become what a job's functions would make."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ..core.errors import JobError
from ..tracing.kinds import tensors
from .recurrent import notice
from .weights import cast


class Given:
    """A model instance in the place of `Job.model`. The engine trains it itself; whoever else asks gets a copy."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self) -> nn.Module:
        """A copy; where fake or meta tensors are made, one without values."""
        probe = torch.empty(0)
        memo: dict[int, Any] = {}
        if isinstance(probe, FakeTensor) or probe.is_meta:
            for p in self.model.parameters():
                memo[id(p)] = nn.Parameter(torch.empty(p.shape, dtype=p.dtype), requires_grad=p.requires_grad)
            for module in self.model.modules():  # buffers, and tensors that are plain attributes
                for t in tensors(vars(module)):
                    if id(t) not in memo:
                        memo[id(t)] = torch.empty(t.shape, dtype=t.dtype)
        return copy.deepcopy(self.model, memo)

    def take(self, dtype: torch.dtype | None) -> nn.Module:
        """The model itself, to be trained."""
        if not any(p.requires_grad for p in self.model.parameters()):
            raise JobError(
                f"{type(self.model).__name__} has no parameter to train", rule="at least one with requires_grad"
            )
        notice(self.model)
        return cast(self.model, dtype)


class Absent:
    """In the place of a part of a job that was not given; it says so when it is needed."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *_: Any) -> Any:
        raise JobError(f"{self.name} was not given to initialize()", fix=f"initialize(..., {self.name}=...)")


class NoData:
    """In the place of a dataset, where the user's own loop brings the batches."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, i: int) -> Any:
        return Absent("data")()


class GivenOptimizer:
    """An optimizer instance over a model's parameters, in the place of `Job.optimizer`.

    Groups, hyper-parameters, state and hooks are kept; other parameters take the places of the model's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        self.optimizer = optimizer
        names = {id(p): name for name, p in model.named_parameters()}
        self._trained = [name for name, p in model.named_parameters() if p.requires_grad]
        self._shapes = [p.shape for p in model.parameters() if p.requires_grad]
        self._groups: list[list[str]] = []
        self._states: dict[str, dict[str, Any]] = {}
        for group in optimizer.param_groups:
            if any(id(p) not in names for p in group["params"]):
                raise JobError(
                    f"{type(optimizer).__name__} has parameters that the model has not",
                    rule="an optimizer that is given was made on model.parameters()",
                )
            self._groups.append([names[id(p)] for p in group["params"] if p.requires_grad])
            self._states |= {names[id(p)]: optimizer.state[p] for p in group["params"] if p in optimizer.state}
        held = {name for group in self._groups for name in group}
        missing = [name for name in self._trained if name not in held]
        if missing:
            raise JobError(
                f"{type(optimizer).__name__} has not the parameter {missing[0]!r} ({len(missing)} are missing)",
                rule="every parameter with requires_grad is trained",
                fix="requires_grad_(False) for those that are not trained, or give them to the optimizer",
            )

    def __call__(self, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer on these parameters: those of the model in their order, or any others for a trial."""
        if [p.shape for p in parameters] != self._shapes:
            trial = self._on([list(parameters)], {})
            for key, value in vars(trial).items():
                if isinstance(value, OrderedDict):  # the user's hooks are not for a trial
                    setattr(trial, key, OrderedDict())
            return trial
        by_name = dict(zip(self._trained, parameters, strict=True))
        groups = [[by_name[name] for name in group] for group in self._groups]
        states = {by_name[name]: _copied(s, by_name[name]) for name, s in self._states.items() if name in by_name}
        return self._on(groups, states)

    def _on(self, groups: list[list[nn.Parameter]], states: dict[Any, Any]) -> torch.optim.Optimizer:
        """A twin of the optimizer: not made anew, because constructors do not take all that they keep."""
        given = self.optimizer
        twin: torch.optim.Optimizer = object.__new__(type(given))
        kept = {k: v for k, v in vars(given).items() if k != "step"}  # a scheduler hangs its counter there
        twin.__dict__.update(
            {key: OrderedDict(value) if isinstance(value, OrderedDict) else value for key, value in kept.items()}
        )
        twin.state = defaultdict(dict, states)
        twin.param_groups = []
        for group, parameters in zip(given.param_groups, groups, strict=False):
            values = {k: v for k, v in group.items() if k not in ("params", "param_names")}
            twin.param_groups.append({"params": parameters, **copy.deepcopy(values)})
        return twin


def _copied(state: dict[str, Any], p: nn.Parameter) -> dict[str, Any]:
    """What the optimizer remembers of a parameter, beside its new place. Counters stay where they are."""
    return {
        key: value.clone().to(p.device) if isinstance(value, torch.Tensor) and value.dim() else copy.copy(value)
        for key, value in state.items()
    }


class GivenScheduler:
    """A scheduler instance, in the place of `Job.schedule`: it goes on, on another optimizer."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def __call__(self, optimizer: torch.optim.Optimizer) -> Any:
        """A twin that moves the rates of this optimizer."""
        return _moved(self.scheduler, optimizer)


def _moved(scheduler: Any, optimizer: torch.optim.Optimizer) -> Any:
    twin = copy.copy(scheduler)
    twin.optimizer = optimizer
    if hasattr(twin, "_schedulers"):  # one that is made of others
        twin._schedulers = [_moved(part, optimizer) for part in scheduler._schedulers]
    if hasattr(twin, "_step_count"):
        twin._step_count = max(2, twin._step_count)  # 1 makes torch look whether the optimizer it knew was used first
    return twin
