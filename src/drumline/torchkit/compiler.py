"""The compiler's limit on versions of one function, and its import before ranks are forked.

Written for torch 2.13. Missing public API: in older releases `torch.compile` takes no limit of its own, and the
compiler is imported at its first use only.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["allow_recompiles", "load_compiler"]


def load_compiler() -> Any:
    """Import the compiler, and return its module."""
    return importlib.import_module("torch._dynamo")


def allow_recompiles(versions: int) -> None:
    """Raise the limits on compiled versions of one function."""
    config = load_compiler().config
    config.recompile_limit += versions
    config.accumulated_recompile_limit += versions
