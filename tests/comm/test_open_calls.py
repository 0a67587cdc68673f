"""The calls in progress of a group: which there are, which have ended, and what is held for them."""

from __future__ import annotations

import gc
import weakref

from drumline.comm.call_check import CallSite, signature
from drumline.comm.process_group.open_calls import OpenCalls

SITE = CallSite("train.py:1", 1)
CALL = signature("all_reduce")


class Work:
    """A call that ends when it is told to."""

    def __init__(self) -> None:
        self.done = False

    def is_completed(self) -> bool:
        """Whether it has ended."""
        return self.done


class Message:
    """Counts its ends."""

    ends = 0

    def end(self) -> None:
        """Count."""
        self.ends += 1


def start(calls: OpenCalls, number: int, message: Message | None = None) -> Work:
    """An asynchronous call."""
    work = Work()
    calls.asynchronous.append((number, CALL, SITE, 0, work.is_completed, message.end if message else None))
    return work


def test_calls_are_taken_out_in_their_order() -> None:
    calls, message = OpenCalls(), Message()
    first, second, third = start(calls, 1, message), start(calls, 2), start(calls, 3)
    second.done = True
    assert calls.sweep() == 0 and set(calls.waits()) == {1, 2, 3}
    first.done = True
    assert calls.sweep() == 2 and set(calls.waits()) == {3} and message.ends == 1
    assert [number for number, *_ in calls.ended()] == [1, 2]
    assert calls.sweep(everything=True) == 1 and not third.done and not calls.waits()


def test_a_call_that_blocks_becomes_asynchronous_once_it_has_started() -> None:
    calls, work = OpenCalls(), Work()
    calls.begin(1, CALL, SITE)
    calls.begin(2, CALL, SITE)
    since = calls.waits()[1][2]
    assert calls.sweep(everything=True) == 0, "a thread never takes out a call that blocks"
    calls.go_on(1, work.is_completed, None)
    assert calls.waits()[1] == (CALL, SITE, since)
    calls.end(2)
    calls.end(2)
    assert set(calls.waits()) == {1} and [number for number, *_ in calls.ended()] == [2]


def test_the_work_of_a_call_that_has_ended_is_not_held() -> None:
    calls = OpenCalls()
    work = start(calls, 1)
    work.done, seen = True, weakref.ref(work)
    del work
    assert calls.sweep() == 1
    gc.collect()
    assert seen() is None and list(calls.ended()) == [(1, CALL, SITE)]
