"""More tensor-parallel ranks than key heads: the engine and the cost model use one rule, and the result is correct."""

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


def test_equals_one_device(world: Worlds) -> None:
    result = matrix.run_one(world(4), Cell(JOB, "tp=4", "float64"), 3)
    assert result.kind == "passed", result


def test_parameters_match_the_prediction(world: Worlds) -> None:
    """Attention is priced as it runs: whole matmuls, or column-parallel ones with gathered outputs."""
    profile = trace(small_jobs.make(JOB))
    parameters = split_model(profile, Plan(tp=4)).profile.parameters
    for _, numbers in world(4).run(functions.sends, "tp=4", JOB):
        assert numbers == parameters < profile.parameters
    roles = [word for words in roles_of(profile, 4) for word in words]
    assert (roles.count(COLUMN), roles.count(ROW)) == (4, 2), "those of the MLPs, and none of attention"
