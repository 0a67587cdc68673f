"""Stores and options of torch's process groups.

Written for torch 2.13. Missing public API: a group's store, the default store, the options of an all-gather, and
whether a backend of a name is registered.
"""

from __future__ import annotations

import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

__all__ = ["AllgatherOptions", "default_store", "has_backend", "own_store", "store_of"]


def store_of(group: dist.ProcessGroup | None) -> dist.Store:
    """The store through which the ranks of a group met; None is the world, once it is initialised."""
    store: dist.Store = dist.distributed_c10d._get_process_group_store(group or dist.group.WORLD)  # type: ignore[arg-type]
    return store


def default_store() -> dist.Store:
    """The store through which all ranks met."""
    return dist.distributed_c10d._get_default_store()


def own_store() -> dist.Store:
    """Another connection to the default store: a thread that waits on one blocks all others that use it."""
    store: dist.Store = default_store().clone()  # type: ignore[attr-defined]  # not in torch's annotations
    return store


def has_backend(name: str) -> bool:
    """Whether `dist.Backend.register_backend` was called with this name."""
    return name.upper() in dist.Backend._plugins
