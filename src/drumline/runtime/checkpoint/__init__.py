"""Checkpoints for any plan: saved by any number of ranks, verified, and loaded by any other number."""

from .load import LoadedCheckpoint, load
from .saver import Saver, saver_for

__all__ = ["LoadedCheckpoint", "Saver", "load", "saver_for"]
