"""How a job is parallelised: the plan, its notation, and the supported combinations."""

from .combinations import check
from .plan import Plan

__all__ = ["Plan", "check"]
