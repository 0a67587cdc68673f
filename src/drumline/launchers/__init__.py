"""Start ranks, or join those that another launcher started. Launchers are independent of strategies."""

from .choice import run_ranks
from .local import spawn

__all__ = ["run_ranks", "spawn"]
