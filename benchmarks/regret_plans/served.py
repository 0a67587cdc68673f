"""Ranks that stay alive for a whole benchmark: worlds of several sizes, of which one works while the others sleep."""

from __future__ import annotations

import os
import tempfile
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from drumline.launchers import run_ranks

ENGINES: dict[str, Any] = {}
"""Engines of a rank, by job and plan."""


class Worlds:
    """`worlds.call(2, function, *arguments)` returns the results of two ranks. A world starts on its first call."""

    def __init__(self, threads: int | None) -> None:
        self._threads = threads
        self._folder = tempfile.TemporaryDirectory(prefix="drumline-served-")
        self._pipes: dict[int, list[Connection]] = {}
        self._running: list[threading.Thread] = []

    def call(self, ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call a function on every rank of the world of that size; the first error of a rank is raised."""
        if ranks not in self._pipes:
            self._start(ranks)
        for pipe in self._pipes[ranks]:
            pipe.send((function, arguments))
        answers = [pipe.recv() for pipe in self._pipes[ranks]]
        failed = next((text for ok, text in answers if not ok), None)
        if failed is not None:
            raise RuntimeError(f"a rank failed:\n{failed}")
        return [value for _, value in answers]

    def _start(self, ranks: int) -> None:
        address = os.path.join(self._folder.name, f"world-{ranks}")
        with Listener(address, "AF_UNIX", backlog=ranks) as door:
            world = threading.Thread(
                target=run_ranks, args=(serve, address), kwargs={"ranks": ranks, "threads": self._threads}, daemon=True
            )
            world.start()
            self._running.append(world)
            self._pipes[ranks] = [door.accept() for _ in range(ranks)]

    def stop(self) -> None:
        """End all ranks and wait for them."""
        for pipes in self._pipes.values():
            for pipe in pipes:
                pipe.send(None)
                pipe.close()
        for world in self._running:
            world.join()
        self._folder.cleanup()

    def __enter__(self) -> Worlds:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


def serve(emit: Callable[[dict[str, Any]], None], address: str) -> None:
    """Run a rank: execute calls from the pipe until it is closed."""
    with Client(address, "AF_UNIX") as pipe:
        while (order := pipe.recv()) is not None:
            function, arguments = order
            try:
                pipe.send((True, function(*arguments)))
            except Exception:
                pipe.send((False, traceback.format_exc()))
