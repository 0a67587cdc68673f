"""Chooses the cost model for a profile on a cluster."""

from __future__ import annotations

from ..clusters import Cluster
from ..models.profile import Profile
from .model import CostModel
from .operator_model import OperatorCostModel


def cost_model(profile: Profile, cluster: Cluster, precision: str) -> CostModel:
    """The model fitted on published runs where it covers this transformer and these chips, else the operator model."""
    if any(op.kind == "attention" for layer in profile.layers for op in layer.ops):
        from .fitted import fitted_model  # needs numpy

        fitted = fitted_model(profile, cluster, precision)
        if fitted is not None:
            return fitted
    return OperatorCostModel(profile, cluster, precision)
