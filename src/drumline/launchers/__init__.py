"""Starting ranks. A launcher knows no strategy."""

from .local import run_ranks, spawn

__all__ = ["run_ranks", "spawn"]
