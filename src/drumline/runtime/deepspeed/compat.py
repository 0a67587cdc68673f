"""The ways in: `initialize(job, plan)`, and `initialize(model=, optimizer=, data=, config=)`, as DeepSpeed has it.

The second takes what the user has made already, and returns (engine, optimizer, loader, scheduler). The first rank's
weights are sent to all, so that they start equal.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import default_collate

from ...comm.environment import connect, device_of
from ...core.errors import JobError, PlanError
from ...core.job import Job, guard
from ...datasets.loader import Loader
from ...datasets.stream import Batch, Micro, Stream, check_dataset, split
from ...plans import Plan
from ...plans.deepspeed import Imported, read
from .. import engine as core
from ..engine import Engine
from ..given import Absent, Given, GivenOptimizer, GivenScheduler, NoData
from ..guards.guard import Guards
from ..learning_rates.deepspeed_rates import named_curve
from ..scaler import LossScale
from .named_optimizer import named_optimizer
from .triple import Triple

Made = tuple[Triple, torch.optim.Optimizer, "MicroLoader | None", Any]
Config = str | Path | Mapping[str, Any]

_LOG = logging.getLogger("drumline")


@overload
def initialize(
    job: Job,
    plan: Plan | str | None = None,
    *,
    dtype: torch.dtype | None = None,
    threads: int | None = None,
    guards: Guards | None = None,
) -> Engine: ...


@overload
def initialize(
    job: None = None,
    plan: Plan | str | None = None,
    *,
    model: nn.Module,
    optimizer: Any = None,
    data: Any = None,
    config: Config | None = None,
    loss: Callable[..., Any] | None = None,
    scheduler: Any = None,
    collate: Callable[[list[Any]], Any] | None = None,
    steps: int | None = None,
    seed: int = 0,
    workers: int = 0,
    dtype: torch.dtype | None = None,
    threads: int | None = None,
    guards: Guards | None = None,
) -> Made: ...


def initialize(
    job: Job | None = None,
    plan: Plan | str | None = None,
    *,
    model: nn.Module | None = None,
    optimizer: Any = None,
    data: Any = None,
    config: Config | None = None,
    loss: Callable[..., Any] | None = None,
    scheduler: Any = None,
    collate: Callable[[list[Any]], Any] | None = None,
    steps: int | None = None,
    seed: int = 0,
    workers: int = 0,
    dtype: torch.dtype | None = None,
    threads: int | None = None,
    guards: Guards | None = None,
) -> Engine | Made:
    """Set training up on this rank: under `drumline run`, torchrun, srun or mpiexec, in `dl.spawn`, or all alone.

    Either a job, and the plan to run it under: gives the engine. Or a model that was made already, with a DeepSpeed
    config (or a plan): gives (engine, optimizer, loader, scheduler). There, `optimizer` and `scheduler` are instances,
    functions that make one, or left to the config; `data` is a map-style dataset, or left out where the loop brings its
    own batches; `loss` is needed only by `engine.engine.step(batch)`; `steps` is the length of the run, for schedules
    that need it and a config that leaves it open. `guards` say what happens when a number is not finite.
    """
    if job is not None:
        given = (model, optimizer, data, config, loss, scheduler, collate)
        if not isinstance(job, Job) or any(value is not None for value in given):
            raise JobError(
                f"initialize({type(job).__name__}, ...) with parts of a job beside it"
                if isinstance(job, Job)
                else f"initialize() was given a {type(job).__name__} for a job",
                rule="either initialize(job, plan), or initialize(model=, optimizer=, data=, config=)",
            )
        return core.initialize(job, plan, dtype=dtype, threads=threads, guards=guards)
    if not isinstance(model, nn.Module):
        raise JobError(f"initialize(model={type(model).__name__})", rule="model is a torch.nn.Module")
    imported = _imported(config, plan)
    _refuse_split_models(imported.plan)
    where = "the config" if isinstance(config, Mapping) or config is None else str(config)
    _say(imported)
    made = _job(imported, where, model, optimizer, data, loss, scheduler, collate, steps, seed, workers)
    _send_weights(model)
    engine = core.initialize(made, imported.plan, dtype=dtype, threads=threads, guards=guards)
    _set_scale(engine, imported)
    triple = Triple(engine, imported)
    loader = None if data is None else MicroLoader(triple)
    return triple, engine.optimizer, loader, engine.schedule


def _imported(config: Config | None, plan: Plan | str | None) -> Imported:
    """What the config asks for; without one, the plan; without both, every rank is a replica."""
    if config is not None and plan is not None:
        raise JobError("initialize() was given a config and a plan", rule="a config says how to split: one of the two")
    if config is not None:
        return read(config, connect().size)
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    return Imported(plan or Plan(dp=connect().size))


def _refuse_split_models(plan: Plan) -> None:
    """The loop calls the model itself, and a plan that splits it has no model to call."""
    if plan.pp > 1:
        what, rule = (
            f"pp={plan.pp}",
            ("a pipeline runs the forwards and backwards of many micro-batches interleaved, which a loop cannot"),
        )
    else:
        rows, columns = plan.tile
        sizes = {"tp": plan.tp, "cp": plan.cp, "ep": plan.ep, "tile": rows * columns}
        words = {"tile": f"tile={rows}x{columns}"}
        what = ", ".join(words.get(key, f"{key}={n}") for key, n in sizes.items() if n > 1)
        rule = "a plan that splits the model runs model and loss as one graph of operators, and a loop has its own loss"
    if what:
        raise PlanError(
            f"forward, backward and step, one by one, with {what}",
            where=f"plan {plan}",
            rule=rule,
            fix="write a Job, and call engine.step(batch): it does the same under every plan",
        )


def _say(imported: Imported) -> None:
    """No key is dropped in silence: what has no effect is told, what is unknown is warned of; by one rank."""
    if connect().rank:
        return
    for key, near in imported.unknown.items():
        _LOG.warning("config: unknown key %s. %s", key, near)
    for key, reason in imported.ignored.items():
        changes = "the result will differ" in reason
        _LOG.log(logging.WARNING if changes else logging.INFO, "config: %s has no effect: %s", key, reason)
    for note in imported.notes:
        _LOG.info("config: %s", note)
    if imported.auto:
        _LOG.info("config: left to Drumline: %s", ", ".join(imported.auto))


def _job(
    imported: Imported,
    where: str,
    model: nn.Module,
    optimizer: Any,
    data: Any,
    loss: Any,
    scheduler: Any,
    collate: Any,
    steps: int | None,
    seed: int,
    workers: int,
) -> Job:
    """The job that has these parts."""
    plan = imported.plan
    if optimizer is None:
        if imported.optimizer is None:
            raise JobError(
                "there is no optimizer", where=where, fix="initialize(optimizer=...), or `optimizer` in the config"
            )
        optimizer = named_optimizer(imported.optimizer, where)
    elif isinstance(optimizer, torch.optim.Optimizer):
        optimizer = GivenOptimizer(optimizer, model)
    if scheduler is None and imported.schedule is not None:
        scheduler = named_curve(imported.schedule.kind, imported.schedule.params, f"{where}: scheduler", steps)
    elif isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise JobError(
            "ReduceLROnPlateau cannot be stepped by the engine",
            rule="it wants a metric; the others want a step alone",
            fix="leave scheduler= away, make it on the optimizer that initialize returns, and step it yourself",
        )
    elif scheduler is not None and hasattr(scheduler, "step"):
        scheduler = GivenScheduler(scheduler)
    if data is not None and imported.batch_size is None:
        raise JobError(
            "the size of a batch is not known",
            where=where,
            fix="train_batch_size or train_micro_batch_size_per_gpu in the config; without data= it is your loop's",
        )
    dataset = NoData() if data is None else check_dataset(data)
    return Job(
        model=Given(model),
        loss=loss or Absent("loss"),
        optimizer=optimizer,
        data=lambda: dataset,
        batch_size=imported.batch_size or plan.micro * plan.dp,
        schedule=scheduler,
        clip=imported.clip,
        seed=seed,
        collate=collate,
        workers=workers,
        steps=steps or 100,
    )


@torch.no_grad()
def _send_weights(model: nn.Module) -> None:
    """The first rank's parameters and buffers, to all."""
    where = connect()
    if where.size == 1:
        return
    model.to(device_of(where))
    for tensor in (*model.parameters(), *model.buffers()):
        whole = tensor.detach().contiguous()
        dist.broadcast(whole, src=0)
        tensor.copy_(whole)


def _set_scale(engine: Engine, imported: Imported) -> None:
    """The scale of fp16 losses, as the config has it."""
    wanted = imported.loss_scale
    if engine.scaler is None or wanted is None:
        return
    scale = wanted.fixed or 2.0**wanted.power
    window = wanted.window if not wanted.fixed else 2**62  # one that is fixed never grows
    engine.scaler = LossScale(scale=scale, window=window, least=min(scale, wanted.least))


class MicroLoader:
    """This rank's micro-batches, as the collate function makes them. Iterating goes to the end of the epoch.

    Every batch has all its micro-batches, and every rank its share of each: where a ragged last batch has too few
    samples, its first is repeated, as a DistributedSampler would. The order is a function of (seed, epoch, step) alone,
    and begins where training stands, also after a restart.
    """

    def __init__(self, triple: Triple) -> None:
        engine = triple.engine
        self._triple = triple
        self._drop = triple.imported.drop_last
        self._stream = _Even(
            engine.job, engine.stream.dataset, dp=engine.ranks, index=engine.rank, micro=engine.plan.micro
        )
        if not self._steps:
            raise JobError(
                f"{len(engine.stream.dataset)} samples for batches of {engine.job.batch_size}",
                rule="dataloader_drop_last leaves out the last batch, and there is no other",
            )

    @property
    def _steps(self) -> int:
        """Batches of an epoch that are run."""
        whole = len(self._stream.dataset) // self._stream.job.batch_size
        return whole if self._drop else self._stream.steps_per_epoch

    def __len__(self) -> int:
        return self._steps * self._stream.micro

    def __iter__(self) -> Iterator[Any]:
        engine = self._triple.engine
        epoch, place = divmod(engine.position, self._steps)
        pin = engine.device.type == "cuda"
        with Loader(self._stream, workers=engine.job.workers, pin=pin) as loader:
            for at in range(place, self._steps):
                with engine.phase("data"):
                    batch = loader.batch(epoch * self._stream.steps_per_epoch + at)
                for micro in batch.micros:
                    yield micro.input


class _Even(Stream):
    """Cuts every batch into all its micro-batches, with at least one sample for every rank."""

    def cut(self, samples: Sequence[int], step: int) -> Batch:
        micros = []
        for part in split(len(samples), self.micro):
            part = part or range(1)
            mine = split(len(part), self.dp)[self.index] or range(1)
            chosen = [self._sample(samples[part[i]]) for i in mine]
            made = guard(self.job.collate or default_collate, "collating samples", chosen)
            micros.append(Micro(made, None, len(chosen), len(part)))
        return Batch(step, tuple(micros), len(samples))
