"""Ranks as processes of this machine. They meet through a file in a private folder: no port is opened.

The ranks are forked from one server process that has imported torch already, so a second start costs little. When one
rank fails, the others are ended and its own error is raised, not the noise of its peers.
"""

from __future__ import annotations

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
from collections.abc import Callable
from typing import Any

from ..core.errors import DrumlineError, GaveUp, InputError

GRACE = 5.0
"""Seconds between asking a rank to end and ending it."""
_LARGEST = 512

Emit = Callable[[dict[str, Any]], None]
"""Sends a small record from a rank to the launcher while it runs."""


def spawn(function: Callable[..., Any], *arguments: Any, ranks: int = 2) -> list[Any]:
    """Run `function(*arguments)` on `ranks` local ranks; what each returned, in the order of ranks."""
    return run_ranks(_plain, function, *arguments, ranks=ranks)


def run_ranks(
    function: Callable[..., Any],
    *arguments: Any,
    ranks: int,
    threads: int | None = None,
    on_event: Callable[[int, dict[str, Any]], None] | None = None,
) -> list[Any]:
    """Run `function(emit, *arguments)` on local ranks. `on_event(rank, record)` gets what they emit meanwhile."""
    if not 1 <= ranks <= _LARGEST:
        raise InputError(f"{ranks} ranks", rule=f"from 1 to {_LARGEST} ranks on one machine")
    try:
        order = pickle.dumps((function, arguments))
    except Exception as e:
        raise InputError(
            f"the function or its arguments cannot be sent to ranks: {e}",
            rule="the function stands at the top level of a module, and what it is given can be pickled",
        ) from None
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["drumline.runtime.preload"])
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # its warnings are for those who write torch
    threads = threads or max(1, (os.cpu_count() or 1) // ranks)
    with tempfile.TemporaryDirectory(prefix="drumline-") as folder:
        store = os.path.join(folder, "store")
        pipes: list[Any] = []
        processes: list[Any] = []
        try:
            for rank in range(ranks):
                here, there = context.Pipe(duplex=False)
                pipes.append(here)
                process = context.Process(
                    target=_rank_main, args=(there, order, rank, ranks, threads, store), daemon=True
                )
                process.start()
                processes.append(process)
                there.close()
            return _collect(pipes, processes, on_event)
        finally:
            _end(processes)
            for pipe in pipes:
                pipe.close()


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
            _wait_briefly(open_pipes, processes, results, ended)
            raise _first(ended)
    return [results[rank] for rank in range(len(pipes))]


def _ready(pipes: dict[Any, int], timeout: float | None = None) -> list[Any]:
    """The pipes that have something to say."""
    return list(multiprocessing.connection.wait(list(pipes), timeout))


def _wait_briefly(open_pipes: Any, processes: list[Any], results: Any, ended: dict[int, Exception]) -> None:
    """A broken connection may be seen before the failure that caused it: listen to the others a moment longer."""
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


def _first(ended: dict[int, Exception]) -> Exception:
    """The failure that explains the others: a death by a signal, then what the user can mend, then the rest."""

    def weight(item: tuple[int, Exception]) -> tuple[int, int]:
        rank, e = item
        if isinstance(e, GaveUp):
            return (0 if "signal" in e.what else 2 if _is_noise(e) else 1), rank
        return 1, rank

    return min(ended.items(), key=weight)[1]


def _is_noise(e: GaveUp) -> bool:
    words = (
        "Connection reset",
        "Connection closed",
        "Broken pipe",
        "connectFullMesh",
        "Timed out",
        "Socket",
        "which has died",
        "which has left",
    )
    return any(w in e.what for w in words)


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


def _end(processes: list[Any]) -> None:
    """End what still runs: ask, wait, then insist. By process, never by name."""
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


def _rank_main(pipe: Any, order: bytes, rank: int, ranks: int, threads: int, store: str) -> None:
    """The life of one rank."""
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
        function, arguments = pickle.loads(order)  # noqa: S301  # from the process that started this one
        result = function(lambda record: _post(pipe, "event", record), *arguments)
        from ..comm.environment import disconnect

        disconnect()
        _post(pipe, "result", result)
    except BaseException as e:
        code = 1
        text = f"{type(e).__name__}: {(str(e).strip().splitlines() or [''])[0]}"
        _post(pipe, "error", (e if isinstance(e, DrumlineError) else None, text, traceback.format_exc()))
    finally:
        pipe.close()
        sys.stdout.flush()
        sys.stderr.flush()
        # Threads of the transport may outlive the group; at a normal exit they abort the process.
        os._exit(code)


def _post(pipe: Any, kind: str, value: Any) -> None:
    """Send by value. A pipe's own `send` shares a tensor's memory, which ends with this process."""
    pipe.send_bytes(pickle.dumps((kind, value)))


def die_with_parent() -> None:
    """Linux: end this process when the one that forked it ends, so that a killed launcher leaves no orphans."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _die_with_launcher() -> None:
    """The server that forked this rank lives as long as any of them does: so the launcher is watched, too."""
    launcher = multiprocessing.parent_process()
    if launcher is None:
        return
    gone = launcher.sentinel

    def watch() -> None:
        multiprocessing.connection.wait([gone])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="launcher", daemon=True).start()


def _plain(emit: Emit, function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)
