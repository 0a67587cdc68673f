"""Objects that the user built: a model, an optimizer, a scheduler, in the places of the job's factory functions."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ...core.errors import JobError
from ...torchkit.fake_tensors import FakeTensor
from ...tracing.op_costs import tensors
from ..numerics.recurrent import note_recurrent_layers
from .weights import cast


class PrebuiltModel:
    """A model instance in the place of `Job.model`. The engine trains it in place; every other caller gets a copy."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self) -> nn.Module:
        """A copy; under fake or meta tensors, one without values."""
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

    def trainable(self, dtype: torch.dtype | None) -> nn.Module:
        """The model itself, for training."""
        if not any(p.requires_grad for p in self.model.parameters()):
            raise JobError(
                f"{type(self.model).__name__} has no trainable parameter",
                rule="at least one parameter has requires_grad",
            )
        note_recurrent_layers(self.model)
        return cast(self.model, dtype)


class MissingArgument:
    """In the place of a part of a job that was not given; raises when it is used."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *_: Any) -> Any:
        raise JobError(f"{self.name} was not given to initialize()", fix=f"initialize(..., {self.name}=...)")


class NoDataset:
    """In the place of a dataset, where the user's own loop supplies the batches."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, i: int) -> Any:
        return MissingArgument("data")()


class PrebuiltOptimizer:
    """An optimizer instance over a model's parameters, in the place of `Job.optimizer`.

    Groups, hyper-parameters, state and hooks are kept; the parameters are replaced.
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
                    f"{type(optimizer).__name__} has parameters that the model does not have",
                    rule="a given optimizer was made with model.parameters()",
                )
            self._groups.append([names[id(p)] for p in group["params"] if p.requires_grad])
            self._states |= {names[id(p)]: optimizer.state[p] for p in group["params"] if p in optimizer.state}
        optimized = {name for group in self._groups for name in group}
        missing = [name for name in self._trained if name not in optimized]
        if missing:
            raise JobError(
                f"{type(optimizer).__name__} lacks the parameter {missing[0]!r} ({len(missing)} missing)",
                rule="the optimizer has every parameter with requires_grad",
                fix="call requires_grad_(False) on parameters that are not trained, or add them to the optimizer",
            )

    def __call__(self, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer on these parameters: the model's in order, or any others for a trial."""
        if [p.shape for p in parameters] != self._shapes:
            trial = self._on([list(parameters)], {})
            for key, value in vars(trial).items():
                if isinstance(value, OrderedDict):  # a trial does not run the user's hooks
                    setattr(trial, key, OrderedDict())
            return trial
        by_name = dict(zip(self._trained, parameters, strict=True))
        groups = [[by_name[name] for name in group] for group in self._groups]
        states = {by_name[name]: _copy_state(s, by_name[name]) for name, s in self._states.items() if name in by_name}
        return self._on(groups, states)

    def _on(self, groups: list[list[nn.Parameter]], states: dict[Any, Any]) -> torch.optim.Optimizer:
        """A copy of the optimizer; not reconstructed, because constructors do not accept all that they store."""
        original = self.optimizer
        copied: torch.optim.Optimizer = object.__new__(type(original))
        kept = {k: v for k, v in vars(original).items() if k != "step"}  # a scheduler attaches its counter there
        copied.__dict__.update(
            {key: OrderedDict(value) if isinstance(value, OrderedDict) else value for key, value in kept.items()}
        )
        copied.state = defaultdict(dict, states)
        copied.param_groups = []
        for group, parameters in zip(original.param_groups, groups, strict=False):
            values = {k: v for k, v in group.items() if k not in ("params", "param_names")}
            copied.param_groups.append({"params": parameters, **copy.deepcopy(values)})
        return copied


def _copy_state(state: dict[str, Any], p: nn.Parameter) -> dict[str, Any]:
    """A copy of the optimizer's state of a parameter, on its device. Counters stay where they are."""
    return {
        key: value.clone().to(p.device) if isinstance(value, torch.Tensor) and value.dim() else copy.copy(value)
        for key, value in state.items()
    }


class PrebuiltScheduler:
    """A scheduler instance in the place of `Job.schedule`: it continues on another optimizer."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def __call__(self, optimizer: torch.optim.Optimizer) -> Any:
        """A copy that sets the rates of this optimizer."""
        return _rebound(self.scheduler, optimizer)


def _rebound(scheduler: Any, optimizer: torch.optim.Optimizer) -> Any:
    copied = copy.copy(scheduler)
    copied.optimizer = optimizer
    if hasattr(copied, "_schedulers"):  # composed of other schedulers
        copied._schedulers = [_rebound(part, optimizer) for part in scheduler._schedulers]
    if hasattr(copied, "_step_count"):
        copied._step_count = max(2, copied._step_count)  # at 1, torch warns that the optimizer was not stepped first
    return copied
