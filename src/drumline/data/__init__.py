"""Who sees which sample when: a function of (seed, epoch, step) alone, sliced afterwards."""

from .stream import Batch, Micro, Stream, split

__all__ = ["Batch", "Micro", "Stream", "split"]
