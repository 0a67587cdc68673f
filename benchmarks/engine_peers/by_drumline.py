"""Drumline's engine, on gloo as the other contestants, and on its own `shm` backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from drumline.runtime.engine import initialize

from .work import KEPT, Step, Work


def make(work: Work) -> Step:
    engine = initialize(work.job, f"dp={dist.get_world_size()},zero={work.stage},backend=gloo")
    return lambda number: engine.step(work.batches[number % KEPT])


def make_shm(work: Work) -> Step:
    with _default_is(work.shm):
        engine = initialize(work.job, f"dp={dist.get_world_size()},zero={work.stage},backend=shm")
    return lambda number: engine.step(work.batches[number % KEPT])


@contextmanager
def _default_is(group: Any) -> Iterator[None]:
    """Swap the default group while the engine is built: it uses that group, and the other contestants need gloo."""
    module: Any = dist.distributed_c10d
    before = module._get_default_group()
    module._update_default_pg(group)
    try:
        yield
    finally:
        module._update_default_pg(before)
