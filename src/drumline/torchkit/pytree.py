"""Nested tuples, lists and dicts of tensors, flattened and mapped.

Written for torch 2.13. Missing public API: torch itself uses these functions throughout, but has no public module with
them.
"""

from __future__ import annotations

from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = ["tree_flatten", "tree_leaves", "tree_map", "tree_unflatten"]
