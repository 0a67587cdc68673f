"""The dry run: the engine's own step on tensors without values, in a world that is not there."""

from .run import DryEngine, dry_run, kinds_of_ranks
from .value import DryRun, Message, Rank

__all__ = ["DryEngine", "DryRun", "Message", "Rank", "dry_run", "kinds_of_ranks"]
