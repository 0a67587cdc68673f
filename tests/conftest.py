"""Fixtures for all tests: worlds of ranks, and a watch over what a test leaves behind."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import psutil
import pytest
from world import World

_WORLDS: dict[tuple[int, str], World] = {}
_SHM = Path("/dev/shm")
_CHILDREN = Path("/proc/self/task") / str(os.getpid()) / "children"
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "DRUMLINE_STORE")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the launcher sets it, and it is not a leak


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
    before, segments, variables = _children(), _segments(), {k: os.environ.get(k) for k in _VARIABLES}
    yield
    end = time.monotonic() + 2.0
    while (left := left_behind(before, segments)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not left, f"the test left behind: {left}"
    assert {k: os.environ.get(k) for k in _VARIABLES} == variables, "the test left variables behind"


def left_behind(before: set[int], segments: set[str]) -> list[str]:
    """Processes and segments of ours that were not there before."""
    kept = {p for made in _WORLDS.values() for p in made.pids}
    found = [f"process {pid}" for pid in _children() - before - kept]
    return found + [f"segment {name}" for name in _segments() - segments if not _of_others(name)]


def _children() -> set[int]:
    """Our processes and theirs, without the two servers that Python keeps until we end."""
    servers = {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}
    return {pid for pid in _descendants() if pid not in servers and _alive(pid)}


def _descendants() -> set[int]:
    """All processes that descend from this one. The kernel's own lists spare every test two looks at all of /proc."""
    if not _CHILDREN.exists():  # the kernel may be built without them
        return {c.pid for c in psutil.Process().children(recursive=True)}
    found: set[int] = set()
    ask = [os.getpid()]
    while ask:
        for path in Path(f"/proc/{ask.pop()}/task").glob("*/children"):
            try:
                new = {int(pid) for pid in path.read_text().split()} - found
            except OSError:  # it has just ended
                continue
            found |= new
            ask += new
    return found


def _alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _segments() -> set[str]:
    return set(os.listdir(_SHM)) if _SHM.is_dir() else set()


def _of_others(name: str) -> bool:
    """Whether a process that is not ours maps the segment: other programs of this machine have theirs."""
    ours = {os.getpid(), *(c.pid for c in psutil.Process().children(recursive=True))}
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if int(maps.parent.name) not in ours and f"{_SHM}/{name}" in maps.read_text():
                return True
        except OSError:
            continue
    return not (_SHM / name).exists()
