"""The thread that runs collectives: in order, with their errors, and gone with its owner."""

from __future__ import annotations

import threading
import time

import pytest

from drumline.comm.background import BackgroundThread


def running() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "under test"]


def test_tasks_run_in_order_while_the_caller_goes_on() -> None:
    thread, gate, seen = BackgroundThread("in order"), threading.Event(), []
    works = [thread.submit(gate.wait), *(thread.submit(lambda i=i: seen.append(i)) for i in range(5))]  # type: ignore[misc]
    assert not seen and not works[-1].get_future().done()
    gate.set()
    assert all(work.wait() for work in works)
    assert seen == [0, 1, 2, 3, 4]


def test_an_error_is_raised_by_the_wait_and_the_next_task_runs() -> None:
    thread = BackgroundThread("with an error")
    bad, good = thread.submit(lambda: 1 // 0), thread.submit(lambda: None)
    with pytest.raises(ZeroDivisionError):
        bad.wait()
    assert good.wait()


def test_the_thread_ends_with_its_owner() -> None:
    thread = BackgroundThread("under test")
    assert thread.submit(lambda: None).wait() and running()
    del thread
    end = time.monotonic() + 10
    while running() and time.monotonic() < end:
        time.sleep(0.01)
    assert not running()
