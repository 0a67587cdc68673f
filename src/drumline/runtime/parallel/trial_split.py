"""Whether a plan can split a job's model, found out in one process before a rank is started: all but the messages."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from ...core.job import Job
from ...plans import Plan
from ...reports.split_summary import SplitSummary, split_summary
from ..memory.recompute import recomputed_layers
from ..numerics.precision import compute_precision
from .graph_partition import GraphPartitioner
from .job_capture import JobCapture
from .placement import Placement
from .rank_grid import DATA_AXES, RankGrid


class _Alone(RankGrid):
    """The places of a plan's ranks, without the ranks."""

    def group(self, axes: Iterable[str]) -> dist.ProcessGroup | None:
        """There is none."""
        return None


def try_split(job: Job, plan: Plan) -> SplitSummary:
    """Raise what the engine would refuse the plan with; else what the first rank would say of it.

    Where stages are to be measured they are counted here: where they begin is the engine's to tell.
    """
    groups, device = _Alone(plan, 0), torch.device("cpu")
    captures = JobCapture(job, plan, device, None)
    if plan.recompute == "full":
        recomputed_layers(captures.template, "full")
    first = captures.capture_first(groups.size(DATA_AXES))
    spreader = GraphPartitioner(plan, groups, device)
    with compute_precision(plan.precision, device):
        spreader.choose_splits(first)
    places = Placement(plan, groups, first, spreader.splits)
    with compute_precision(plan.precision, device):
        spread = spreader.partition(first)
    left = spreader.choice.unsplit if spreader.choice else {}
    return split_summary(spread.gathered, left, [name for name, _ in places.starts])
