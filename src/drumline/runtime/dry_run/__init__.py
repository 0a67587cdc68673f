"""The dry run: the engine's own step on tensors without values, in a simulated world."""

from .result import DryRun, DryRunMessage, DryRunRank
from .run import DryEngine, dry_run, representative_ranks

__all__ = ["DryEngine", "DryRun", "DryRunMessage", "DryRunRank", "dry_run", "representative_ranks"]
