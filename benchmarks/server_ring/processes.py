"""The processes of benchmarks/server_or_ring.py, each on a host, and commands that all execute at the same time.

They are forked from one process that has imported torch, and enter the network namespace of their host. They take
commands from a pipe, which does not use the network; a command names a common start time and a number of repeats.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import torch

from drumline.comm.parent_process import die_with_parent

from .roles import RingRank, VectorServer, VectorWorker

if TYPE_CHECKING:
    from netns import SwitchedHosts

TOGETHER = 0.03
"""Seconds allowed for a command to reach all processes."""


class HostProcess:
    """A process on a host."""

    def __init__(self, switch: SwitchedHosts, host: int, make: Callable[[], Any]) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, switch, host, make), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, name: str, *arguments: Any) -> None:
        """Call a method in the process; `answer` waits for its result."""
        self._pipe.send((name, arguments))

    def answer(self, seconds: float = 300.0) -> Any:
        """Wait for the result of the last call."""
        if not self._pipe.poll(seconds):
            raise RuntimeError(f"no answer within {seconds:.0f} s")
        good, result = self._pipe.recv()
        if not good:
            raise RuntimeError(result)
        return result

    def end(self) -> None:
        """Kill it: it has nothing to save."""
        self._process.kill()
        self._process.join()


def ask_all(processes: Sequence[HostProcess], name: str, *arguments: Any) -> list[Any]:
    """Call a method in several processes at once and return their results."""
    for process in processes:
        process.ask(name, *arguments)
    return [process.answer() for process in processes]


def seconds_of(
    processes: Sequence[HostProcess], action: str, *arguments: Any, times: int = 1, every: float = 0.0
) -> list[float]:
    """Time an action that all processes run at the same time, from the common start until the last one ends.

    It runs `times` times: every `every` seconds, or, if `every` is 0, back to back, and the mean is returned.
    """
    spans = ask_all(processes, "run", time.monotonic() + TOGETHER, times, every, action, *arguments)
    ends = [max(process[i][1] for process in spans) for i in range(times)]
    starts = [max(process[i][0] for process in spans) for i in range(times)]
    if not every:
        return [(ends[-1] - starts[0]) / times]
    return [end - start for start, end in zip(starts, ends, strict=True)]


def _serve(pipe: Connection, switch: SwitchedHosts, host: int, make: Callable[[], Any]) -> None:
    """Run a process: enter the host and execute commands from the pipe."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        switch.enter(host)
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        torch.set_num_threads(1)
        role = make()
        while True:
            name, arguments = pipe.recv()
            pipe.send((True, getattr(role, name)(*arguments)))
    except EOFError:
        pass
    except BaseException:
        pipe.send((False, traceback.format_exc()))


@contextmanager
def started(switch: SwitchedHosts, workers: int, servers: Sequence[int], sizes: Sequence[int]) -> Iterator[Processes]:
    """Start all processes: on each of the first hosts a rank of the ring and a worker, on the others the servers."""
    group = Processes()
    try:
        for i in range(workers):
            group.ring.append(HostProcess(switch, i, partial(RingRank, i, workers, switch.address(0))))
            group.workers.append(HostProcess(switch, i, partial(VectorWorker, i, workers)))
        for n in servers:
            first = switch.address(workers)
            group.servers[n] = []
            for j in range(n):
                group.servers[n].append(
                    HostProcess(switch, workers + j, partial(VectorServer, j, n, workers, first, sizes))
                )
        for n, mine in group.servers.items():
            addresses = ask_all(mine, "addresses")
            mine[0].ask("serve", addresses[1:])
            mine[0].answer()
            for size in sizes:
                ask_all(group.workers, "attach", n, size, [a[size] for a in addresses])
        ask_all(group.ring, "check")
        yield group
        for n in group.servers:
            for size in sizes:
                ask_all(group.workers, "check", n, size)
    finally:
        for process in group.all():
            process.end()


class Processes:
    """The processes of one measurement."""

    def __init__(self) -> None:
        self.ring: list[HostProcess] = []
        self.workers: list[HostProcess] = []
        self.servers: dict[int, list[HostProcess]] = {}
        """By number of servers."""

    def all(self) -> list[HostProcess]:
        """Every process."""
        return [*self.ring, *self.workers, *(s for mine in self.servers.values() for s in mine)]
