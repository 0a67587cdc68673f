"""Every call and every wait is in the status of its rank, so that the hang report names the missing rank (F2)."""

from __future__ import annotations

from pathlib import Path

import pytest
import status_functions
from world import World

from drumline.comm.hang_report import hang_report

WORDS = {
    "all_reduce": "all_reduce float32 (6)",
    "async": "all_reduce float32 (6)",
    "message": "receive float32 (6) from rank 1",
    "ddp": "all_reduce float32 (4)",
}


@pytest.mark.parametrize("backend", ["shm", "checked_gloo"])
@pytest.mark.parametrize("what", list(WORDS))
def test_the_rank_that_is_late_is_named(world, what: str, backend: str, tmp_path: Path) -> None:
    ranks: World = world(2)
    (first, x), (second, _) = ranks.run(status_functions.late, what, backend, str(tmp_path))
    assert x == {"message": [1.0] * 6, "ddp": [1.0] * 4}.get(what, [2.0] * 6)
    assert first.in_collective and WORDS[what] in first.collective and "status_functions.py:" in first.site
    assert not second.in_collective
    report = hang_report({0: first, 1: second}, silent_for=12.0)
    assert report.suspects == (1,) and WORDS[what] in report.text


def test_the_rank_that_is_late_for_a_bucket_of_every_step_is_named(tmp_path: Path) -> None:
    """A bucket that repeats is reported a moment after it starts, by a thread, or with the next call.

    On ranks of its own: where calls were once made on behalf of another line, places are no longer recognized by code.
    """
    own = World(2)
    try:
        (first, calls), (second, _) = own.run(status_functions.late_for_a_repeated_bucket, str(tmp_path), timeout=60)
    finally:
        own.stop()
    assert first.in_collective and WORDS["ddp"] in first.collective and "status_functions.py:" in first.site
    assert not second.in_collective and calls == 2
    report = hang_report({0: first, 1: second}, silent_for=12.0)
    assert report.suspects == (1,) and WORDS["ddp"] in report.text


def test_the_users_code_after_a_step_has_a_place_of_its_own(world, tmp_path: Path) -> None:
    between = "between steps"
    [places] = world(1).run(status_functions.places, str(tmp_path))
    assert places[1:] == [between, "training", between, between, "training", between]
