"""Expert parallelism: every rank of an axis keeps some of the experts of every mixture, and gets their tokens.

Routing depends on the data, so a graph does not show a mixture of experts: it is recognised by its module. Known are
`Experts`, and the experts of transformers (5 and later): batched parameters [experts, ...] and a forward of tokens,
their experts and their weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from ...core.errors import PlanError
from ...tracing.expert_list import Experts
from ...tracing.expert_modules import argument_names, expert_count, expert_modules
from ..sharding.redistribution import Axis
from .dispatch import ExpertDispatch


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """A parameter of this rank as a part of the user's: the values of the flattened one from `start` on."""

    name: str
    shape: tuple[int, ...]
    """Shape of the user's parameter."""
    start: int


@dataclass(frozen=True, slots=True)
class AbsentParameter:
    """A parameter of the user's of which this rank has nothing."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class ShardedExperts:
    """The result of sharding a model's experts."""

    modules: tuple[str, ...]
    """The modules whose experts are sharded."""
    parts: Mapping[str, ExpertRows]
    """Every parameter of an expert on this rank. Its gradient is complete: nothing is reduced over the axis."""
    absent: Mapping[str, AbsentParameter]
    """Every parameter of which this rank has nothing."""
    unrecognised: tuple[str, ...]
    """Modules that look like experts but are not recognised: they stay whole on every rank."""


@dataclass(slots=True)
class _Parameters:
    parts: dict[str, ExpertRows] = field(default_factory=dict)
    absent: dict[str, AbsentParameter] = field(default_factory=dict)


def shard_experts(model: nn.Module, axis: Axis) -> ShardedExperts:
    """Keep this rank's experts of every mixture in the model; the memory of the others is freed.

    Names do not change. Parameters of experts get the gradient of all ranks' tokens. All other parameters keep this
    rank's partial sum, as in any data-parallel plan.
    """
    known = expert_modules(model)
    unrecognised = tuple(
        name for name, m in model.named_modules() if name not in known and _looks_like_experts(name, m)
    )
    if not known:
        raise PlanError(
            "the model has no experts that can be sharded",
            where=f"modules that look like experts: {', '.join(unrecognised)}" if unrecognised else "",
            rule="known are drumline's Experts and the Experts modules of transformers 5",
            fix="put the experts into drumline.Experts, or leave out ep",
        )
    _refuse_shared_parameters(model, known)
    parameters = _Parameters()
    for name, module in known.items():
        bounds = _bounds(name, expert_count(module), axis)
        start, stop = bounds[axis.index : axis.index + 2]
        if isinstance(module, Experts):
            _keep_modules(name, module, start, stop, parameters)
        else:
            _keep_rows(name, module, start, stop, parameters)
        module.forward = ExpertDispatch(module, argument_names(module), bounds, axis)  # its name must not change
    return ShardedExperts(tuple(known), parameters.parts, parameters.absent, unrecognised)


def _bounds(name: str, count: int, axis: Axis) -> tuple[int, ...]:
    """Rank r has the experts bounds[r] to bounds[r+1]."""
    if count < axis.size:
        raise PlanError(
            f"{count} experts cannot be sharded over {axis.size} ranks",
            where=name,
            rule=f"every rank has at least one expert: {count} < {axis.size}",
            fix=f"ep={count} or less",
        )
    return tuple(count * r // axis.size for r in range(axis.size + 1))


def _keep_modules(prefix: str, module: Experts, start: int, stop: int, parameters: _Parameters) -> None:
    """Remove the others from the list; the indices of those that stay do not change."""
    for i, (key, expert) in enumerate(list(module._modules.items())):
        assert expert is not None
        here = start <= i < stop
        for name, p in expert.named_parameters(_joined(prefix, key)):
            if here:
                parameters.parts[name] = ExpertRows(name, tuple(p.shape), 0)
            else:
                parameters.absent[name] = AbsentParameter(tuple(p.shape), p.dtype)
        if not here:
            del module._modules[key]


def _keep_rows(prefix: str, module: nn.Module, start: int, stop: int, parameters: _Parameters) -> None:
    """Every parameter becomes its rows of these experts."""
    for key, p in list(module.named_parameters(recurse=False)):
        name = _joined(prefix, key)
        parameters.parts[name] = ExpertRows(name, tuple(p.shape), start * p[0].numel())
        setattr(module, key, nn.Parameter(p.detach()[start:stop].clone(), requires_grad=p.requires_grad))
    module.num_experts = stop - start  # type: ignore[assignment]  # an int, as before


def _joined(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key


def _refuse_shared_parameters(model: nn.Module, known: Mapping[str, nn.Module]) -> None:
    """Refuse shared parameters: their owner would not get the whole gradient."""
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    for prefix, module in known.items():
        own = module.named_parameters(prefix, recurse=isinstance(module, Experts))
        shared = next((name for name, p in own if uses[id(p)] > 1), None)
        if shared:
            raise PlanError(
                "an expert shares a parameter with another module",
                where=shared,
                rule="only the owner of an expert has its parameters",
                fix="give every expert parameters of its own, or leave out ep",
            )


def _looks_like_experts(name: str, module: nn.Module) -> bool:
    """By its name; for the report only."""
    if isinstance(module, nn.ModuleList):
        return name.rpartition(".")[2] == "experts" and len(module) > 1
    return type(module).__name__.endswith("Experts") and any(True for _ in module.parameters(recurse=False))
