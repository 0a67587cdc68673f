"""Faults injected into a split model, each in one place, which `verify` must detect and name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import small_jobs
import torch
import torch.distributed as dist

from drumline.partition.sharding import halo_exchange
from drumline.partition.spatial import norm
from drumline.plans import Plan
from drumline.runtime.parallel import model_parallel as split_model
from drumline.runtime.parallel.graph_partition import GraphPartitioner
from drumline.runtime.verification import verify as verify_module
from drumline.runtime.verification.verify import verify


def run(fault: str, where: str, job: str, plan: str, changes: dict[str, Any]) -> Any:
    """On every rank: verify a job under a plan while something is wrong."""
    with FAULTS[fault](where):
        return verify(small_jobs.make(job, **changes), Plan.parse(plan), steps=2)


def run_beside_float64(fault: str, where: str, job: str, plan: str, changes: dict[str, Any]) -> Any:
    """The same, but the run in float64 is right: what the plan's own type alone shows."""
    made, compared = verify_module.initialize, verify_module._compare

    def initialize(*args: Any, dtype: Any = None) -> Any:
        with FAULTS[fault](where) if dtype is None else nullcontext():
            return made(*args, dtype=dtype)

    def compare(engine: Any, *rest: Any) -> Any:
        with FAULTS[fault](where) if engine.dtype is None else nullcontext():
            return compared(engine, *rest)

    with (
        mock.patch.object(verify_module, "initialize", initialize),
        mock.patch.object(verify_module, "_compare", compare),
    ):
        return verify(small_jobs.make(job, **changes), Plan.parse(plan), steps=2)


@contextmanager
def _wrapped(module: str, wrong: Callable[..., Any]) -> Iterator[None]:
    """While a rank's graph is made, what one module calls of ours is replaced; the reference runs no such graph."""
    plain = GraphPartitioner.partition

    def spread(self: Any, *args: Any, **named: Any) -> Any:
        made = plain(self, *args, **named)
        ours = [n for n in made.graph.nodes if n.meta.get("module") == module and n.op == "call_function"]
        ours = [n for n in ours if str(getattr(n.target, "__module__", "")).startswith("drumline.")]
        assert ours, f"nothing of {module} is split"
        for node in ours:
            node.target = functools.partial(wrong, node.target)
        return made

    with mock.patch.object(GraphPartitioner, "partition", spread):
        yield


def halo(module: str) -> Any:
    """Rows of others arrive as zeros."""
    plain = halo_exchange._HaloMessages.receive

    def wrong(target: Callable[..., Any], *args: Any, **named: Any) -> Any:
        with mock.patch.object(
            halo_exchange._HaloMessages, "receive", lambda m: tuple(map(torch.zeros_like, plain(m)))
        ):
            return target(*args, **named)

    return _wrapped(module, wrong)


def statistics(module: str) -> Any:
    """A norm uses the statistics of its own rank."""

    def wrong(target: Callable[..., Any], *args: Any, **named: Any) -> Any:
        with mock.patch.object(norm, "_all_gather", lambda table, axis: table.unsqueeze(0)):
            return target(*args, **named)

    return _wrapped(module, wrong)


def tied(_: str) -> Any:
    """A weight of two stages gets its own stage's gradient only."""
    return mock.patch.object(split_model, "sum_tied_gradients", lambda *_: None)


@contextmanager
def scale(where: str) -> Iterator[None]:
    """One rank's loss is 1% too large, or as much as is given after the rank."""
    plain = split_model.ModelParallel.train_stages
    rank, _, times = where.partition(":")

    def train(self: Any, micros: Any, factor: float, *rest: Any) -> Any:
        return plain(self, micros, factor * (float(times or 1.01) if dist.get_rank() == int(rank) else 1.0), *rest)

    with mock.patch.object(split_model.ModelParallel, "train_stages", train):
        yield


@contextmanager
def none(_: str) -> Iterator[None]:
    """Nothing is wrong."""
    yield


FAULTS = {"halo": halo, "statistics": statistics, "tied": tied, "scale": scale, "": none}
