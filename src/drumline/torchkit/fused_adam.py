"""The fused step of Adam and AdamW, without collecting parameters and states anew.

Torch's optimizers collect their tensors one by one in every step, which takes a host longer than launching the kernels.
Here the lists are made once, and made again when any tensor in them was replaced.

Written for torch 2.13. Missing public API: the fused kernels, the hooks of an optimizer, and whether a scheduler has
wrapped its step.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from .operators import foreach_add_, fused_adam_, fused_adamw_, has_global_step_hooks
from .profiler import spans_are_recorded

__all__ = ["FusedAdam"]

_KINDS = (torch.optim.Adam, torch.optim.AdamW)
_STATES = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True, slots=True)
class _Lists:
    """The tensors of one parameter group."""

    parameters: list[torch.Tensor]
    exp_avgs: list[torch.Tensor]
    exp_avg_sqs: list[torch.Tensor]
    max_exp_avg_sqs: list[torch.Tensor]
    steps: list[torch.Tensor]


class FusedAdam:
    """The step of one optimizer, if it is one of these two and nothing else takes part in its steps."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer: Any = optimizer
        self._known = type(optimizer) in _KINDS
        self._tensors: tuple[list[int], list[int]] = ([], [])
        """Identities of the parameters and states in the lists, which keep them alive."""
        self._lists: list[_Lists] | None = None

    @torch.no_grad()
    def step(self, grad_scale: torch.Tensor | None = None, found_inf: torch.Tensor | None = None) -> bool:
        """Divide the gradients by `grad_scale` and update, unless `found_inf` is 1. False if nothing was done here."""
        if not self._known or not self._is_plain():
            return False
        optimizer = self._optimizer
        tensors = _identities(optimizer)
        if tensors != self._tensors:
            self._tensors, self._lists = tensors, _collect(optimizer)
        if self._lists is None:
            return False
        gradients = [[p.grad for p in lists.parameters] for lists in self._lists]
        if any(g is None for group in gradients for g in group):
            return False
        taken = 1 if found_inf is None else 1 - found_inf
        for group, lists, grads in zip(optimizer.param_groups, self._lists, gradients, strict=True):
            foreach_add_(lists.steps, taken)  # the kernel reads it only if it updates
            kernel: Any = fused_adamw_ if group["decoupled_weight_decay"] else fused_adam_
            kernel(
                lists.parameters,
                grads,
                lists.exp_avgs,
                lists.exp_avg_sqs,
                lists.max_exp_avg_sqs,
                lists.steps,
                amsgrad=group["amsgrad"],
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=group["maximize"],
                grad_scale=grad_scale,
                found_inf=found_inf,
            )
        return True

    def _is_plain(self) -> bool:
        """Whether the step is torch's own: no hooks, no wrapper but that of a scheduler, no profiler."""
        optimizer = self._optimizer
        hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        hooked = hooked or has_global_step_hooks()
        wrapped = "step" in vars(optimizer) and not hasattr(optimizer.step, "_wrapped_by_lr_sched")
        numbers = all(
            g["fused"] and not g["capturable"] and all(isinstance(x, float) for x in (g["lr"], *g["betas"]))
            for g in optimizer.param_groups
        )
        return numbers and not (hooked or wrapped or spans_are_recorded())


def _identities(optimizer: Any) -> tuple[list[int], list[int]]:
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    states = chain.from_iterable(map(dict.values, optimizer.state.values()))
    return list(map(id, parameters)), list(map(id, states))


def _collect(optimizer: Any) -> list[_Lists] | None:
    """The lists of all groups; None before the first step, and where tensors are on several devices or of many types.

    Learning-rate schedulers warn unless the optimizer's own step has run first, which creates the states.
    """
    groups = []
    for group in optimizer.param_groups:
        parameters = list(group["params"])
        states = [optimizer.state.get(p, {}) for p in parameters]
        needed = (*_STATES, "max_exp_avg_sq") if group["amsgrad"] else _STATES
        if not parameters or any(key not in state for state in states for key in needed):
            return None
        if len({(p.device, p.dtype) for p in parameters}) > 1 or parameters[0].is_complex():
            return None
        if any(state["step"].device != p.device for state, p in zip(states, parameters, strict=True)):
            return None
        largest = [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else []
        columns = ([state[key] for state in states] for key in _STATES)
        exp_avgs, exp_avg_sqs, steps = columns
        groups.append(_Lists(parameters, exp_avgs, exp_avg_sqs, largest, steps))
    return groups
