"""Creates the job's optimizer on this rank's pieces of the parameters.

It is created on placeholders of the whole shapes, which take no memory, so that it groups parameters as on one device
(a common rule: no weight decay for parameters of one dim). Then the pieces replace the placeholders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...core.errors import JobError
from ...core.job import Job, call_user_code
from ...tracing.optimizer import prefer_fused
from .pieces import ParameterSpec, Piece


def make_optimizer(job: Job, pieces: Sequence[Piece], specs: Mapping[str, ParameterSpec]) -> torch.optim.Optimizer:
    """Call the job's optimizer(). `pieces` and `specs` are those of the trained parameters."""
    if all(p.replicated and p.is_whole for p in pieces) and len(pieces) == len(specs):
        return prefer_fused(_call_optimizer(job, [(p.name, p.value) for p in pieces]))
    device = pieces[0].value.device if pieces else torch.device("cpu")
    placeholders = {
        name: nn.Parameter(torch.zeros((), dtype=spec.dtype, device=device).expand(spec.shape))
        for name, spec in specs.items()
    }
    optimizer = _call_optimizer(job, list(placeholders.items()))
    names: dict[torch.Tensor, str] = {p: name for name, p in placeholders.items()}
    by_name: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_name.setdefault(piece.name, []).append(piece)
    for group in optimizer.param_groups:
        group["params"] = [piece.value for p in group["params"] for piece in by_name.get(names[p], ())]
        group.pop("param_names", None)
    initial = dict(optimizer.state)
    optimizer.state.clear()
    for p, state in initial.items():  # Adagrad has a state before its first step
        for piece in by_name.get(names[p], ()):
            optimizer.state[piece.value] = {key: _part(value, piece) for key, value in state.items()}
    return prefer_fused(optimizer)


def waits_for_metric(schedule: object) -> bool:
    """Whether a schedule advances on the metric of an evaluation, not on every step."""
    return isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau)


def is_scalar(key: str, value: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether a state of a parameter is one number for all of it, such as a step counter, not one per element."""
    return value.numel() == 1 and (key == "step" or value.shape != parameter.shape)


def _call_optimizer(job: Job, named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    optimizer = call_user_code(job.optimizer_on, "the job's optimizer()", named)
    if not hasattr(optimizer, "param_groups"):
        raise JobError(
            f"the job's optimizer() gave {type(optimizer).__name__}", rule="it returns a torch.optim.Optimizer"
        )
    assert isinstance(optimizer, torch.optim.Optimizer)
    return optimizer


def _part(value: Any, piece: Piece) -> Any:
    """A piece's part of a state that was created for the whole parameter."""
    if isinstance(value, torch.Tensor) and tuple(value.shape) == piece.shape:
        return piece.take(value).clone().view(piece.value.shape)
    return value.clone() if isinstance(value, torch.Tensor) else value
