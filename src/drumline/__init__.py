"""Drumline finds the fastest way to train a PyTorch model on the machines you have, and runs it that way.

The loop: `measure` -> `profile` -> `plan` -> `verify` -> `train` -> `report`, each a function of values. This import
does not load torch: names that need it are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .core import display
from .core.callbacks import Callback, EarlyStop
from .core.errors import DrumlineError
from .core.job import Job
from .core.mesh import Mesh
from .core.timeline import Span, Timeline

if TYPE_CHECKING:
    from .clusters import Cluster
    from .comm.environment import rank_zero_first
    from .costs import Estimate
    from .datasets.packed.dataset import PackedDataset
    from .datasets.packed.pack import pack
    from .datasets.packed.tokens import PackedTokens
    from .launchers import spawn
    from .loop.measure import measure
    from .loop.plan import plan
    from .loop.profile import profile
    from .loop.report import report
    from .loop.simulate import Simulation, simulate
    from .loop.simulate_scaling import simulate_scaling
    from .loop.train import train
    from .loop.verify import verify
    from .models import Profile
    from .partition.experts import Experts
    from .planner import Answer, Candidate
    from .plans import Plan
    from .reports import Run, StepRecord
    from .runtime.deepspeed.arguments import add_config_arguments, init_distributed
    from .runtime.deepspeed.initialize import initialize
    from .runtime.dry_run import dry_run
    from .runtime.engine import Engine
    from .runtime.guards.guard import Guards
    from .runtime.learning_rates import rates
    from .runtime.verification.verify import Verification

__version__ = "0.1.0"

__all__ = [
    "Answer",
    "Callback",
    "Candidate",
    "Cluster",
    "DrumlineError",
    "EarlyStop",
    "Engine",
    "Estimate",
    "Experts",
    "Guards",
    "Job",
    "Mesh",
    "PackedDataset",
    "PackedTokens",
    "Plan",
    "Profile",
    "Run",
    "Simulation",
    "Span",
    "StepRecord",
    "Timeline",
    "Verification",
    "add_config_arguments",
    "dry_run",
    "init_distributed",
    "initialize",
    "measure",
    "pack",
    "plan",
    "profile",
    "rank_zero_first",
    "rates",
    "report",
    "simulate",
    "simulate_scaling",
    "spawn",
    "train",
    "verify",
]

_LAZY = {
    "Answer": "planner.Answer",
    "Candidate": "planner.Candidate",
    "Cluster": "clusters.Cluster",
    "Engine": "runtime.engine.Engine",
    "Estimate": "costs.Estimate",
    "Experts": "partition.experts.Experts",
    "Guards": "runtime.guards.guard.Guards",
    "PackedDataset": "datasets.packed.dataset.PackedDataset",
    "PackedTokens": "datasets.packed.tokens.PackedTokens",
    "Plan": "plans.Plan",
    "Profile": "models.Profile",
    "Run": "reports.Run",
    "Simulation": "loop.simulate.Simulation",
    "StepRecord": "reports.StepRecord",
    "Verification": "runtime.verification.verify.Verification",
    "add_config_arguments": "runtime.deepspeed.arguments.add_config_arguments",
    "dry_run": "runtime.dry_run.dry_run",
    "init_distributed": "runtime.deepspeed.arguments.init_distributed",
    "initialize": "runtime.deepspeed.initialize.initialize",
    "measure": "loop.measure.measure",
    "pack": "datasets.packed.pack.pack",
    "plan": "loop.plan.plan",
    "profile": "loop.profile.profile",
    "rank_zero_first": "comm.environment.rank_zero_first",
    "rates": "runtime.learning_rates.rates",
    "report": "loop.report.report",
    "simulate": "loop.simulate.simulate",
    "simulate_scaling": "loop.simulate_scaling.simulate_scaling",
    "spawn": "launchers.spawn",
    "train": "loop.train.train",
    "verify": "loop.verify.verify",
}
"""Where each name is defined. None of them is the name of a package, which would hide it."""


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        module, _, attribute = _LAZY[name].rpartition(".")
        return getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _as_html(value: object) -> str:
    from .reports.notebook import as_html

    return as_html(value)


display.set_renderer(_as_html)
