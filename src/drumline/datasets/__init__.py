"""Who sees which sample when: a function of (seed, epoch, step) alone, sliced afterwards."""

from .loader import Loader
from .stream import Batch, Micro, Stream, split

__all__ = ["Batch", "Loader", "Micro", "Stream", "split"]
