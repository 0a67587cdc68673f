"""Parity of many families of the transformers library under sharding, tensor parallelism and a pipeline."""

from __future__ import annotations

from collections.abc import Callable

import hf_jobs
import model_families
import parity
import pytest
from world import World

from drumline.core.errors import PlanError

QUICK = {("xglm", "tp=2"), ("deberta", "tp=2")}


@pytest.mark.skipif(bool(hf_jobs.missing()), reason=hf_jobs.missing())
@pytest.mark.parametrize(
    ("name", "plan"),
    [cell if cell in QUICK else pytest.param(*cell, marks=pytest.mark.slow) for cell in model_families.cells()],
)
def test_family(world: Callable[[int], World], name: str, plan: str) -> None:
    if rule := model_families.REFUSED.get((name, plan)):
        with pytest.raises(PlanError, match=rule):
            world(2).run(model_families.run, name, plan)
    else:
        parity.check(world(2).run(model_families.run, name, plan)[0])
