"""What a plan costs: time and memory, in closed form."""

from .estimate import Estimate
from .step import estimate, largest_share, layer_times

__all__ = ["Estimate", "estimate", "largest_share", "layer_times"]
