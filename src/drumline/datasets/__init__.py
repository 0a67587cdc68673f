"""Batches of each rank, as a function of (seed, epoch, step) alone, whatever the number of ranks."""

from .loader import Loader
from .stream import RankBatch, RankMicroBatch, Stream, split_range

__all__ = ["Loader", "RankBatch", "RankMicroBatch", "Stream", "split_range"]
