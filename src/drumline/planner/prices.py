"""What prices plans in a search: the closed form fitted on published runs, where it knows the model and the machines;
else `Steps`, from data sheets or measurements. One question has one of them, for all that is answered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ..clusters import Cluster
from ..costs import Estimate, Steps
from ..models.profile import Profile
from ..plans import Plan

if TYPE_CHECKING:
    from ..costs.fitted import FittedSteps

    Prices = Steps | FittedSteps


def prices(profile: Profile, cluster: Cluster, precision: str) -> Prices:
    """What prices plans of one precision for a model on a cluster."""
    if any(op.kind == "attention" for x in profile.layers for op in x.ops):
        from ..costs.fitted import fitted_for  # here, because it brings numpy along

        return fitted_for(profile, cluster, precision) or Steps(profile, cluster, precision)
    return Steps(profile, cluster, precision)


def by_fit(by: Prices) -> FittedSteps | None:
    """The closed form, where it is what prices."""
    return None if isinstance(by, Steps) else by


def estimates(by: Prices, plans: Iterable[Plan]) -> Iterator[Estimate]:
    """The estimate of each plan, as they come."""
    fitted = by_fit(by)
    return fitted.estimates(plans) if fitted is not None else (by.estimate(p) for p in plans)


def seconds(by: Prices, plans: Sequence[Plan]) -> list[float]:
    """The step of each plan; all at once where that is quicker."""
    fitted = by_fit(by)
    return fitted.seconds(plans) if fitted is not None else [by.estimate(p).step_seconds for p in plans]
