"""Run functions on ranks that are processes of this machine, with a file store in a private folder: no port is opened.

Ranks are forked from a server process that has already imported torch, so a second start is cheap. If one rank fails,
the others are terminated and its own error is raised, not the follow-up errors of its peers.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any

from ..core.errors import DrumlineError, GaveUp, InputError

GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL."""
MOST_RANKS = 512

Emit = Callable[[dict[str, Any]], None]
"""Sends a small record from a running rank to the launcher."""


def spawn(function: Callable[..., Any], *arguments: Any, ranks: int = 2) -> list[Any]:
    """Run `function(*arguments)` on `ranks` local ranks; returns their results by rank."""
    return run_ranks(_without_emit, function, *arguments, ranks=ranks)


def run_ranks(
    function: Callable[..., Any],
    *arguments: Any,
    ranks: int,
    threads: int | None = None,
    on_event: Callable[[int, dict[str, Any]], None] | None = None,
) -> list[Any]:
    """Run `function(emit, *arguments)` on local ranks. `on_event(rank, record)` receives the records they emit."""
    if not 1 <= ranks <= MOST_RANKS:
        raise InputError(f"{ranks} ranks", rule=f"from 1 to {MOST_RANKS} ranks on one machine")
    try:
        payload = pickle.dumps((function, arguments))
    except Exception as e:
        raise InputError(
            f"the function or its arguments cannot be sent to ranks: {e}",
            rule="the function is defined at the top level of a module, and its arguments can be pickled",
        ) from None
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["drumline.runtime.training.preload"])
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch's C++ warnings are for torch developers
    threads = threads or max(1, (os.cpu_count() or 1) // ranks)
    with tempfile.TemporaryDirectory(prefix="drumline-") as folder:
        store = os.path.join(folder, "store")
        pipes: list[Any] = []
        processes: list[Any] = []
        try:
            for rank in range(ranks):
                receiver, sender = context.Pipe(duplex=False)
                pipes.append(receiver)
                process = context.Process(
                    target=_rank_main, args=(sender, payload, rank, ranks, threads, store), daemon=True
                )
                with contextlib.nullcontext() if b"__main__" in payload else _without_main():
                    process.start()
                processes.append(process)
                sender.close()
            return _collect(pipes, processes, on_event)
        finally:
            _terminate(processes)
            for pipe in pipes:
                pipe.close()


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Start a process that does not import the main script: one that needs nothing of it also needs no guard."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _collect(pipes: list[Any], processes: list[Any], on_event: Any) -> list[Any]:
    """Wait for every rank's result, or for the first failure."""
    results: dict[int, Any] = {}
    ended: dict[int, Exception] = {}
    open_pipes = {pipe: rank for rank, pipe in enumerate(pipes)}
    while open_pipes:
        for pipe in _ready(open_pipes):
            rank = open_pipes[pipe]
            try:
                kind, value = pipe.recv()
            except (EOFError, ConnectionResetError):
                del open_pipes[pipe]
                if rank not in results:
                    processes[rank].join(GRACE)
                    ended[rank] = _death(rank, processes[rank].exitcode)
                continue
            if kind == "event":
                if on_event is not None:
                    on_event(rank, value)
            elif kind == "result":
                results[rank] = value
            else:
                ended[rank] = _failure(rank, value)
        if ended:
            _collect_late_failures(open_pipes, processes, results, ended)
            raise _root_cause(ended)
    return [results[rank] for rank in range(len(pipes))]


def _ready(pipes: dict[Any, int], timeout: float | None = None) -> list[Any]:
    """The pipes with data."""
    return list(multiprocessing.connection.wait(list(pipes), timeout))


def _collect_late_failures(open_pipes: Any, processes: list[Any], results: Any, ended: dict[int, Exception]) -> None:
    """Wait briefly for other ranks: a broken connection may be noticed before the failure that caused it."""
    end = time.monotonic() + 0.5
    waiting = {pipe: rank for pipe, rank in open_pipes.items() if rank not in ended and rank not in results}
    while waiting and (left := end - time.monotonic()) > 0:
        for pipe in multiprocessing.connection.wait(list(waiting), timeout=left):
            rank = waiting[pipe]
            try:
                kind, value = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]  # noqa: S301  # our own rank
            except (EOFError, ConnectionResetError):
                kind, value = "death", None
            if kind == "event":
                continue
            del waiting[pipe]
            if kind == "error":
                ended[rank] = _failure(rank, value)
            elif kind == "death":
                processes[rank].join(GRACE)
                ended[rank] = _death(rank, processes[rank].exitcode)


def _root_cause(ended: dict[int, Exception]) -> Exception:
    """The failure that explains the others: death by a signal first, then other errors, then follow-up errors."""

    def weight(item: tuple[int, Exception]) -> tuple[int, int]:
        rank, e = item
        if isinstance(e, GaveUp):
            return (0 if "signal" in e.what else 2 if _is_follow_up(e) else 1), rank
        return 1, rank

    return min(ended.items(), key=weight)[1]


def _is_follow_up(e: GaveUp) -> bool:
    """Whether an error is a consequence of another rank's failure."""
    symptoms = (
        "Connection reset",
        "Connection closed",
        "Broken pipe",
        "connectFullMesh",
        "Timed out",
        "Socket",
        "which has died",
        "which has left",
    )
    return any(symptom in e.what for symptom in symptoms)


def _failure(rank: int, value: tuple[Any, str, str]) -> Exception:
    error, text, details = value
    if isinstance(error, DrumlineError):
        return error
    failed = GaveUp(f"rank {rank} failed: {text}", fix="DRUMLINE_DEBUG=1 shows its traceback")
    failed.__notes__ = [details]
    return failed


def _death(rank: int, code: int | None) -> GaveUp:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        more = "; the kernel ends processes so when memory runs out" if -code == signal.SIGKILL else ""
        return GaveUp(f"rank {rank} was ended by signal {name}{more}")
    return GaveUp(f"rank {rank} ended with exit code {code} before it was done")


def _terminate(processes: list[Any]) -> None:
    """Terminate processes that still run; kill those that do not end."""
    for process in processes:
        if process.is_alive():
            process.join(0.2)
        if process.is_alive():
            process.terminate()
    for process in processes:
        process.join(GRACE)
        if process.is_alive():
            process.kill()
            process.join()
        process.close()


def _rank_main(pipe: Any, payload: bytes, rank: int, ranks: int, threads: int, store: str) -> None:
    """The main function of a rank's process."""
    die_with_parent()
    _die_with_launcher()
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(ranks),
        DRUMLINE_STORE=store,
        GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS=str(threads),
    )
    import torch

    torch.set_num_threads(threads)
    code = 0
    try:
        function, arguments = pickle.loads(payload)  # noqa: S301  # from the process that started this one
        result = function(lambda record: _send(pipe, "event", record), *arguments)
        from ..comm.environment import disconnect

        disconnect()
        _send(pipe, "result", result)
    except BaseException as e:
        code = 1
        text = f"{type(e).__name__}: {(str(e).strip().splitlines() or [''])[0]}"
        _send(pipe, "error", (e if isinstance(e, DrumlineError) else None, text, traceback.format_exc()))
    finally:
        pipe.close()
        sys.stdout.flush()
        sys.stderr.flush()
        # Threads of the transport may outlive the group; at a normal exit they would abort the process.
        os._exit(code)


def _send(pipe: Any, kind: str, value: Any) -> None:
    """Send by value. The pipe's own `send` shares a tensor's memory, which is freed with this process."""
    pipe.send_bytes(pickle.dumps((kind, value)))


def die_with_parent() -> None:
    """On Linux, kill this process when its parent ends, so that a killed launcher leaves no orphans."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _die_with_launcher() -> None:
    """Kill this process when the launcher ends: the fork server, its parent, may outlive the launcher."""
    launcher = multiprocessing.parent_process()
    if launcher is None:
        return
    gone = launcher.sentinel

    def watch() -> None:
        multiprocessing.connection.wait([gone])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="launcher", daemon=True).start()


def _without_emit(emit: Emit, function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)
