"""Splits a job's model as a plan says, in one process and without messages, before any rank is started."""

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


class _OneProcess(RankGrid):
    """The grid of a plan in one process, without groups."""

    def group(self, axes: Iterable[str]) -> dist.ProcessGroup | None:
        """There is none."""
        return None


def try_split(job: Job, plan: Plan) -> SplitSummary:
    """Raise the error with which the engine would refuse the plan; else return the first rank's summary.

    With `split=measured`, stages are balanced by counted work here: the engine measures.
    """
    grid, device = _OneProcess(plan, 0), torch.device("cpu")
    capture = JobCapture(job, plan, device, None)
    if plan.recompute == "full":
        recomputed_layers(capture.template, "full")
    first = capture.capture_first(grid.size(DATA_AXES)).captured
    partitioner = GraphPartitioner(plan, grid, device)
    with compute_precision(plan.precision, device):
        partitioner.choose_splits(first)
    placement = Placement(plan, grid, first, partitioner.splits)
    with compute_precision(plan.precision, device):
        partitioned = partitioner.partition(first)
    left = partitioner.choice.unsplit if partitioner.choice else {}
    return split_summary(partitioned.gathered, left, [name for name, _ in placement.starts])
