"""Processes that write shards: forked, so that they share the source; they end with the process that started them."""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from ...core.errors import GaveUp
from ..child_processes import end_with_parent

Task = Callable[[int, Callable[[int], None]], int]
"""(number, called with the samples that are done) -> 1 if it did something."""
_POLL_S = 0.2
"""Seconds between two looks at the progress."""


def run_tasks(task: Task, count: int, workers: int, progress: Callable[[int], None]) -> list[int]:
    """Run task 0 to `count` - 1, and return their results. The first error ends the others, and is raised."""
    workers = min(workers, count)
    if workers == 1 or "fork" not in multiprocessing.get_all_start_methods():
        return _in_turn(task, count, progress)
    context = multiprocessing.get_context("fork")
    done = context.Value("q", 0)
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(task, done))
    try:
        futures = [pool.submit(_run, number) for number in range(count)]
        waiting = set(futures)
        while waiting:
            finished, waiting = wait(waiting, timeout=_POLL_S, return_when=FIRST_EXCEPTION)
            progress(done.value)
            for future in finished:
                future.result()
        return [future.result() for future in futures]
    except BrokenProcessPool:
        raise GaveUp(
            "a process of `drumline pack` was killed",
            rule="complete shards are kept",
            fix="run the same command again; --workers 1 needs less memory",
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _in_turn(task: Task, count: int, progress: Callable[[int], None]) -> list[int]:
    done = 0

    def tick(n: int) -> None:
        nonlocal done
        before, done = done, done + n
        if done // 256 != before // 256:
            progress(done)

    return [task(number, tick) for number in range(count)]


_state: dict[str, Any] = {}
"""In a worker: its task and the counter of samples."""


def _begin(task: Task, done: Any) -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)  # threads of the parent do not exist here
    _state.update(task=task, done=done)


def _run(number: int) -> int:
    def tick(n: int) -> None:
        with _state["done"].get_lock():
            _state["done"].value += n

    result: int = _state["task"](number, tick)
    return result
