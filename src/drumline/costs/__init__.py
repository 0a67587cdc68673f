"""What a plan costs: time and memory, in closed form."""

from .estimate import Estimate
from .step import Steps, estimate, largest_share, layer_times

__all__ = ["Estimate", "Steps", "estimate", "largest_share", "layer_times"]
