"""Runs functions on ranks that are processes of this machine, and notices when one of them dies. No port is opened.

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
import shutil
import signal
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..comm.parent_process import die_with_parent
from ..comm.rank_status import STATUS
from ..core.errors import InputError
from ..core.fork_server import fork_server
from ..core.rank_info import REPLACED
from ..core.streams import tolerate_failing_streams
from .failures import RankEnd, died, error_message, out_of_memory_kills, raised, root_cause
from .hang_watch import HangWatch, stack_path, status_path
from .payload import Payload, dumps_result, pack

GRACE = 5.0
"""Seconds that a rank may take to end by itself."""
GROUP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Sent by schedulers and terminals to all processes of a job."""
_LOOK = 0.25
"""Seconds between two looks at the ranks' progress."""
MOST_RANKS = 512

Emit = Callable[[dict[str, Any]], None]
"""Sends a small record from a running rank to the launcher."""
Replace = Callable[[RankEnd], Sequence[int]]
"""The ranks to restart after one has failed; none if its failure ends the run."""


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
    replace: Replace | None = None,
) -> list[Any]:
    """Run `function(emit, *arguments)` on local ranks. `on_event(rank, record)` receives the records they emit.

    A `watch` ends ranks that hang; the default ends them only when a rank waits for another that does not come. With
    `handles_signals`, TERM and USR1 stay blocked in the ranks until the function has its own handlers. `replace` says
    which ranks are restarted after one has failed, while the others go on; if it names none, the failure ends all.
    """
    if not 1 <= ranks <= MOST_RANKS:
        raise InputError(f"{ranks} ranks", rule=f"from 1 to {MOST_RANKS} ranks on one machine")
    payload = pack((function, arguments))
    context = fork_server()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch's C++ warnings are for torch developers
    threads = threads or max(1, (os.cpu_count() or 1) // ranks)
    with tempfile.TemporaryDirectory(prefix="drumline-", ignore_cleanup_errors=True) as folder:
        group = _RankProcesses(context, payload, ranks, threads, Path(folder), handles_signals)
        done = False
        try:
            for rank in range(ranks):
                group.start(rank)
            watch = watch or HangWatch(only_waits=True)
            watch.begin(Path(folder), group.pids)
            results = _Collection(group, on_event, watch, replace).run()
            done = True
            return results
        finally:
            group.end(wait=GRACE if done else 0.0)
            for pipe in group.pipes:
                pipe.close()


class _RankProcesses:
    """The processes of all ranks, and the pipes from them."""

    def __init__(
        self, context: Any, payload: Payload, ranks: int, threads: int, folder: Path, handles_signals: bool
    ) -> None:
        self._context, self._payload, self._threads = context, payload, threads
        self.folder, self._handles_signals, self.ranks = folder, handles_signals, ranks
        self.pipes: list[Any] = []
        self.processes: list[Any] = []
        self.replaced = [0] * ranks

    @property
    def pids(self) -> dict[int, int]:
        """The process of each rank."""
        return {rank: process.pid for rank, process in enumerate(self.processes)}

    def start(self, rank: int) -> None:
        """Start the process of a rank, the first one or another in its place."""
        receiver, sender = self._context.Pipe(duplex=False)
        place = (rank, self.ranks, self._threads, str(self.folder), multiprocessing.util.get_temp_dir())
        options = (self._handles_signals, self.replaced[rank])
        process = self._context.Process(target=_rank_main, args=(sender, self._payload, *place, *options), daemon=True)
        with _signals_blocked(), contextlib.nullcontext() if self._payload.needs_main else _without_main():
            process.start()
        if rank == len(self.processes):
            self.pipes.append(receiver)
            self.processes.append(process)
        else:
            self.pipes[rank], self.processes[rank] = receiver, process
        sender.close()

    def end(self, *, wait: float = 0.0) -> None:
        """End the processes of all ranks; their pipes stay open."""
        processes, self.processes = self.processes, []
        _end(processes, wait=wait)

    def left_in_pipe(self, rank: int) -> list[Any]:
        """The events that a rank has sent before its process ended, as far as they are whole."""
        pipe, values = self.pipes[rank], []
        os.set_blocking(pipe.fileno(), False)  # a process that left the rank's group may keep the other end open
        with contextlib.suppress(EOFError, OSError):
            while True:
                kind, value = pipe.recv()
                if kind == "event":
                    values.append(value)
        return values

    def restart(self, ranks: Sequence[int]) -> list[tuple[int, Any]]:
        """End the processes of some ranks and start others in their places; they share a count of replacements.

        Returns the events that the old processes had sent.
        """
        count = max(self.replaced[rank] for rank in ranks) + 1
        left = []
        for rank in ranks:
            _end([self.processes[rank]], wait=0.0)
            left += [(rank, value) for value in self.left_in_pipe(rank)]
            self.pipes[rank].close()
            stack_path(self.folder, rank).unlink(missing_ok=True)
            status_path(self.folder, rank).unlink(missing_ok=True)
            self.replaced[rank] = count
            self.start(rank)
        return left


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


class _Collection:
    """Waits for every rank's result, or for the first failure that ends all.

    Events that ranks had sent before they ended are delivered before the failure is raised: they report steps that a
    checkpoint may have, and that are not run again.
    """

    def __init__(self, group: _RankProcesses, on_event: Any, watch: HangWatch, replace: Replace | None) -> None:
        self._group, self._on_event, self._watch, self._replace = group, on_event, watch, replace
        self._results: dict[int, Any] = {}
        self._ends: list[RankEnd] = []
        self._waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(group.pipes)}
        self._deadline: float | None = None
        self._late: list[tuple[int, Any]] = []
        """Events that were read after a failure; delivering them may take long, and the cause is still to be found."""
        self._kills = out_of_memory_kills()

    def run(self) -> list[Any]:
        """The results by rank."""
        while self._waiting and (self._deadline is None or time.monotonic() < self._deadline):
            ready: list[Any] = multiprocessing.connection.wait(list(self._waiting), _LOOK)
            for pipe in ready:
                if pipe in self._waiting:
                    self._read(pipe)
            if self._ends and self._deadline is None and not self._replaced():
                # a broken connection may be noticed before the failure that caused it
                self._deadline = time.monotonic() + 0.5
            elif self._deadline is None and (report := self._watch.check()):
                failure = self._watch.failure(report)
                if failure.rank < 0 or not self._replaced(RankEnd(failure.rank, time.monotonic(), failure)):
                    self._end_and_deliver()
                    raise failure
        if self._ends:
            self._end_and_deliver()
            raise root_cause(self._ends)
        return [self._results[rank] for rank in range(self._group.ranks)]

    def _read(self, pipe: Any) -> None:
        """One message of a rank, or its end."""
        rank = self._waiting[pipe]
        try:
            kind, value = pipe.recv()
        except (EOFError, ConnectionResetError):
            del self._waiting[pipe]
            if rank not in self._results and all(end.rank != rank for end in self._ends):
                process = self._group.processes[rank]
                process.join(GRACE)
                ran_out = None if self._kills is None else out_of_memory_kills() != self._kills
                trace = _crash(self._group.folder, rank)
                self._ends.append(died(rank, process.exitcode, time.monotonic(), trace, memory_ran_out=ran_out))
            return
        if kind == "error":
            self._ends.append(raised(rank, value))
        elif kind == "result":
            self._results[rank] = value
        elif self._deadline is not None:
            self._late.append((rank, value))
        else:
            self._deliver([(rank, value)])

    def _deliver(self, events: Sequence[tuple[int, Any]]) -> None:
        if self._on_event is not None:
            for rank, value in events:
                self._on_event(rank, value)

    def _end_and_deliver(self) -> None:
        """End all ranks, and deliver what they had sent until then: at most what a pipe of each holds."""
        self._group.end()
        for rank in self._waiting.values():
            self._late += [(rank, value) for value in self._group.left_in_pipe(rank)]
        self._deliver(self._late)

    def _replaced(self, hang: RankEnd | None = None) -> bool:
        """Whether all ranks that have failed were replaced by new ones."""
        if self._replace is None:
            return False
        ends, self._ends = [hang] if hang else self._ends, []
        restarted: set[int] = set()
        for end in ends:
            ranks = self._replace(end)
            if not ranks:
                self._ends = list(ends)
                return False
            restarted |= set(ranks)
        self._waiting = {pipe: rank for pipe, rank in self._waiting.items() if rank not in restarted}
        left = self._group.restart(sorted(restarted))
        for rank in restarted:
            self._results.pop(rank, None)
            self._waiting[self._group.pipes[rank]] = rank
        self._watch.follow(self._group.pids)
        self._deliver(left)
        return True


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
    payload: Payload,
    rank: int,
    ranks: int,
    threads: int,
    folder: str,
    launcher_folder: str,
    handles_signals: bool,
    replaced: int,
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
            REPLACED: str(replaced),
        }
    )
    stacks = stack_path(Path(folder), rank).open("w")  # stays open: it is written to when this process crashes
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR2, stacks)
    import torch

    torch.set_num_threads(threads)
    code = 0
    try:
        function, arguments = payload.load()
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
    pipe.send_bytes(dumps_result((kind, value)))


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
