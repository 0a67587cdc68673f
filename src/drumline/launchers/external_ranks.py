"""Run tasks on ranks that another launcher has started, this process among them.

Every rank runs the same command. The first rank runs the verb; where the verb starts ranks, the first rank sends the
task to the others and takes part in it. The others wait for tasks, run them, and send back events and results. In the
end they get the verb's result, or its error, which the first rank prints. All messages are JSON texts in the store.
"""

from __future__ import annotations

import atexit
import contextlib
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..comm.environment import disconnect
from ..comm.heartbeat import stop_heartbeat
from ..comm.hosts import host_id
from ..comm.parent_process import die_with_parent
from ..comm.rendezvous import default_timeout, shared_store
from ..core import errors
from ..core.errors import DrumlineError, GaveUp, InputError, LaunchedRankFailed, PlanError, RankFailed
from ..core.rank_info import RankInfo
from .channel import StoreChannel
from .early_signals import PreemptedEarly
from .failures import RankEnd, error_message, raised, root_cause
from .wire import decode, encode

_FOLLOW_UP = 1.0
"""Seconds in which the others report their failures, after one has failed."""
_FIRST_RANK = 10.0
"""Seconds in which the first rank reports the end, after another rank has failed."""
_LAST = 300.0
"""Seconds between the first rank's result of a task and that of the last rank."""
_LEAVE = 5.0
"""Seconds in which the others notice that the first rank leaves."""
_PREEMPTED = "preempted"
"""The text by which a rank says that it was asked to stop before the training."""
OWN = "$own"
"""In place of an argument: every rank takes its own, such as a job that exists only in memory."""

OnEvent = Callable[[int, dict[str, Any]], None]


class ExternalRanks:
    """The ranks of a job that another launcher has started, as one of them sees the others."""

    def __init__(self, where: RankInfo, launcher: str, store: dist.Store | None = None) -> None:
        self.rank, self.size, self.launcher = where.rank, where.size, launcher
        self.own: Any = None
        """What `OWN` stands for on this rank."""
        self.run_folder: Path | None = None
        """The folder of the run in progress; it keeps the measurement of its ranks."""
        self.task = ""
        """The task that this rank runs, by its name; empty between tasks."""
        if launcher == "torchrun":
            die_with_parent()
        if store is None:
            store = shared_store(where, default_timeout()) if where.size > 1 else dist.HashStore()
        self._channel = StoreChannel(dist.PrefixStore("joined", store))
        self._verbs = self._tasks = 0
        self._channel.put(f"host/{self.rank}", host_id())
        if self.rank == 0:
            atexit.register(self._leave)

    # -- the first rank -----------------------------------------------------------------------------------------------

    def run(self, function: Callable[..., Any], *arguments: Any, on_event: OnEvent | None) -> list[Any]:
        """Run `function(emit, *arguments)` on all ranks; the results by rank."""
        self._stop_if_preempted()
        self._tasks += 1
        task, self.task = self._tasks, function.__name__
        self._channel.put(f"task/{task}", encode({"name": function.__name__, "arguments": arguments}))

        def drain() -> None:
            for text in self._channel.unread(f"events/{task}"):
                rank, event = decode(text)
                if on_event is not None:
                    on_event(rank, event)

        def emit(event: dict[str, Any]) -> None:
            drain()
            if on_event is not None:
                on_event(0, event)

        results: dict[int, Any] = {}
        ends: list[RankEnd] = []
        try:
            results[0] = function(emit, *self._own(arguments))
            disconnect()
        except Exception as e:
            ends.append(raised(0, error_message(e, time.monotonic())))
            _break_group()
        self.task = ""
        self._collect(task, results, ends, drain)
        drain()
        if ends:
            self._stop_if_preempted()
            raise self._failure(ends)
        return [results[rank] for rank in range(self.size)]

    def _collect(self, task: int, results: dict[int, Any], ends: list[RankEnd], drain: Callable[[], None]) -> None:
        """Wait for the others: long for results, shortly once a rank has failed."""
        waiting = set(range(1, self.size))
        end = time.monotonic() + (_FOLLOW_UP if ends else _LAST)
        while waiting and time.monotonic() < end:
            for rank in [r for r in waiting if self._channel.has(f"end/{task}/{r}")]:
                waiting.remove(rank)
                message = decode(self._channel.get(f"end/{task}/{rank}"))
                if "result" in message:
                    results[rank] = message["result"]
                else:
                    if not ends:
                        end = time.monotonic() + _FOLLOW_UP
                    ends.append(RankEnd(rank, message["when"], _rebuild(message["error"]), message["follow_up"]))
            drain()
            self._stop_if_preempted()
            time.sleep(0.01)
        if waiting and not ends:
            what = f"ranks {sorted(waiting)} have not ended {_LAST:g} s after rank 0"
            ends.append(RankEnd(min(waiting), time.monotonic(), GaveUp(what)))

    def _failure(self, ends: list[RankEnd]) -> DrumlineError:
        """The root cause. Only the launcher can replace a rank, so it is no failure that a restart here repairs."""
        cause = root_cause(ends)
        if not isinstance(cause, RankFailed):
            return cause
        torchrun = self.launcher == "torchrun"
        more = "; torchrun --max-restarts N does, with --save-every and --resume auto" if torchrun else ""
        rule = f"{self.launcher} started the ranks, and only it can start them again{more}"
        made = LaunchedRankFailed(cause.what, rule=rule)
        made.trace = cause.trace
        return made

    def _stop_if_preempted(self) -> None:
        if self._channel.has(_PREEMPTED):
            raise PreemptedEarly

    def finish(self, outcome: Mapping[str, Any]) -> None:
        """Tell the others how the verb ended: `{"result": value}`, or `{"error": fields}`; with its name as `verb`."""
        self._verbs += 1
        self._channel.put(f"verb/{self._verbs}", encode(dict(outcome)))

    def _leave(self) -> None:
        """At the end of the process: the others may go, and have read everything if this process has the store."""
        with contextlib.suppress(RuntimeError):
            self._channel.put("left", "")
            end = time.monotonic() + _LEAVE
            while self._channel.count("gone", 0) < self.size - 1 and time.monotonic() < end:
                time.sleep(0.02)

    # -- the other ranks ----------------------------------------------------------------------------------------------

    def follow(self, tasks: Mapping[str, Callable[..., Any]], called: str = "") -> Any:
        """Run what the first rank sends, until its verb has ended; the verb's result. `called` is this rank's verb."""
        self._verbs += 1
        verb, failure = f"verb/{self._verbs}", None
        while True:
            task = f"task/{self._tasks + 1}"
            name = self._channel.wait(_PREEMPTED, verb, task, seconds=_FIRST_RANK if failure else None)
            if name == _PREEMPTED:
                raise PreemptedEarly
            if name == task:
                self._tasks += 1
                failure = self._run_task(decode(self._channel.get(task)), tasks)
                continue
            if not name:
                assert failure is not None
                raise failure
            message = decode(self._channel.get(verb))
            if (theirs := message.get("verb", called)) != called:
                raise InputError(
                    f"rank {self.rank} called {called}, and rank 0 {theirs}",
                    rule="under a launcher all ranks call the same verbs in the same order, and each runs once",
                )
            if "result" in message:
                self._go()
                return message["result"]
            error = _rebuild(message["error"])
            error.silent = True
            # the launcher ends all ranks when the first one fails, and rank 0 has something to print
            self._channel.wait("left", seconds=_LEAVE)
            self._go()
            raise error

    def _run_task(self, message: dict[str, Any], tasks: Mapping[str, Callable[..., Any]]) -> DrumlineError | None:
        """Run one task and send its end; the error if it failed."""
        number, self.task = self._tasks, message["name"]

        def emit(event: dict[str, Any]) -> None:
            self._channel.append(f"events/{number}", encode((self.rank, event)))

        failed: RankEnd | None = None
        try:
            result = tasks[message["name"]](emit, *self._own(message["arguments"]))
            disconnect()
            end = {"result": result}
        except Exception as e:
            failed = raised(self.rank, error_message(e, time.monotonic()))
            end = {"error": error_fields(failed.error), "when": failed.when, "follow_up": failed.follow_up}
        self.task = ""
        try:
            self._channel.put(f"end/{number}/{self.rank}", encode(end))
        except RuntimeError:  # the store was in the process of the first rank, which is gone
            return failed.error if failed else GaveUp("the first rank is gone")
        if failed:
            _break_group()
        return failed.error if failed else None

    def preempted(self) -> None:
        """This rank goes, because one of them was asked to stop before the training: say so, and release the others."""
        with contextlib.suppress(RuntimeError):  # the store is gone, and its rank with it
            self._channel.put(_PREEMPTED, "")
        _break_group()
        if self.rank > 0:
            self._go()

    def _go(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._channel.count("gone")

    def _own(self, arguments: tuple[Any, ...]) -> list[Any]:
        return [self.own if isinstance(a, str) and a == OWN else a for a in arguments]

    @cached_property
    def hosts(self) -> int:
        """Number of hosts that the ranks are on."""
        for rank in range(self.size):
            self._channel.wait(f"host/{rank}")
        return len({self._channel.get(f"host/{rank}") for rank in range(self.size)})

    # -- checks -------------------------------------------------------------------------------------------------------

    def check_size(self, what: str, ranks: int) -> None:
        """Refuse a number of ranks that is not the launcher's."""
        if ranks != self.size:
            raise PlanError(
                f"{what} needs {ranks} rank{'s' if ranks > 1 else ''}, but {self.launcher} started {self.size}",
                rule="every rank of the launcher takes part, and no other is started",
                fix=f"start {ranks} with {self.launcher}, or choose a plan for {self.size}",
            )


def _break_group() -> None:
    """Leave the process group without a word, so that ranks which wait for this one get an error."""
    stop_heartbeat()
    if dist.is_initialized():
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


def error_fields(error: BaseException) -> dict[str, str]:
    """An error as plain fields."""
    if isinstance(error, DrumlineError):
        kind, where, rule, fix = type(error).__name__, error.where, error.rule, error.fix
        trace = getattr(error, "trace", "")
        return {"kind": kind, "what": error.what, "where": where, "rule": rule, "fix": fix, "trace": trace}
    text = (str(error).strip().splitlines() or [""])[0]
    return {"kind": "GaveUp", "what": f"rank 0 failed: {type(error).__name__}: {text}"}


def _rebuild(fields: dict[str, str]) -> DrumlineError:
    """The error of plain fields: of our error tree, whatever was sent."""
    cls = getattr(errors, fields.get("kind", ""), GaveUp)
    known = isinstance(cls, type) and issubclass(cls, DrumlineError)
    made: DrumlineError = (cls if known else GaveUp)(
        fields["what"], where=fields.get("where", ""), rule=fields.get("rule", ""), fix=fields.get("fix", "")
    )
    if isinstance(made, RankFailed | LaunchedRankFailed):
        made.trace = fields.get("trace", "")
    return made
