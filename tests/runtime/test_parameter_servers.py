"""Parameter servers: exact plans equal one device, the others a replay of their recorded updates, in float64 to 1e-10."""

from __future__ import annotations

import re

import pytest
import torch
from server_functions import (
    Cell,
    gradients_after_lost_servers,
    shares_of_lost_workers,
    verify_broken,
    verify_cells,
    work_without_end,
)

from drumline.launchers.local import run_ranks
from drumline.plans import Plan
from drumline.runtime.verification.verify import Verification

STEPS = 5


def verified(cells: list[Cell]) -> list[Verification]:
    """The verifications of plans for the same processes."""
    processes = {Plan.parse(plan).processes for _, plan in cells}
    assert len(processes) == 1
    results = run_ranks(verify_cells, cells, STEPS, ranks=processes.pop(), threads=1)
    first = next(r for r in results if r[0] is not None)
    return [v for v in first if v is not None]


def check(cells: list[Cell]) -> None:
    if torch.cuda.is_available():  # hogwild shares the memory of a host
        cells = [(job, plan) for job, plan in cells if "hogwild" not in plan]
    for cell, v in zip(cells, verified(cells), strict=True):
        assert v.passed and v.errors["float64"] <= 1e-10, f"{cell}: {v}"
        exact = Plan.parse(cell[1]).exact or "hogwild" in cell[1]
        assert v.reference.startswith("one device" if exact else "a replay"), v.reference
        plan, oldest = (
            Plan.parse(cell[1]),
            [int(n) for note in v.notes for n in re.findall(r"up to (\d+) updates", note)],
        )
        assert plan.sync_mode != "stale" or all(n <= plan.sync_steps for n in oldest), f"{cell}: {v.notes}"


def test_two_workers_and_one_server() -> None:
    check(
        [
            ("mlp", "dp=2,sync=server"),
            ("masked", "dp=2,sync=server,micro=3"),  # weighted loss, ragged batches, ranks without samples
            ("partial", "dp=2,sync=stale:0"),  # parameters without a gradient
            ("gpt", "dp=2,sync=stale:2"),
            ("mlp", "dp=2,sync=async"),
            ("masked", "dp=2,sync=async,damping=inverse"),
            ("mlp", "dp=2,sync=server,backup=1"),
            ("gpt", "dp=2,sync=hogwild"),
            ("mlp", "dp=2,sync=hogwild,precision=bf16"),
        ]
    )


def test_three_workers_and_two_servers() -> None:
    check(
        [
            ("mlp", "dp=3,sync=server,servers=2"),
            ("gpt", "dp=3,sync=server,servers=2,micro=2"),
            ("masked", "dp=3,sync=async,servers=2"),
            ("partial", "dp=3,sync=stale:1,servers=2,damping=inverse"),
        ]
    )


def test_one_worker_is_one_device() -> None:
    check([("mlp", "dp=1,sync=async"), ("gpt", "dp=1,sync=stale:3"), ("masked", "dp=1,sync=hogwild")])


def test_the_check_can_fail() -> None:
    results = run_ranks(verify_broken, "dp=2,sync=async", STEPS, ranks=3, threads=1)
    v = next(r for r in results if r is not None)
    assert not v.passed and v.first_divergence and v.errors["float64"] > 1e-6


def test_norms_over_the_whole_batch_are_refused_where_workers_do_not_meet() -> None:
    with pytest.raises(Exception, match=r"BatchNorm under sync=server\n(.*\n)*.*nearest plan that runs: dp=2"):
        verified([("cnn", "dp=2,sync=server")])


@pytest.mark.parametrize("profiled", [False, True])
def test_a_gradient_that_no_server_took_is_not_added_to_the_next_one(profiled: bool) -> None:
    (gradients,) = run_ranks(gradients_after_lost_servers, profiled, ranks=1, threads=1)
    first, second = gradients
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert any(t.abs().sum() > 0 for t in first)


def test_the_share_of_a_gradient_that_was_never_handed_in_is_dropped() -> None:
    ((kept, ending),) = run_ranks(shares_of_lost_workers, ranks=1, threads=1)
    assert kept == [[0], [0, 1], [], []]
    assert ending == "CallerGone('the first server is gone')"


def test_a_worker_whose_connection_is_closed_again_and_again_gives_up() -> None:
    ((error, notes),) = run_ranks(work_without_end, ranks=1, threads=1)
    assert "worker 0 lost its connection 10 times" in error and "the connection was closed" in error
    assert notes == 9
