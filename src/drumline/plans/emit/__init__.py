"""Plan here, run anywhere: the configurations of other tools for a plan, or what of it they cannot express."""

from __future__ import annotations

from collections.abc import Callable

from ...core.errors import InputError, nearest
from ..plan import Plan
from .accelerate import emit as _accelerate
from .deepspeed import emit as _deepspeed
from .fabric import emit as _fabric
from .megatron import emit as _megatron
from .torchtitan import emit as _torchtitan
from .value import Emitted, Setting, Transformer

__all__ = ["TOOLS", "Emitted", "Setting", "Transformer", "emit"]

TOOLS: dict[str, Callable[[Plan, Setting], Emitted]] = {
    "deepspeed": _deepspeed,
    "accelerate": _accelerate,
    "torchtitan": _torchtitan,
    "fabric": _fabric,
    "megatron": _megatron,
}


def emit(tool: str, plan: Plan, setting: Setting) -> Emitted:
    """The configuration of a tool for a plan; a PlanError that names every part that it cannot express."""
    if tool not in TOOLS:
        raise InputError(f"no tool {tool!r}", rule=f"one of {', '.join(TOOLS)}", fix=nearest(tool, TOOLS))
    return TOOLS[tool](plan, setting)
