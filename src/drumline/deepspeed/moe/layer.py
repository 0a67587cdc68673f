"""`deepspeed.moe.layer`: importable, and refused by name."""

from __future__ import annotations

from typing import Any

from ...core.errors import PlanError


def MoE(*args: Any, **options: Any) -> Any:
    """Refused, with the way out."""
    raise PlanError(
        "deepspeed.moe.layer.MoE",
        rule="DeepSpeed's layer makes its own process groups",
        fix="drumline.Experts in the model, a Job, and ep=n in its plan (docs/experts.md)",
    )
