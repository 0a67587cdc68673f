"""How a job is split: the plan, its notation, and the table of what composes with what."""

from .combinations import check
from .plan import Plan

__all__ = ["Plan", "check"]
