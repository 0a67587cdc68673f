"""Drumline keeps your ranks in step.

It tells the fastest way to train a PyTorch model on the machines at hand, runs it that way, proves that it computes
the same gradients as one device would, and shows how far its prediction was off. Importing this costs no torch: names
that need it are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .core.errors import DrumlineError
from .core.job import Job
from .core.mesh import Mesh
from .core.timeline import Span, Timeline

if TYPE_CHECKING:
    from .clusters import Cluster
    from .comm.environment import rank_zero_first
    from .costs import Estimate
    from .launchers import spawn
    from .models import Profile
    from .partition.experts import Experts
    from .plans import Plan
    from .runtime.deepspeed.compat import initialize
    from .runtime.dry_run import dry_run
    from .runtime.engine import Engine
    from .runtime.guards.guard import Guards
    from .runtime.learning_rates import rates
    from .tracing import trace as profile

__version__ = "0.1.0"

__all__ = [
    "Cluster",
    "DrumlineError",
    "Engine",
    "Estimate",
    "Experts",
    "Guards",
    "Job",
    "Mesh",
    "Plan",
    "Profile",
    "Span",
    "Timeline",
    "dry_run",
    "initialize",
    "profile",
    "rank_zero_first",
    "rates",
    "spawn",
]

_LAZY = {
    "Cluster": "clusters.Cluster",
    "Engine": "runtime.engine.Engine",
    "Estimate": "costs.Estimate",
    "Experts": "partition.experts.Experts",
    "Guards": "runtime.guards.guard.Guards",
    "Plan": "plans.Plan",
    "Profile": "models.Profile",
    "dry_run": "runtime.dryrun.dry_run",
    "initialize": "runtime.adopt.compat.initialize",
    "profile": "tracing.trace",
    "rank_zero_first": "comm.environment.rank_zero_first",
    "rates": "runtime.learning.rates",
    "spawn": "launchers.spawn",
}
"""Where each name lives. None of them is the name of a room, which would hide it."""


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        module, _, attribute = _LAZY[name].rpartition(".")
        return getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
