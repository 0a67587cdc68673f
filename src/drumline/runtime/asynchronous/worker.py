"""A worker: asks for a task, reads the weights, computes the gradient, sends it, and asks again.

It is an engine of one rank. Its parameters are views of flat vectors, so the weights arrive in one message per server.
If a server is gone, the worker waits for its successor and goes on there; what it was computing is lost.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from ...comm.rank_status import rank_status
from ...comm.remote_calls import CallClient, CallerGone, Values, connect_to_server
from ...core.errors import GaveUp
from ...datasets.stream import RankBatch
from ...schedules import GradientTask
from ..core.forward_backward import forward_backward
from ..engine import Engine
from ..strategies.server_shard import FlatLayout
from ..training.step_profiler import StepProfiler
from .task_streams import TaskStreams
from .worker_buffers import flat, most_bytes, put
from .worker_comparison import times_row

PATIENCE = 120.0
"""Seconds for which a worker waits for a server that is gone to come back."""
CONNECTIONS = 10
"""Connections that a worker may lose in a row, without delivering a gradient in between, before it gives up."""
WARM_UP = 2
"""Tasks of a worker before the one that is profiled."""

T = TypeVar("T")
Find = Callable[[int], str]
"""The address of a server."""


class TrainingOver(Exception):
    """The servers have ended: this worker has come back too late."""


class WorkerEngine(Engine):
    """An engine whose step sends the gradient to the servers instead of applying it."""

    def attach(self, worker: int, find: Find, servers: int) -> None:
        """Connect to the servers, and lay the parameters out in flat vectors."""
        self.worker, self._find = worker, find
        self.layout = FlatLayout.of(self.model, servers)
        self.weights = self.layout.vectors(self.device)
        self._host = self.weights if self.device.type == "cpu" else self.layout.vectors()
        """Where weights arrive: the parameters' own memory, where the device is the host."""
        self._gradients = self.layout.vectors()
        parameters = dict(self.model.named_parameters())
        self._parameters = [parameters[r.name] for r in self.layout.ranges]
        for r, p in zip(self.layout.ranges, self._parameters, strict=True):
            view = self.layout.of_dtype(self.weights, r).view(r.shape)
            view.copy_(p.detach())
            p.data = view
        self._gradient_views = [self.layout.of_dtype(self._gradients, r).view(r.shape) for r in self.layout.ranges]
        self._servers: list[CallClient] = []
        self._pool = ThreadPoolExecutor(max_workers=servers)
        self.versions: list[int] = []
        """Versions of the weights read last, by server: during an update, some may be newer than others."""
        self.task, self.number = GradientTask(0), -1
        """The task it computes, and the number of its assignment."""
        self.counted = self.dropped = 0
        self.ahead = 0
        """Batches that it loads ahead."""
        self.data_seconds: float | None = None
        """Seconds of loading the data of the current task; None while the worker warms up."""
        self.profiler = StepProfiler(self)
        self.greeting: Values = {}
        with contextlib.suppress(TrainingOver):  # the first task reports it
            self.connect()

    def connect(self) -> None:
        """Connect to all servers, again if they were gone, and join."""
        for old in self._servers:
            old.close()
        self._servers = []
        self._servers = [
            connect_to_server(lambda i=i: self._find(i), self.worker, patience=PATIENCE)  # type: ignore[misc]
            for i in range(self.layout.servers)
        ]
        changed = {"buffers": list(self.buffer_snapshot.changing())}  # a new server may begin before all of our steps
        most = most_bytes(self.layout, self.model)
        self.greeting, buffers = self._servers[0].call("join", changed, most_bytes=most)
        self._take_buffers(self.greeting["buffers"], buffers)

    # -- a task

    def next_task(self) -> Values:
        """Ask for the next task, and read the weights it is computed on; the first server's answer."""
        if not self._servers:
            raise CallerGone("the servers have ended")
        most = most_bytes(self.layout, self.model)
        into = [self.layout.shares(self._host, i) for i in range(self.layout.servers)]
        # one server sends the weights with the task; several send their shares at the same time
        alone = len(self._servers) == 1
        with self.record.phase("waiting"):
            answer, received = self._servers[0].call(
                "next",
                {"weights": alone, "epoch": self.greeting["epoch"], "ahead": self.ahead},
                into=into[0] if alone else (),
                most_bytes=most,
                on_sent=lambda: rank_status().phase("waiting"),
            )
        with self.phase("communication"):
            self.versions = [answer["version"]]
            if not alone:
                version = {"version": answer["version"]}
                pulled = self._call_all(lambda i, server: server.call("pull", version, into=into[i], most_bytes=most))
                self.versions = [read["version"] for read, _ in pulled]
            self._to_device()
        if answer["task"] is None:
            self._take_buffers(answer["buffers"], received[answer["vectors"] :])
        else:
            self.task, self.number = GradientTask(*answer["task"]), answer["number"]
        return answer

    def _call_all(self, call: Callable[[int, CallClient], T]) -> list[T]:
        """Call all servers at the same time; their answers."""
        futures = [self._pool.submit(call, i, server) for i, server in enumerate(self._servers)]
        return [future.result() for future in futures]

    @torch.no_grad()
    def _to_device(self) -> None:
        if self._host is not self.weights:
            for weights, host in zip(self.weights, self._host, strict=True):
                weights.copy_(host)

    def _take_buffers(self, names: Sequence[str], parts: Sequence[torch.Tensor]) -> None:
        put(self.model, dict(zip(names, parts, strict=True)))

    def step(self, batch: Any) -> float:
        """Compute the gradient of the current task and send it; returns this worker's mean loss."""
        assert isinstance(batch, RankBatch)
        self.position, self.data_index = self.task.step, self.task.slice
        rank_status().step(self.task.step)
        self.record.begin(self.task.step)
        self.buffer_snapshot.save()
        try:
            sums = forward_backward(self, batch)
            loss, weight, _, _ = self.read_numbers(sums.values)
            self.gradients_ready()
            with self.phase("communication"):
                unreached = self._collect_gradients()
                self._hand_in(batch, loss, weight, unreached)
        finally:  # also if the servers are gone: the next task must not add to this gradient
            self.strategy.drop_gradients()
            self.record.end()
        return loss / weight if weight else 0.0

    @torch.no_grad()
    def _collect_gradients(self) -> list[int]:
        """Copy the gradients to the flat vectors; the numbers of the parameters without one."""
        unreached = []
        for i, (p, view) in enumerate(zip(self._parameters, self._gradient_views, strict=True)):
            if p.grad is None:
                view.zero_()
                unreached.append(i)
            else:
                view.copy_(p.grad)
        return unreached

    def _hand_in(self, batch: RankBatch, loss: float, weight: float, unreached: list[int]) -> None:
        from ..training.step_reports import tokens

        key = {"number": self.number}
        shares, buffers = self._shares(), flat(self.buffer_snapshot.changing())
        alone = len(self._servers) == 1
        if not alone:
            self._call_all(lambda i, server: server.call("push", key, shares[i]))
        values = key | {
            "versions": self.versions,
            "loss": loss,
            "weight": weight,
            "samples": batch.samples,
            "own_samples": sum(micro.samples for micro in batch.micros),
            "tokens": tokens(batch) // self.task.slices,
            "unreached": unreached,
            "memory_bytes": self.memory_bytes(),
            "grad_norm": self.grad_norm,
            "vectors": len(shares[0]) if alone else 0,
            "pushed": not alone,
            "buffers": list(buffers),
            "times": [] if self.data_seconds is None else times_row(self.record.phase_seconds(), self.data_seconds),
        }
        sent = [*(shares[0] if alone else ()), *buffers.values()]
        answer, _ = self._servers[0].call("hand_in", values, sent)
        self.counted += answer["counts"]
        self.dropped += not answer["counts"]

    def _shares(self) -> list[list[torch.Tensor]]:
        """The gradient's vectors, as each server gets them."""
        return [self.layout.shares(self._gradients, i) for i in range(self.layout.servers)]

    def memory_bytes(self) -> float:
        """The peak of live tensors so far."""
        if self.device.type == "cuda":
            return float(torch.cuda.max_memory_allocated(self.device))
        return self.profiler.peak_bytes

    def leave(self) -> None:
        """Tell the coordinator that this worker is done."""
        with contextlib.suppress(CallerGone, IndexError):
            self._servers[0].call("leave")
        for server in self._servers:
            server.close()


def work(engine: WorkerEngine, emit: Callable[[dict[str, Any]], None], *, evaluate: bool) -> dict[str, Any]:
    """Compute tasks until there are none; the result in the form of a training's."""
    streams = TaskStreams(engine)
    engine.ahead = streams.ahead
    seconds: list[float] = []
    end, lost = None, 0
    with contextlib.closing(streams):
        while end is None:
            try:
                answer = engine.next_task()
                if answer["task"] is None:
                    end = answer
                    break
                start = time.perf_counter()
                with engine.phase("data"):
                    batch = streams.batch(engine.task, answer["ahead"])
                engine.data_seconds = time.perf_counter() - start if len(seconds) > WARM_UP else None
                engine.profiler.run(batch) if len(seconds) == WARM_UP else engine.step(batch)
                seconds.append(time.perf_counter() - start)
                lost = 0
            except CallerGone as e:
                lost += 1
                if lost == CONNECTIONS:
                    raise GaveUp(
                        f"worker {engine.worker} lost its connection {lost} times without a gradient in between",
                        rule=str(e),
                    ) from None
                emit({"message": f"worker {engine.worker} waits for a parameter server that is gone"})
                try:
                    engine.connect()
                except TrainingOver:
                    end = {"preempted": False, "step_seconds": 0.0, "data_seconds": 0.0, "accounts": {}}
    rank_status().place("ending")
    evaluation = engine.evaluate() if evaluate and engine.worker == 0 and not end["preempted"] else {}
    engine.leave()
    counted = max(0, len(seconds) - WARM_UP - 1)
    return _result(engine, end, evaluation) | {"counted": counted}


def _result(engine: WorkerEngine, end: Values, evaluation: dict[str, float]) -> dict[str, Any]:
    profiler = engine.profiler
    by_phase = [engine.record.phase_seconds(n) for n in engine.record.steps]
    names = dict.fromkeys(name for phases in by_phase for name in phases)
    phases = {name: statistics.median(p.get(name, 0.0) for p in by_phase) for name in names}
    return {
        "step_seconds": end["step_seconds"],
        "data_seconds": end["data_seconds"],
        "peak_bytes": profiler.peak_bytes,
        "parts": profiler.parts,
        "spans": profiler.spans,
        "probed": WARM_UP,
        "last": engine.record.spans(),
        "seconds_by_phase": phases,
        "own_by_phase": phases,
        "evaluation": evaluation,
        "preempted": end["preempted"],
        "save_stall": None,
        "device": engine.device.type,
        "division": None,
        "lanes": [],
        "accounts": end["accounts"] | {"computed": engine.counted + engine.dropped},
    }
