"""Drumline's engine under the case's plan, on gloo as the code by hand, and on its own `shm` backend."""

from __future__ import annotations

from engine_peers.by_drumline import _default_is as default_is

from drumline.runtime.engine import initialize

from .work import KEPT, Step, Work


def make(work: Work) -> Step:
    """On gloo."""
    engine = initialize(work.job, f"{work.plan},backend=gloo")
    return lambda number: engine.step(work.batches[number % KEPT])


def make_shm(work: Work) -> Step:
    """On shm."""
    with default_is(work.shm):
        engine = initialize(work.job, f"{work.plan},backend=shm")
    return lambda number: engine.step(work.batches[number % KEPT])
