"""What a rank holds of a job under a plan: the model, whole or in parts, the strategy, the groups, the recorder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from ..comm.environment import Place
from ..core.job import Job
from ..plans import Plan
from ..tracing.running import with_values
from .build import Built, build, choose
from .recording.recorder import Recorder
from .strategies.pieces import Kind, Part, Piece, kinds_of, rename
from .strategies.strategy import Strategy

if TYPE_CHECKING:
    from .parallel import SplitModel


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """One rank of a job under a plan, before anything of it is trained."""

    built: Built
    strategy: Strategy
    group: dist.ProcessGroup
    """All ranks."""
    record: Recorder
    slices: tuple[int, int]
    """How many slices a batch has, and which one is this rank's."""
    split: SplitModel | None = None
    """The model, where the plan splits it."""

    def kinds(self) -> dict[str, Kind]:
        """Every parameter of the user's model, whole."""
        if self.built.spread:
            return dict(self.built.spread.kinds)
        return self.split.places.kinds if self.split else kinds_of(self.built.model, self.built.parts)

    def trained(self) -> set[str]:
        """The names of the parameters that are trained; a rank may hold nothing of some."""
        if self.built.spread:
            return set(self.built.spread.trained)
        return _trained(self.split.template if self.split else self.built.model, self.built.parts)

    def pieces(self) -> list[Piece]:
        """This rank's parts of the parameters, under the user's names."""
        return rename(self.strategy.pieces(), self.built.parts)


def hold(
    job: Job, plan: Plan, where: Place, device: torch.device, dtype: torch.dtype | None, flops_per_byte: float | None
) -> Held:
    """Make the groups of a plan, and what this rank holds of the job's model."""
    if plan.splits_model:
        from .parallel import set_up

        return set_up(job, plan, where.rank, device, dtype, flops_per_byte)
    with with_values():  # the numbers of ranks are real in a dry run too
        chosen = choose(job, plan, device)
    record = chosen.strategy.record = Recorder(where.rank, device, chosen.group)
    built = build(job, plan, chosen, device, dtype)
    return Held(built, chosen.strategy, chosen.group, record, (where.size, where.rank))


def _trained(model: nn.Module, parts: Mapping[str, Part]) -> set[str]:
    names = (name for name, p in model.named_parameters() if p.requires_grad)
    return {parts[name].name if name in parts else name for name in names}
