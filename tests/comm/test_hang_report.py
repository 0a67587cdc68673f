"""The hang report: which rank the others wait for, by status and process state."""

from __future__ import annotations

import pytest

from drumline.comm.hang_report import hang_report
from drumline.comm.rank_status import StatusReading


def status(calls: int, *, inside: bool = True, call: str = "all_reduce f32 (8)", line: int = 3) -> StatusReading:
    return StatusReading(100.0, "training", 7, "backward", calls, inside, call, f"job.py:{line}")


def test_a_rank_behind_is_named_and_every_rank_has_a_line() -> None:
    report = hang_report({0: status(12), 1: status(11, inside=False, line=9), 2: status(12)}, silent_for=10.2)
    assert report.suspects == (1,)
    assert report.text.splitlines() == [
        "no progress for 10 s: rank 1 is missing: fewer collectives started than elsewhere",
        "  rank 0: training, step 7, backward; waits in collective 12: all_reduce f32 (8) at job.py:3",
        "  rank 1: training, step 7, backward; last finished collective 11: all_reduce f32 (8) at job.py:9",
        "  rank 2: training, step 7, backward; waits in collective 12: all_reduce f32 (8) at job.py:3",
    ]


@pytest.mark.parametrize(
    ("readings", "states", "suspects", "words"),
    [
        ({0: status(5), 1: status(5), 2: status(5)}, {0: "S", 1: "S", 2: "T"}, (2,), "is stopped (state T)"),
        ({0: status(5), 1: status(4)}, {0: "ended", 1: "S"}, (0,), "process has ended"),
        ({0: status(5), 2: status(5)}, {0: "S", 1: "S", 2: "S"}, (1,), "no status"),
        ({0: status(5), 1: status(5, call="barrier"), 2: status(5)}, {}, (1,), "another collective"),
        ({0: status(5), 1: status(5, call="barrier")}, {}, (0, 1), "ranks 0 and 1 are in different collectives"),
        ({0: status(5), 1: status(5, inside=False)}, {}, (1,), "outside of the collective"),
        ({0: status(5), 1: status(3), 2: status(4)}, {}, (1, 2), "ranks 1 and 2 are missing"),
        ({0: status(5), 1: status(5)}, {0: "R", 1: "S"}, (), "none can be named"),
        ({0: status(5, inside=False), 1: status(4, inside=False)}, {}, (), "no rank is in a collective"),
        ({}, {}, (), "no progress"),
    ],
)
def test_suspects(readings, states, suspects, words) -> None:
    report = hang_report(readings, states=states, silent_for=12.0)
    assert report.suspects == suspects
    assert words in report.text


def waiting(peers: tuple[int, ...], *, group: int = 0, number: int = 0, inside: bool = True) -> StatusReading:
    return StatusReading(100.0, "training", 7, "forward", 9, inside, f"call {number}", "job.py:3", group, number, peers)


@pytest.mark.parametrize(
    ("readings", "suspects", "words"),
    [
        # a pipeline: 3 waits for 2, 2 for 1, and 1 computes
        ({0: waiting((1,)), 1: waiting((0,), inside=False), 2: waiting((1,)), 3: waiting((2,))}, (1,), "wait for it"),
        # two groups with their own numbers: rank 3 has made fewer calls of its group than rank 2
        (
            {
                0: waiting((0, 1), group=5, number=40, inside=False),
                1: waiting((0, 1), group=5, number=40, inside=False),
                2: waiting((2, 3), group=6, number=8),
                3: waiting((2, 3), group=6, number=7, inside=False),
            },
            (3,),
            "rank 3 is missing",
        ),
        # two ranks that wait for each other in different calls
        ({0: waiting((0, 1), group=5, number=2), 1: waiting((0, 1), group=6, number=3)}, (0, 1), "different calls"),
        # all in one call
        ({r: waiting((0, 1), group=5, number=2) for r in range(2)}, (), "none can be named"),
    ],
)
def test_suspects_by_who_waits_for_whom(readings, suspects, words) -> None:
    report = hang_report(readings, silent_for=12.0)
    assert report.suspects == suspects
    assert words in report.text


def at(step: int, phases: int, *, before: int = 5, phase: str = "forward", place: str = "training") -> StatusReading:
    """A rank of whose calls nothing is known, as over NCCL."""
    return StatusReading(100.0, place, step, phase, 0, False, "", "", phases=phases, phases_before=before)


@pytest.mark.parametrize(
    ("readings", "suspects"),
    [
        ({0: at(7, 1), 1: at(6, 5, phase="data"), 2: at(7, 4)}, (1,)),
        ({0: at(7, 4, phase="communication"), 1: at(7, 2), 2: at(7, 4, phase="communication")}, (1,)),
        ({0: at(7, 4), 1: at(-1, 1, place="starting")}, (1,)),
        ({0: at(7, 4), 1: at(7, 4)}, ()),
        # stages of a pipeline, whose steps have different phases
        ({0: at(7, 4, before=9), 1: at(7, 2, before=7)}, ()),
        ({0: at(7, 4, before=9), 1: at(6, 8, before=7)}, (1,)),
        # a rank that has ended is behind for good
        ({0: at(7, 4), 1: at(7, 2), 2: at(3, 5, place="ended")}, (1,)),
    ],
)
def test_without_known_calls_the_ranks_behind_in_steps_or_phases_are_named(readings, suspects) -> None:
    report = hang_report(readings, silent_for=12.0)
    assert report.suspects == suspects
    assert ("behind: others are in a later step or phase" in report.text) == bool(suspects)
    assert "rank 0: training, step 7, " in report.text
