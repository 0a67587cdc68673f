"""Ranks that are started once per world size and shared by all tests: `world(3).run(function, *arguments)`.

A rank is a process forked from a server that has imported torch already. It joins one group (gloo by default)
when it starts and then waits for functions, which are pickled by name. If a test leaves its ranks out of step, the whole
world is stopped, and the next test gets a fresh one.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

LARGEST = 8
TIMEOUT = 120.0
"""Seconds that a function may run before its ranks count as hung."""
GRACE = 1.0
"""Seconds to wait for the peers of a failed rank to fail as well."""
PRELOAD = ["drumline.runtime.training.preload"]
"""Modules that the server imports before it forks the first rank."""


class RankFailed(Exception):
    """An error of a rank that cannot be pickled; the text has its traceback."""


class Hang(Exception):
    """Ranks did not answer in time."""


class World:
    """`size` ranks that live until `stop`. `patience`: timeout of a message, long enough for a peer that still compiles."""

    def __init__(self, size: int, backend: str = "gloo", patience: float = TIMEOUT) -> None:
        assert 1 <= size <= LARGEST, f"worlds have 1 to {LARGEST} ranks"
        self.size, self.backend, self._patience = size, backend, patience
        self._processes: list[Any] = []
        self._pipes: list[Any] = []
        self._folder = ""

    @property
    def pids(self) -> set[int]:
        """Process ids of the ranks."""
        return {p.pid for p in self._processes}

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = TIMEOUT) -> list[Any]:
        """Run `function(*arguments)` on every rank and return the results; raises the error of the first rank that failed."""
        if not self._processes:
            self._start()
        # Functions are found by the path of this moment: pytest adds folders as it collects.
        order = pickle.dumps((function, arguments))
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps(sys.path))
            pipe.send_bytes(order)
        answers = self._answers(timeout)
        silent = [r for r in range(self.size) if r not in answers]
        errors = {r: value for r, (kind, value) in sorted(answers.items()) if kind == "error"}
        alive = all(p.is_alive() for p in self._processes)
        if silent or not alive or 0 < len(errors) < self.size:
            self.stop()  # ranks that did not fail may be out of step
        if silent and not errors:
            raise Hang(f"{function.__name__}: ranks {silent} of {self.size} did not answer within {timeout:g} s")
        if errors:
            raise _choose_error(errors)
        return [answers[r][1] for r in range(self.size)]

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._folder = tempfile.mkdtemp(prefix="drumline-world-")
        for rank in range(self.size):
            here, there = context.Pipe()
            process = context.Process(
                target=_rank_main,
                daemon=True,
                args=(there, rank, self.size, os.path.join(self._folder, "store"), self.backend, self._patience),
            )
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def _answers(self, timeout: float) -> dict[int, tuple[str, Any]]:
        """Wait until every rank has answered or died, or the time is up."""
        answers: dict[int, tuple[str, Any]] = {}
        end = time.monotonic() + timeout
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while waiting and (left := end - time.monotonic()) > 0:
            for pipe in multiprocessing.connection.wait(list(waiting), timeout=left):
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(GRACE)
                    code = self._processes[rank].exitcode
                    answers[rank] = ("error", (None, f"rank {rank} died with exit code {code}"))
                if answers[rank][0] == "error":
                    end = min(end, time.monotonic() + GRACE)
        return answers

    def stop(self) -> None:
        """Kill the ranks; the next `run` starts new ones."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()  # a rank has no state worth saving
        for process in self._processes:
            process.join()
            process.close()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._pipes, self._processes, self._folder = [], [], ""


def _choose_error(errors: dict[int, tuple[bytes | None, str]]) -> BaseException:
    """Choose the error to raise: of the first rank whose error is more than a broken connection."""
    noise = ("Connection closed by peer", "Connection reset", "Broken pipe")
    rank = next((r for r, (_, text) in errors.items() if not any(n in text for n in noise)), min(errors))
    pickled, text = errors[rank]
    error: BaseException = RankFailed(text)
    if pickled is not None:
        try:
            error = pickle.loads(pickled)
        except Exception:
            return error
        error.add_note(f"on rank {rank} of those that failed, {sorted(errors)}:\n{text}")
    return error


def _rank_main(pipe: Any, rank: int, size: int, store: str, backend: str, patience: float) -> None:
    """Run a rank: join the group, then execute functions from the pipe."""
    if backend == "plain gloo":  # torch's own group, whose calls its dispatcher sees
        os.environ["DRUMLINE_CHECK_CALLS"], backend = "0", "gloo"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(size),
        DRUMLINE_STORE=store,
        GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS="1",
    )
    import torch

    from drumline.comm.environment import connect

    torch.set_num_threads(1)
    connect(backend=backend, timeout=patience)
    try:
        while True:
            sys.path[:] = pickle.loads(pipe.recv_bytes())
            pipe.send_bytes(_answer(pipe.recv_bytes()))
    except (EOFError, OSError):
        os._exit(0)  # the test session is over


def _answer(order: bytes) -> bytes:
    """Run one function; returns its result or its error as bytes."""
    import torch

    random.seed(0)
    torch.manual_seed(0)
    try:
        function, arguments = pickle.loads(order)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return pickle.dumps(("result", function(*arguments)))
    except BaseException as e:
        text = traceback.format_exc()
        try:
            return pickle.dumps(("error", (pickle.dumps(e), text)))
        except Exception:
            return pickle.dumps(("error", (None, text)))
