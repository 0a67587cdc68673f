"""Batches of each rank, as a function of (seed, epoch, step) alone, whatever the number of ranks."""

from .loader import Loader
from .sources import load_data, open_source
from .stream import RankBatch, RankMicroBatch, Stream, split_range

__all__ = ["Loader", "RankBatch", "RankMicroBatch", "Stream", "load_data", "open_source", "split_range"]
