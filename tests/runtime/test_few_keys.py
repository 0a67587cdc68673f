"""More tensor-parallel ranks than heads of keys: one rule for the engine and for the prices, and the result is right."""

from __future__ import annotations

from collections.abc import Callable

import matrix
import pytest
import small_jobs
import split_cost_functions as functions
from cells import Cell
from world import World

from drumline.costs.model_split import split_model
from drumline.costs.tensor_roles import COLUMN, ROW, roles_of
from drumline.plans import Plan
from drumline.tracing import trace

Worlds = Callable[[int], World]
JOB = "keys"
"""A Llama with four heads of queries and two of keys."""


@pytest.fixture(autouse=True)
def _there() -> None:
    if why := small_jobs.missing(JOB):
        pytest.skip(why)


def test_it_computes_what_one_device_computes(world: Worlds) -> None:
    result = matrix.run_one(world(4), Cell(JOB, "tp=4", "float64"), 3)
    assert result.kind == "held", result


def test_ranks_hold_what_was_predicted(world: Worlds) -> None:
    """The attention is priced as it is run: whole products, or columns whose outputs are gathered; no column and row."""
    profile = trace(small_jobs.make(JOB))
    parameters = split_model(profile, Plan(tp=4)).profile.parameters
    for _, numbers in world(4).run(functions.sends, "tp=4", JOB):
        assert numbers == parameters < profile.parameters
    roles = [word for words in roles_of(profile, 4) for word in words]
    assert (roles.count(COLUMN), roles.count(ROW)) == (4, 2), "those of the MLPs, and none of attention"
