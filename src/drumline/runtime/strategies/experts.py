"""Expert parallelism: the experts are distributed over `ep` consecutive data-parallel ranks.

Of the n data-parallel ranks, every `ep` in a row share one set of experts: n/ep ranks have the same experts. The
owner of an expert gets the gradient of all tokens of its `ep` ranks in the backward, so the gradients of experts are
summed over those n/ep ranks only, and those of all other parameters over all n. With `zero` the optimizer state of an
expert is sharded over the ranks of one sharded copy that have the same experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ...core.errors import PlanError
from ...partition.experts import expert_count, expert_modules, shard_experts
from ...partition.sharding.redistribution import Axis
from ...plans import Plan
from ...torchkit.modules import BatchNormBase
from ..state.pieces import ParameterPart, ParameterSpec, parameter_specs
from ..state.process_groups import group_along
from .buckets import GradientGroups
from .flat_shard import FlatShard


@dataclass(frozen=True, slots=True, eq=False)
class ExpertLayout:
    """The parameters of a model whose experts are distributed over ranks."""

    specs: Mapping[str, ParameterSpec]
    """Every parameter of the user's model, whole, including those of other ranks' experts."""
    trained: frozenset[str]
    """The names of those that are trained."""
    parts: Mapping[str, ParameterPart]
    """This rank's parts of them."""
    left_whole: Mapping[str, str]
    """Modules that look like experts and stay whole, and why."""


class ExpertParallel(FlatShard):
    """Experts distributed over `ep` ranks; gradients of experts and of the rest are summed over different ranks."""

    holds_parts = True

    def __init__(self, plan: Plan, group: dist.ProcessGroup) -> None:
        self._plan = plan
        copy = plan.shards if plan.zero else plan.dp
        shape = (plan.dp // copy, copy // plan.ep, plan.ep)
        replica, same = group_along(shape, 0), group_along(shape, 1)
        # a group of its own: another rank may send gradients before tokens, or after them
        ep = group_along(shape, 2, use="ep")
        assert ep is not None, "ep > 1"
        self._ep = ep
        if not plan.zero:
            self._expert_groups = GradientGroups(None, same)
            super().__init__(plan, None, group, split=ep)
        else:
            self._expert_groups = GradientGroups(same, replica)
            shard = group if replica is None else group_along((plan.dp // copy, copy), 1)
            super().__init__(plan, shard, replica, split=shard)

    def distribute(self, model: nn.Module) -> ExpertLayout:
        """Before `wrap`: leave this rank its share of the experts."""
        _check(model, self._plan)
        specs = parameter_specs(model, {})
        trained = frozenset(name for name, p in model.named_parameters() if p.requires_grad)
        index = dist.get_rank(self._ep)
        sharded = shard_experts(model, Axis("ep", self._plan.ep, index, self._ep, self._around_message))
        self.sum_separately(sharded.parts, self._expert_groups)
        # without shards, every rank of a copy has all parameters outside the experts: the first answers for them
        owned = index == 0 or self._plan.zero > 0
        parts = {
            name: ParameterPart(name, rows.shape, rows.start)
            if (rows := sharded.parts.get(name))
            else ParameterPart(name, specs[name].shape, owned=owned)
            for name, _ in model.named_parameters()
        }
        why = "not known as experts: drumline.Experts is, and so are those of transformers 5"
        return ExpertLayout(specs, trained, parts, dict.fromkeys(sharded.unrecognised, why))

    def _around_message(self, axis: str, name: str, tensor: torch.Tensor) -> AbstractContextManager[None]:
        """Around a message of the experts."""
        return self.record.message(name, tensor) if self.record else nullcontext()


def inside_experts(model: nn.Module) -> set[nn.Module]:
    """The modules inside experts: which of them run, and how often, depends on the routing of tokens."""
    return {inner for m in expert_modules(model).values() for inner in m.modules() if inner is not m}


def _check(model: nn.Module, plan: Plan) -> None:
    """Refuse experts that do not divide evenly, or that have more than parameters."""
    for name, module in expert_modules(model).items():
        count = expert_count(module)
        if count % plan.ep:
            fits = [n for n in range(1, plan.dp + 1) if plan.dp % n == 0 and count % n == 0]
            near = min(fits, key=lambda n: (abs(n - plan.ep), -n))
            raise PlanError(
                f"ep={plan.ep} for {count} experts",
                where=name,
                rule=f"every rank has as many experts: {count} % {plan.ep} != 0",
                fix=f"ep={near}",
            )
        for inner, m in module.named_modules(prefix=name):
            what = _extra_state(m)
            if what:
                raise PlanError(
                    f"an expert keeps {what}",
                    where=inner,
                    rule="an expert is its parameters, and treats every token by itself: so it can run on any rank",
                    fix="keep it outside of the experts, or leave out ep",
                )


def _extra_state(module: nn.Module) -> str:
    """The state that a module has besides parameters, in words."""
    if isinstance(module, BatchNormBase):
        return "statistics of a batch"
    buffer = next((key for key, b in module._buffers.items() if b is not None), "")
    if buffer:
        return f"the buffer {buffer!r}"
    return "" if type(module).get_extra_state is nn.Module.get_extra_state else "a state of its own"
