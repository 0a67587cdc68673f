"""Run functions on ranks that are processes of this machine, with a file store in a private folder: no port is opened.

Ranks are forked from a server process that has already imported torch, so a second start is cheap. If one rank fails,
the others are killed and its own error is raised, not the follow-up errors of its peers. A rank leads a process group
of its own, so whatever it has started ends with it.

Schedulers send TERM and USR1 to all processes of a job. The server and the ranks have these signals blocked: only the
launcher is stopped by them, unless the task of a rank handles them itself (training does).
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.connection
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..comm.parent_process import die_with_parent
from ..comm.rank_status import STATUS
from ..core.errors import InputError
from ..core.streams import tolerate_failing_streams
from .failures import RankEnd, died, error_message, out_of_memory_kills, raised, root_cause
from .hang_watch import HangWatch, stack_path, status_path

GRACE = 5.0
"""Seconds that a rank may take to end by itself."""
GROUP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Sent by schedulers and terminals to all processes of a job."""
_LOOK = 0.25
"""Seconds between two looks at the ranks' progress."""
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
    watch: HangWatch | None = None,
    handles_signals: bool = False,
) -> list[Any]:
    """Run `function(emit, *arguments)` on local ranks. `on_event(rank, record)` receives the records they emit.

    A `watch` ends ranks that hang. With `handles_signals`, TERM and USR1 stay blocked in the ranks until the function
    has its own handlers.
    """
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
    with tempfile.TemporaryDirectory(prefix="drumline-", ignore_cleanup_errors=True) as folder:
        pipes: list[Any] = []
        processes: list[Any] = []
        done = False
        try:
            for rank in range(ranks):
                receiver, sender = context.Pipe(duplex=False)
                pipes.append(receiver)
                place = (rank, ranks, threads, folder, multiprocessing.util.get_temp_dir(), handles_signals)
                process = context.Process(target=_rank_main, args=(sender, payload, *place), daemon=True)
                with _signals_blocked(), contextlib.nullcontext() if b"__main__" in payload else _without_main():
                    process.start()
                processes.append(process)
                sender.close()
            if watch is not None:
                watch.begin(Path(folder), {rank: process.pid for rank, process in enumerate(processes)})
            results = _collect(pipes, processes, on_event, watch, Path(folder))
            done = True
            return results
        finally:
            _end(processes, wait=GRACE if done else 0.0)
            for pipe in pipes:
                pipe.close()


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Start a process with signals for the whole job blocked. They stay pending here, none is lost."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
    multiprocessing.resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)  # again: starting the tracker unblocks SIGTERM
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Start a process that does not import the main script: one that needs nothing of it also needs no guard."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _collect(pipes: list[Any], processes: list[Any], on_event: Any, watch: HangWatch | None, folder: Path) -> list[Any]:
    """Wait for every rank's result, or for the first failure."""
    results: dict[int, Any] = {}
    ends: list[RankEnd] = []
    waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(pipes)}
    deadline: float | None = None
    kills = out_of_memory_kills()
    while waiting and (deadline is None or time.monotonic() < deadline):
        ready: list[Any] = multiprocessing.connection.wait(list(waiting), _LOOK if watch or deadline else None)
        for pipe in ready:
            rank = waiting[pipe]
            try:
                kind, value = pipe.recv()
            except (EOFError, ConnectionResetError):
                del waiting[pipe]
                if rank not in results and all(end.rank != rank for end in ends):
                    processes[rank].join(GRACE)
                    ran_out = None if kills is None else out_of_memory_kills() != kills
                    code, trace = processes[rank].exitcode, _crash(folder, rank)
                    ends.append(died(rank, code, time.monotonic(), trace, memory_ran_out=ran_out))
                continue
            if kind == "error":
                ends.append(raised(rank, value))
            elif kind == "result":
                results[rank] = value
            elif on_event is not None and deadline is None:
                on_event(rank, value)
        if ends and deadline is None:
            # a broken connection may be noticed before the failure that caused it
            deadline = time.monotonic() + 0.5
        elif watch is not None and deadline is None and (report := watch.check()):
            raise watch.failure(report)
    if ends:
        raise root_cause(ends)
    return [results[rank] for rank in range(len(pipes))]


def _crash(folder: Path, rank: int) -> str:
    """The stack that a rank wrote when it crashed."""
    try:
        return stack_path(folder, rank).read_text(errors="replace")
    except OSError:
        return ""


def _end(processes: list[Any], *, wait: float) -> None:
    """End all processes of all ranks: those that have results may first end by themselves."""
    end = time.monotonic() + wait
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)  # whatever the rank has started
        if process.is_alive():
            process.kill()
    for process in processes:
        process.join()
        process.close()


def _rank_main(
    pipe: Any,
    payload: bytes,
    rank: int,
    ranks: int,
    threads: int,
    folder: str,
    launcher_folder: str,
    handles_signals: bool,
) -> None:
    """The main function of a rank's process."""
    die_with_parent()
    tolerate_failing_streams()
    os.setpgid(0, 0)
    _die_with_launcher(folder, launcher_folder)
    if not handles_signals:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)
    os.environ.update(
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(ranks),
            "DRUMLINE_STORE": os.path.join(folder, "store"),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": str(threads),
            STATUS: str(status_path(Path(folder), rank)),
        }
    )
    stacks = stack_path(Path(folder), rank).open("w")  # stays open: it is written to when this process crashes
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR2, stacks)
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
        _send(pipe, "error", error_message(e, time.monotonic()))
    finally:
        pipe.close()
        sys.stdout.flush()
        sys.stderr.flush()
        # Threads of the transport may outlive the group; at a normal exit they would abort the process.
        os._exit(code)


def _send(pipe: Any, kind: str, value: Any) -> None:
    """Send by value. The pipe's own `send` shares a tensor's memory, which is freed with this process."""
    pipe.send_bytes(pickle.dumps((kind, value)))


def _die_with_launcher(*folders: str) -> None:
    """Kill this process and what it has started when the launcher ends, and remove the launcher's folders.

    The fork server, the parent of this process, may outlive the launcher.
    """
    launcher = multiprocessing.parent_process()
    if launcher is None:
        return
    gone = launcher.sentinel

    def watch() -> None:
        multiprocessing.connection.wait([gone])
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="launcher", daemon=True).start()


def _without_emit(emit: Emit, function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)
