"""BatchNorm whose statistics span the ranks of several axes, as one operator of a spread graph.

A pass over an axis that splits what a BatchNorm averages over adds its axis; `span` puts them, and the data-parallel
ranks, together into one group. Running statistics are whole and equal on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node

from .layout import Split
from .moves import Axis, gather, part_of
from .spatial.norm import Maybe, batch_norm

aten = torch.ops.aten


@dataclass(eq=False)
class Presence:
    """Whether this rank's samples count in this step. It is set to False while the rank runs a stand-in sample."""

    here: bool = True


@dataclass(frozen=True, eq=False)
class Spans:
    """Over whom statistics run."""

    axes: tuple[Axis, ...] = ()
    channels: tuple[Split, Axis] | None = None
    """Where each rank of an axis has some of the channels: how they are split."""
    presence: Presence = field(default_factory=Presence)

    def over(self, axis: Axis) -> Spans:
        """Over one more axis."""
        return Spans((*self.axes, axis), self.channels, self.presence)

    def by_channels(self, split: Split, axis: Axis) -> Spans:
        """Of some of the channels."""
        assert self.channels is None, "channels are split by one axis"
        return Spans(self.axes, (split.at(0), axis), self.presence)


def spanning_batch_norm(
    x: torch.Tensor,
    weight: Maybe,
    bias: Maybe,
    running_mean: Maybe,
    running_var: Maybe,
    training: bool,
    momentum: float | torch.Tensor,
    eps: float,
    spans: Spans,
) -> torch.Tensor:
    """Running statistics are whole, weights are of the channels that this rank has.

    A momentum that is a tensor is the number of batches so far, over all of which the statistics are averaged.
    """
    if isinstance(momentum, torch.Tensor):
        momentum = 0.5 if isinstance(momentum, FakeTensor) else 1.0 / float(momentum)
    here = spans.presence.here
    if spans.channels is None:
        of = (running_mean, running_var, training, momentum, eps, spans.axes)
        return batch_norm(x, weight, bias, *of, present=here)
    split, axis = spans.channels
    mean, var = (None if t is None else part_of(t, split, axis.index).clone() for t in (running_mean, running_var))
    out = batch_norm(x, weight, bias, mean, var, training, momentum, eps, spans.axes, present=here)
    if training and running_mean is not None and running_var is not None:
        assert mean is not None and var is not None
        with torch.no_grad():
            new = gather(torch.stack([mean, var.to(mean.dtype)]), split.at(1), axis)
            running_mean.copy_(new[0])
            running_var.copy_(new[1])
    return out


AVERAGED = -1.0
"""Stands for `momentum=None` while a model is captured: torch's own would ask for the number of batches."""


def averaged(graph: Graph) -> None:
    """In place: every BatchNorm that was captured with AVERAGED counts its batches when it runs."""
    heads = {n.meta["name"]: n for n in graph.nodes if n.op == "placeholder"}
    for node in graph.nodes:
        if node.op == "call_function" and node.target is aten.batch_norm.default and node.args[6] == AVERAGED:
            mean = node.args[3]
            assert isinstance(mean, Node)
            count = heads[str(mean.meta["name"]).replace("running_mean", "num_batches_tracked")]
            node.target = spanning_batch_norm
            node.args = (*node.args[:6], count, node.args[7], Spans())


def span(graph: Graph, axis_of: Callable[[frozenset[str]], Axis]) -> Presence:
    """In place: the statistics of every BatchNorm that trains run over one more axis, together with those it has.

    `axis_of` gets the names of the axes over which a BatchNorm's statistics run already, and gives one axis of all
    their ranks and those to add. What is given back tells all of them whether this rank's samples count.
    """
    presence = Presence()
    for node in graph.nodes:
        spans = _spans(node)
        if spans is None or not node.args[5]:
            continue
        axis = axis_of(frozenset(a.name for a in spans.axes))
        node.target = spanning_batch_norm
        node.args = (*node.args[:8], Spans((axis,), spans.channels, presence))
        node.kwargs = {}
    return presence


def _spans(node: Node) -> Spans | None:
    if node.op != "call_function":
        return None
    if node.target is aten.batch_norm.default:
        return Spans()
    if node.target is spanning_batch_norm:
        found = node.args[8]
        assert isinstance(found, Spans)
        return found
    return None
