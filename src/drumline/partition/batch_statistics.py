"""Synchronized BatchNorm: statistics over the ranks of several axes, as one operator of a sharded graph.

A pass over an axis that splits the averaged dims adds its axis; `span_statistics` joins these axes and the
data-parallel ranks into one group. Running statistics are whole and equal on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from ..torchkit.fake_tensors import FakeTensor
from .sharding.layout import Split
from .sharding.redistribution import Axis, gather, part_of
from .spatial.norm import OptionalTensor, batch_norm

aten = torch.ops.aten


@dataclass(eq=False)
class SamplePresence:
    """Whether this rank's samples count in this step: False while it runs a stand-in sample."""

    here: bool = True


@dataclass(frozen=True, eq=False)
class StatisticsSpan:
    """The axes that statistics span, and the split of the channels."""

    axes: tuple[Axis, ...] = ()
    channels: tuple[Split, Axis] | None = None
    """The split of the channels and its axis, where ranks have different channels."""
    presence: SamplePresence = field(default_factory=SamplePresence)

    def over_axis(self, axis: Axis) -> StatisticsSpan:
        """The same, over one more axis."""
        return StatisticsSpan((*self.axes, axis), self.channels, self.presence)

    def by_channels(self, split: Split, axis: Axis) -> StatisticsSpan:
        """The same, of one rank's channels."""
        assert self.channels is None, "channels are split by one axis"
        return StatisticsSpan(self.axes, (split.along(0), axis), self.presence)


def synchronized_batch_norm(
    x: torch.Tensor,
    weight: OptionalTensor,
    bias: OptionalTensor,
    running_mean: OptionalTensor,
    running_var: OptionalTensor,
    training: bool,
    momentum: float | torch.Tensor,
    eps: float,
    spans: StatisticsSpan,
) -> torch.Tensor:
    """BatchNorm with whole running statistics and this rank's channels of the weights.

    A tensor as momentum is the number of batches so far, over all of which the statistics are averaged.
    """
    if isinstance(momentum, torch.Tensor):
        momentum = 0.5 if isinstance(momentum, FakeTensor) else 1.0 / float(momentum)
    here = spans.presence.here
    if spans.channels is None:
        statistics = (running_mean, running_var, training, momentum, eps, spans.axes)
        return batch_norm(x, weight, bias, *statistics, present=here)
    split, axis = spans.channels
    mean, var = (None if t is None else part_of(t, split, axis.index).clone() for t in (running_mean, running_var))
    out = batch_norm(x, weight, bias, mean, var, training, momentum, eps, spans.axes, present=here)
    if training and running_mean is not None and running_var is not None:
        assert mean is not None and var is not None
        with torch.no_grad():
            new = gather(torch.stack([mean, var.to(mean.dtype)]), split.along(1), axis)
            running_mean.copy_(new[0])
            running_var.copy_(new[1])
    return out


CUMULATIVE_MOMENTUM = -1.0
"""Stands for `momentum=None` during capture, where torch would read the number of batches."""


def count_batches_at_run_time(graph: Graph) -> None:
    """In place: let every BatchNorm captured with CUMULATIVE_MOMENTUM read its number of batches when it runs."""
    placeholders = {n.meta["name"]: n for n in graph.nodes if n.op == "placeholder"}
    for node in graph.nodes:
        if (
            node.op == "call_function"
            and node.target is aten.batch_norm.default
            and node.args[6] == CUMULATIVE_MOMENTUM
        ):
            mean = node.args[3]
            assert isinstance(mean, Node)
            count = placeholders[str(mean.meta["name"]).replace("running_mean", "num_batches_tracked")]
            node.target = synchronized_batch_norm
            node.args = (*node.args[:6], count, node.args[7], StatisticsSpan())


def span_statistics(graph: Graph, axis_of: Callable[[frozenset[str]], Axis]) -> SamplePresence:
    """In place: extend the statistics of every BatchNorm in training to one more axis.

    `axis_of` maps the names of the axes that a BatchNorm spans already to one axis of all their ranks and the new ones.
    The result tells all of them whether this rank's samples count.
    """
    presence = SamplePresence()
    for node in graph.nodes:
        spans = _spans(node)
        if spans is None or not node.args[5]:
            continue
        axis = axis_of(frozenset(a.name for a in spans.axes))
        node.target = synchronized_batch_norm
        node.args = (*node.args[:8], StatisticsSpan((axis,), spans.channels, presence))
        node.kwargs = {}
    return presence


def _spans(node: Node) -> StatisticsSpan | None:
    if node.op != "call_function":
        return None
    if node.target is aten.batch_norm.default:
        return StatisticsSpan()
    if node.target is synchronized_batch_norm:
        spans = node.args[8]
        assert isinstance(spans, StatisticsSpan)
        return spans
    return None
