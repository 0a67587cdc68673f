"""Run checks of drumline.MPI on ranks that are threads, and on ranks that are processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from drumline import MPI
from drumline.mpi import run_threads

Check = Callable[[Any], Any]


def in_processes(check: Check, transport: str = "") -> Any:
    """Run a check on COMM_WORLD in each process of a world."""
    if transport:
        os.environ["DRUMLINE_TRANSPORT"] = transport
    return check(MPI.COMM_WORLD)


def everywhere(checks: list[Check]) -> Callable[[Callable[..., None]], Any]:
    """Parametrize a test with each check and each kind and number of ranks."""
    places = [("threads", p) for p in (1, 2, 3, 4)] + [("processes", p) for p in (2, 3)]

    def mark(test: Callable[..., None]) -> Any:
        test = pytest.mark.parametrize("place", places, ids=lambda place: f"{place[0]}-{place[1]}")(test)
        return pytest.mark.parametrize("check", checks, ids=lambda c: c.__name__)(test)

    return mark


def run(check: Check, place: tuple[str, int], world: Any) -> list[Any]:
    """Run a check on all ranks; returns their results."""
    kind, p = place
    return run_threads(check, p) if kind == "threads" else world(p).run(in_processes, check)


def caught(error: type[BaseException], fn: Callable[[], Any]) -> str:
    """The text of the error that a function raises."""
    with pytest.raises(error) as e:
        fn()
    return str(e.value)
