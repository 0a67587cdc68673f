"""`deepspeed.moe.utils`: parameter groups of a model without experts of DeepSpeed's."""

from __future__ import annotations

from typing import Any


def is_moe_param(param: Any) -> bool:
    """Whether a parameter belongs to an expert of DeepSpeed's: no."""
    return False


def split_params_into_different_moe_groups_for_optimizer(param_groups: Any, *unused: Any, **options: Any) -> list[Any]:
    """The groups as they are: there are no experts of DeepSpeed's in them."""
    return [param_groups] if isinstance(param_groups, dict) else list(param_groups)
