"""The identity of the memory behind tensors.

Written for torch 2.13. Missing public API: storages are new Python objects at every request, so `id` does not identify
them, and fake tensors have no `data_ptr`.
"""

from __future__ import annotations

import torch

__all__ = ["storage_id"]


def storage_id(tensor: torch.Tensor | torch.UntypedStorage) -> int:
    """A number that is equal for tensors that share memory, while that memory lives."""
    storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else tensor
    return int(storage._cdata)
