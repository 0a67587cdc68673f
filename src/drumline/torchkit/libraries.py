"""Operators registered for the time of a `with` block, and scripted functions as Python.

Written for torch 2.13. Missing public API: a `torch.library.Library` is removed with its object only, whenever that is
freed, and a scripted function does not give the Python function that it was made from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.library import _scoped_library as scoped_library

__all__ = ["python_of_script", "scoped_library"]


def python_of_script(function: Any) -> Callable[..., Any] | None:
    """The Python function that a scripted one was made from, if it is known."""
    python: Callable[..., Any] | None = getattr(function, "_torchdynamo_inline", None)
    return python
