"""Fixtures for all tests: worlds of ranks, and a watch over what a test leaves behind."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import psutil
import pytest
from world import PRELOAD, World

_WORLDS: dict[tuple[int, str], World] = {}
_SHM = Path("/dev/shm")
_PROC = Path("/proc")
PATIENCE = 10.0
"""Seconds that what was told to end may take to end, on a busy machine."""
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "DRUMLINE_STORE")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the launcher sets it, and it is not a leak
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a shell; programs under test get Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)


LONGEST = (
    "test_readme",
    "test_model_parallel",
    "test_parity",
    "test_dry_run_engine",
    "test_rules",
    "test_commands",
    "test_model_parallel_semantics",
    "test_examples",
    "test_guides",
)
"""Files of half a minute and more. They come first, so that two processes end at about the same time."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, the others in their order."""
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Of many files some have models of transformers on their ranks; a few files start sooner without.

    Tests and modules live to the end, so no garbage collection looks at them: they would take an eighth of the time.
    """
    if len({item.path for item in session.items}) > 20:
        PRELOAD[:0] = [f"transformers.models.{name}.modeling_{name}" for name in ("bert", "gpt2", "llama", "t5")]
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def _worlds() -> Iterator[dict[tuple[int, str], World]]:
    yield _WORLDS
    for made in _WORLDS.values():
        made.stop()


@pytest.fixture
def world(_worlds: dict[tuple[int, str], World]) -> Callable[..., World]:
    """`world(n).run(function, *arguments)`: on n ranks that were started once."""

    def of(size: int, backend: str = "gloo") -> World:
        return _worlds.setdefault((size, backend), World(size, backend))

    return of


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail the test that leaves a process, a shared-memory segment, a process group or a variable behind."""
    segments, variables = _segments(), {k: os.environ.get(k) for k in _VARIABLES}
    begun, grouped = _last_process(), _in_group()
    if begun != _seen[0]:
        _seen[:] = [begun, _children()]
    before = _seen[1]
    yield
    if _in_group() and not grouped:
        sys.modules["torch.distributed"].destroy_process_group()
        pytest.fail("the test left a process group behind")
    if _last_process() != begun or _segments() != segments:
        end = time.monotonic() + PATIENCE
        while (left := left_behind(before, segments)) and time.monotonic() < end:
            time.sleep(0.05)
        assert not left, f"the test left behind: {left}"
    assert {k: os.environ.get(k) for k in _VARIABLES} == variables, "the test left variables behind"


_seen: list[Any] = [None, set()]
"""The last process that was started on this machine when we looked, and our processes of that moment."""


def _last_process() -> object:
    """Changes whenever a process or a thread is started on this machine: most tests start none, and to look at all
    processes before and after each of them takes longer than the tests."""
    try:
        return (_PROC / "loadavg").read_text().split()[-1]
    except OSError:
        return object()  # another system: look each time


def _in_group() -> bool:
    """Whether this process is in a process group; without importing torch."""
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_initialized()


def left_behind(before: set[int], segments: set[str]) -> list[str]:
    """Processes and segments of ours that were not there before."""
    kept = {p for made in _WORLDS.values() for p in made.pids}
    found = [f"process {pid}" for pid in _children() - before - kept]
    return found + [f"segment {name}" for name in _segments() - segments if not _of_others(name)]


def _children() -> set[int]:
    """Our processes and theirs, without the two servers that Python keeps until we end."""
    servers = {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}
    return _descendants() - servers


def _descendants() -> set[int]:
    """All living processes that descend from this one. One look at /proc: the kernel's own lists of children are by
    thread, and ranks have hundreds of those."""
    if not _PROC.is_dir():
        return {c.pid for c in psutil.Process().children(recursive=True) if c.status() != psutil.STATUS_ZOMBIE}
    children: dict[int, list[tuple[int, bool]]] = {}
    for name in filter(str.isdigit, os.listdir(_PROC)):
        try:
            stat = (_PROC / name / "stat").read_bytes()
        except OSError:  # it has just ended
            continue
        state, parent = stat[stat.rindex(b")") + 2 :].split()[:2]
        children.setdefault(int(parent), []).append((int(name), state != b"Z"))
    found: set[int] = set()
    ask = [os.getpid()]
    while ask:
        for pid, lives in children.get(ask.pop(), ()):
            ask.append(pid)
            if lives:
                found.add(pid)
    return found


def _segments() -> set[str]:
    return set(os.listdir(_SHM)) if _SHM.is_dir() else set()


def _of_others(name: str) -> bool:
    """Whether a process that is not ours maps the segment: other programs of this machine have theirs."""
    ours = {os.getpid(), *(c.pid for c in psutil.Process().children(recursive=True))}
    for maps in _PROC.glob("[0-9]*/maps"):
        try:
            if int(maps.parent.name) not in ours and f"{_SHM}/{name}" in maps.read_text():
                return True
        except OSError:
            continue
    return not (_SHM / name).exists()
