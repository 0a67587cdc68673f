"""The last step before a graph runs: a window and the convolution that reads it become one operator, which computes the
interior while the rows of others travel."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from .moves import Axis
from .spatial.conv import conv_of_window
from .window import travels, window

aten = torch.ops.aten

CONVOLUTIONS = {aten.conv1d.default: 1, aten.conv2d.default: 2, aten.conv3d.default: 3}


def join(graph: Graph) -> int:
    """In place; how many were joined. No axis can be spread after that."""
    joined = 0
    for node in list(graph.nodes):
        if _joins(node):
            source = node.args[0]
            x, dim, bounds, wanted, axis = source.args[:5]
            node.target = conv_of_window
            node.args = (x, *node.args[1:7], dim, bounds, wanted, axis)
            graph.erase_node(source)
            joined += 1
    return joined


def _joins(node: Node) -> bool:
    """Whether it convolves, without padding along its dim, what only it reads of a window."""
    if node.target not in CONVOLUTIONS or len(node.args) < 7:
        return False
    source = node.args[0]
    if not isinstance(source, Node) or source.target is not window or len(source.users) > 1:
        return False
    _, dim, bounds, wanted, axis, *fill = source.args
    padding = node.args[4]
    assert isinstance(padding, list | tuple) and isinstance(dim, int) and isinstance(axis, Axis)
    if not axis.halo:
        return False
    first = node.meta["val"].dim() - CONVOLUTIONS[node.target]
    return dim >= first and not padding[dim - first] and not any(fill) and travels(bounds, wanted)
