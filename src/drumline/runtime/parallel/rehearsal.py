"""Whether a plan can split a job's model, found out in one process before a rank is started: all but the messages."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from ...core.job import Job
from ...plans import Plan
from ...reports.division import Division, division_of
from ..memory.recompute import recomputed_layers
from ..precision import computing
from .captures import Captures
from .groups import DATA, Groups
from .placing import Placement
from .spreading import Spreader


class _Alone(Groups):
    """The places of a plan's ranks, without the ranks."""

    def group(self, axes: Iterable[str]) -> dist.ProcessGroup | None:
        """There is none."""
        return None


def rehearse(job: Job, plan: Plan) -> Division:
    """Raise what the engine would refuse the plan with; else what the first rank would say of it.

    Where stages are to be measured they are counted here: where they begin is the engine's to tell.
    """
    groups, device = _Alone(plan, 0), torch.device("cpu")
    captures = Captures(job, plan, device, None)
    if plan.recompute == "full":
        recomputed_layers(captures.template, "full")
    first = captures.first(groups.size(DATA))
    spreader = Spreader(plan, groups, device)
    with computing(plan.precision, device):
        spreader.decide(first)
    places = Placement(plan, groups, first, spreader.splits)
    with computing(plan.precision, device):
        spread = spreader.spread(first)
    left = spreader.choice.left if spreader.choice else {}
    return division_of(spread.gathered, left, [name for name, _ in places.starts])
