"""Tensors without values, of two kinds: most are there for their shapes alone; those of a dry run are treated as real.

Code that runs on ranks is called with the first kind to learn shapes, and sends nothing then. A dry run calls it with
the second kind: it does all that it does in a real step, and what it sends is written down.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes


class RunningMode(FakeTensorMode):
    """The mode of a dry run."""


def only_shapes(x: Any) -> bool:
    """Whether a tensor is there for its shape alone: nothing is to be sent for it."""
    return isinstance(x, FakeTensor) and not isinstance(x.fake_mode, RunningMode)


def without_values(x: Any) -> bool:
    """Whether a tensor has no values, of either kind."""
    return isinstance(x, FakeTensor)


def active_mode() -> FakeTensorMode | None:
    """The mode that tensors are made in at this moment, if they have no values."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return mode if isinstance(mode, FakeTensorMode) else None


def numbers_of(x: torch.Tensor, own: list[Any]) -> list[Any]:
    """The numbers in a tensor that ranks have agreed on; without values, what this rank has put in: all are alike."""
    return own if without_values(x) else x.tolist()


@contextmanager
def with_values() -> Iterator[None]:
    """Around what needs numbers, or other tensors without them, also in a dry run; a decorator too.

    Inside, tensors are real unless they say otherwise, and nobody counts them.
    """
    with _disable_current_modes():
        yield
