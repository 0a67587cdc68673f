"""The status of a rank: what is written is read back, from any number of threads, and listeners follow it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from drumline.comm.rank_status import BETWEEN, RankStatus, parse_status, rank_list, read_status


def test_a_file_reads_back(tmp_path: Path) -> None:
    status = RankStatus(tmp_path / "status")
    status.step(4)
    status.phase("backward")
    status.collective_started(
        "all_reduce float32 (8)", "job.py:3", group=2**63 + 1, number=7, peers=rank_list([0, 1, 5])
    )
    reading = read_status(tmp_path / "status")
    assert reading is not None and reading == status.read() == parse_status(status.packed())
    assert (reading.step, reading.phase, reading.calls, reading.in_collective) == (4, "backward", 1, True)
    assert (reading.group, reading.number, reading.peers) == (2**63 + 1, 7, (0, 1, 5))
    status.collective_ended()
    assert not status.read().in_collective


def test_phases_are_counted_by_step() -> None:
    status = RankStatus()
    for step in range(2):
        status.step(step)
        for name in ("forward", "backward", "optimizer"):
            status.phase(name)
    assert (status.read().phases, status.read().phases_before) == (3, 3) and status.read().in_step
    status.place(BETWEEN)
    assert status.read().phases == 3 and not status.read().in_step


@pytest.mark.parametrize(
    ("ranks", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 3], "0-3"), ([9, 0, 1, 4, 5], "0-1,4-5,9")]
)
def test_a_list_of_ranks_is_short(ranks: list[int], text: str) -> None:
    assert rank_list(ranks) == text
    status = RankStatus()
    status.collective_started("c", peers=text)
    assert status.read().peers == tuple(sorted(ranks))


def test_a_list_that_is_too_long_is_cut_between_ranks() -> None:
    status = RankStatus()
    status.collective_started("c", peers=rank_list(range(0, 4000, 2)))
    peers = status.read().peers
    assert len(peers) > 50 and peers == tuple(range(0, 2 * len(peers), 2))


def test_threads_do_not_lose_calls(tmp_path: Path) -> None:
    status = RankStatus(tmp_path / "status")

    def call() -> None:
        for _ in range(2000):
            status.collective_started("c")
            status.collective_ended()

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reading = read_status(tmp_path / "status")
    assert reading is not None and reading.calls == 8000 and not reading.in_collective


def test_the_place_between_steps_ends_with_the_next_batch_or_step() -> None:
    status = RankStatus()
    status.batch_wanted()
    assert status.read().place == "starting"
    status.step(0)
    assert status.place(BETWEEN) == "training"
    assert status.place("saving") == BETWEEN and status.place(BETWEEN) == "saving"
    assert str(status.read()).startswith("between steps, step 0")
    status.batch_wanted()
    assert status.read().place == "training"
    status.place(BETWEEN)
    status.step(1)
    assert status.read().place == "training"


def test_a_listener_follows_every_change() -> None:
    status, seen = RankStatus(), []
    status.listener = lambda what, value: seen.append((what, value))
    status.place("saving")
    status.step(3)
    status.phase("data")
    status.collective_started("barrier")
    status.collective_ended()
    assert seen == [("place", "saving"), ("step", "3"), ("phase", "data"), ("collective", "barrier")]
