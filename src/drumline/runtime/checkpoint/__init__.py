"""Checkpoints that fit any plan: saved by any number of ranks, verified, and loaded by any other number."""

from .load import Loaded, load
from .saver import Saver, saver_of

__all__ = ["Loaded", "Saver", "load", "saver_of"]
