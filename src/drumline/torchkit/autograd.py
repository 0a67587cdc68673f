"""Which node of the autograd graph runs, in which order nodes were made, and the code that runs a backward.

Written for torch 2.13. Missing public API: a backward does not tell which forward operator it belongs to, and a
function does not know whether a backward called it from C++.
"""

from __future__ import annotations

from types import CodeType
from typing import Any

import torch
from torch.autograd import graph

__all__ = ["BACKWARD", "next_node_number", "running_node_number"]

BACKWARD: CodeType = graph._engine_run_backward.__code__
"""The code that enters C++ for a backward: a function whose caller is this one was called from C++."""

_ACCUMULATE = 2**62
"""Nodes that accumulate gradients of parameters have numbers from here on."""


def next_node_number() -> int:
    """The number that the next node of this thread gets: numbers rise with the forward."""
    return int(torch.autograd._get_sequence_nr())


def running_node_number() -> int | None:
    """The number of the node whose backward runs: None outside a backward, -1 in one that accumulates a gradient."""
    node: Any = torch._C._current_autograd_node()
    if node is None:
        return None
    number = int(node._sequence_nr())
    return -1 if number >= _ACCUMULATE else number
