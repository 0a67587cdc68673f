"""Functions that processes of plans with a coordinator run in tests; they are pickled by name."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import small_jobs
import torch

from drumline.comm.environment import connect
from drumline.comm.remote_calls import CallerGone
from drumline.core.errors import GaveUp
from drumline.core.rank_info import RankInfo
from drumline.plans import Plan
from drumline.runtime.asynchronous import server, worker
from drumline.runtime.asynchronous.task_streams import TaskStreams
from drumline.runtime.asynchronous.verification import verify_coordinated
from drumline.runtime.asynchronous.worker import WorkerEngine
from drumline.runtime.engine import Engine
from drumline.runtime.verification.verify import Verification

Cell = tuple[str, str]
"""A job and a plan."""


def verify_cells(emit: Any, cells: list[Cell], steps: int) -> list[Verification | None]:
    """Verify plans one after the other, on the same processes."""
    return [
        verify_coordinated(small_jobs.make(job), Plan.parse(plan), steps=steps, first_round=2 * i)
        for i, (job, plan) in enumerate(cells)
    ]


def verify_broken(emit: Any, plan: str, steps: int) -> Verification | None:
    """Verify a plan whose servers make a small mistake: they add a little to every element."""
    server._weighted_sum = _plain_sum
    return verify_coordinated(small_jobs.make("masked"), Plan.parse(plan), steps=steps)


def _plain_sum(gradients: list[list[torch.Tensor]], weights: Any) -> list[torch.Tensor]:
    return [torch.stack(list(column)).sum(0) + 1e-3 for column in zip(*gradients, strict=True)]


class FailingServer:
    """In place of a connection: the second gradient finds no server, the others are kept."""

    def __init__(self) -> None:
        self.gradients: list[list[torch.Tensor]] = []
        self._calls = 0

    def call(
        self, name: str, values: Any = None, tensors: Any = (), **options: Any
    ) -> tuple[dict[str, Any], list[Any]]:
        """Answer a worker."""
        if name == "hand_in":
            self._calls += 1
            if self._calls == 2:
                raise CallerGone("the server is gone")
            self.gradients.append([t.clone() for t in tensors])
        return {
            "counts": True,
            "epoch": 1,
            "buffers": [],
            "task": [0, 0, 1],
            "number": 0,
            "version": 0,
            "ahead": [],
        }, []

    def close(self) -> None:
        """Nothing to close."""


class ClosingServer(FailingServer):
    """In place of a connection: every gradient ends it."""

    def call(
        self, name: str, values: Any = None, tensors: Any = (), **options: Any
    ) -> tuple[dict[str, Any], list[Any]]:
        """Answer a worker."""
        if name == "hand_in":
            raise CallerGone("the connection was closed")
        return super().call(name, values, tensors, **options)


def shares_of_lost_workers(emit: Any) -> tuple[list[list[int]], str]:
    """The gradients that a server without the coordinator keeps, after each event; and how a wait for the first ends."""
    connect(part=RankInfo())
    plan = Plan.parse("dp=1,sync=server")
    engine = Engine(small_jobs.make("mlp"), plan, where=RankInfo(), device=torch.device("cpu"), dtype=None)
    other = server.ParameterServer(engine, index=1, local=True, checkpoints=None)
    shares = lambda: [torch.zeros_like(w) for w in other.shard.weights]  # noqa: E731  # short
    kept = []
    for number in (0, 1):
        other.answer(0, "push", {"number": number}, shares())
        kept.append(sorted(other._pushed))
    update = {"number": 0, "step": 0, "gradients": [1], "weights": [1.0], "factor": 1.0, "loss": 0.0}
    other.answer(-1, "update", {**update, "unreached": [], "workers": [0], "void": [0, 2]}, [])
    kept.append(sorted(other._pushed))
    other.answer(0, "push", {"number": 2}, shares())  # it was on its way
    kept.append(sorted(other._pushed))
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(
            other.answer, -1, "update", {**update, "gradients": [3], "unreached": [], "workers": [0]}, []
        )
        other.lost(-1)
        ending = repr(waiting.exception(20))
    other.calls.close()
    return kept, ending


def attached(server: FailingServer) -> WorkerEngine:
    """A worker of a server that is not there."""
    connect(part=RankInfo())
    job, plan, cpu = small_jobs.make("mlp"), Plan.parse("dp=1"), torch.device("cpu")
    engine = WorkerEngine(job, plan, where=RankInfo(), device=cpu, dtype=torch.float64)
    with mock.patch.object(worker, "connect_to_server", lambda *_, **__: server):
        engine.attach(0, lambda _: "", 1)
    return engine


def work_without_end(emit: Any) -> tuple[str, int]:
    """Run a worker that loses its connection with every gradient; returns its end and how often it reported waiting."""
    engine, notes = attached(ClosingServer()), []
    with mock.patch.object(worker, "connect_to_server", lambda *_, **__: ClosingServer()):
        try:
            worker.work(engine, notes.append, evaluate=False)
        except GaveUp as e:
            return str(e), len(notes)
    return "no error", len(notes)


def gradients_after_lost_servers(emit: Any, profiled: bool) -> list[list[torch.Tensor]]:
    """The gradient of one task, computed three times; the second time there is no server that takes it."""
    failing = FailingServer()
    engine = attached(failing)
    batch = TaskStreams(engine).batch(engine.task)
    run = engine.profiler.run if profiled else engine.step
    run(batch)
    try:
        run(batch)
        raise AssertionError("the server is there")
    except CallerGone:
        run(batch)
    return failing.gradients
