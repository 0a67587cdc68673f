"""Time and memory of a training step under a plan: one interface (`CostModel`), two implementations."""

from .estimate import Estimate
from .factory import cost_model
from .layer_time import largest_micro_batch
from .model import CostModel
from .operator_model import OperatorCostModel, estimate

__all__ = ["CostModel", "Estimate", "OperatorCostModel", "cost_model", "estimate", "largest_micro_batch"]
