"""Time and memory of a training step under a plan: one interface (`CostModel`), two implementations."""

from ..clusters import Cluster
from ..models.profile import Profile
from .estimate import Estimate
from .layer_time import largest_micro_batch
from .model import CostModel
from .operator_model import OperatorCostModel, estimate

__all__ = ["CostModel", "Estimate", "OperatorCostModel", "cost_model", "estimate", "largest_micro_batch"]


def cost_model(profile: Profile, cluster: Cluster, precision: str) -> CostModel:
    """The model fitted on published runs where it covers this transformer and these chips, else the operator model."""
    if any(op.kind == "attention" for layer in profile.layers for op in layer.ops):
        from .fitted import fitted_model  # needs numpy

        fitted = fitted_model(profile, cluster, precision)
        if fitted is not None:
            return fitted
    return OperatorCostModel(profile, cluster, precision)
