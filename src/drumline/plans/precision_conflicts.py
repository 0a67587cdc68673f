"""The keys that combine with the approximate precisions, `bf16-pure` and `fp8`; all others are refused with them."""

from __future__ import annotations

from dataclasses import replace

from ..schedules import ASYNCHRONOUS
from .conflict import Conflict
from .plan import Plan

APPROXIMATE_PRECISIONS = ("bf16-pure", "fp8")
"""Precisions whose results differ from one device's by more than rounding, within stated bounds (docs/precision.md)."""

_BOTH = ("dp", "zero", "shard", "micro", "recompute", "precision", "backend", "bucket")
_KEYS = {"bf16-pure": (*_BOTH, "tp", "pp", "virtual", "split", "schedule"), "fp8": _BOTH}
"""Keys that may be set with each of them."""
_BACKENDS = {"bf16-pure": ("auto", "gloo", "nccl", "shm"), "fp8": ("auto", "gloo", "nccl")}
"""MPI has no type for sums in bf16, and threads share one copy of the weights and one random generator."""


def approximate_note(precision: str) -> str:
    """A sentence about an approximate precision."""
    return (
        f"precision={precision} is approximate: it trains to nearly the same loss, not to the same numbers; "
        "it is proposed only where it is asked for"
    )


def combines(key: str, precision: str) -> bool:
    """Whether a key of a plan may be set under a precision."""
    return precision not in APPROXIMATE_PRECISIONS or key in _KEYS[precision]


def _untested(plan: Plan) -> dict[str, object]:
    """The keys of a plan that are not tested with its precision."""
    if plan.precision not in APPROXIMATE_PRECISIONS:
        return {}
    kept, table = _KEYS[plan.precision], plan.table()
    keys = {k: v for k, v in table.items() if k not in kept}
    if plan.backend not in _BACKENDS[plan.precision]:
        keys["backend"] = plan.backend
    if plan.schedule in ASYNCHRONOUS and plan.pp > 1:
        keys["schedule"] = plan.schedule
    if plan.recompute == "selective":
        keys["recompute"] = plan.recompute
    return keys


def _named(plan: Plan) -> str:
    words = ((k, str(v).lower() if isinstance(v, bool) else v) for k, v in _untested(plan).items())
    return ", ".join(f"{k}={v}" for k, v in words)


def _in_bf16(plan: Plan) -> str:
    return str(replace(plan, precision="bf16"))


PRECISION_CONFLICTS = (
    Conflict(
        "precision=bf16-pure with keys that are not tested with it",
        lambda p: p.precision == "bf16-pure" and bool(_untested(p)),
        lambda p: f"{_named(p)}: weights in bf16 are tested under {', '.join(_KEYS['bf16-pure'])} only",
        _in_bf16,
    ),
    Conflict(
        "precision=fp8 with keys that are not tested with it",
        lambda p: p.precision == "fp8" and bool(_untested(p)),
        lambda p: f"{_named(p)}: matmuls in fp8 are tested under {', '.join(_KEYS['fp8'])} only",
        _in_bf16,
    ),
)
