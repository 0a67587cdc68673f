"""Start ranks on this machine. Launchers are independent of strategies."""

from .local import run_ranks, spawn

__all__ = ["run_ranks", "spawn"]
