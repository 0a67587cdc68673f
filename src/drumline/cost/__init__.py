"""What a plan costs: time and memory, in closed form."""

from .estimate import Estimate

__all__ = ["Estimate"]
