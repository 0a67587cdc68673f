"""Packed data: many samples in a few large shards, with an index of offsets and digests, read in any order."""

from .dataset import PackedDataset
from .tokens import PackedTokens

__all__ = ["PackedDataset", "PackedTokens"]
