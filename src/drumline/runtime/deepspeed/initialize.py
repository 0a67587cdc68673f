"""The two entry points: `initialize(job, plan)`, and DeepSpeed's `initialize(model=, optimizer=, data=, config=)`.

The second takes objects that the user built, and returns (engine, optimizer, loader, scheduler). The first rank's
weights are broadcast, so that all ranks start equal.
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
from ...core.job import Job, call_user_code
from ...datasets.loader import Loader
from ...datasets.sources import check_dataset
from ...datasets.stream import RankBatch, RankMicroBatch, Stream, split_range
from ...interop.deepspeed import read
from ...interop.imported import ImportedConfig
from ...plans import Plan
from .. import engine as core
from ..engine import Engine
from ..guards.guard import Guards
from ..numerics.loss_scale import LossScale
from ..state.prebuilt import MissingArgument, NoDataset, PrebuiltModel, PrebuiltOptimizer, PrebuiltScheduler
from .engine import DeepSpeedEngine
from .optimizers import named_optimizer
from .schedulers import named_scheduler

DeepSpeedResult = tuple[DeepSpeedEngine, torch.optim.Optimizer, "MicroBatchLoader | None", Any]
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
) -> DeepSpeedResult: ...


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
) -> Engine | DeepSpeedResult:
    """Set up training on this rank: under `drumline run`, torchrun, srun or mpiexec, in `dl.spawn`, or in one process.

    With a job and a plan, returns the engine. With a model instance and a DeepSpeed config (or a plan), returns
    (engine, optimizer, loader, scheduler). There, `optimizer` and `scheduler` are instances, factory functions, or left
    to the config; `data` is a map-style dataset, or omitted if the loop has its own batches; `loss` is needed only by
    `engine.engine.step(batch)`; `steps` is the length of the run, for schedules that need it and a config that leaves
    it open. `guards` configure the handling of non-finite numbers.
    """
    if job is not None:
        given = (model, optimizer, data, config, loss, scheduler, collate)
        if not isinstance(job, Job) or any(value is not None for value in given):
            raise JobError(
                f"initialize({type(job).__name__}, ...) with parts of a job as well"
                if isinstance(job, Job)
                else f"initialize() got a {type(job).__name__} instead of a job",
                rule="either initialize(job, plan), or initialize(model=, optimizer=, data=, config=)",
            )
        return core.initialize(job, plan, dtype=dtype, threads=threads, guards=guards)
    if not isinstance(model, nn.Module):
        raise JobError(f"initialize(model={type(model).__name__})", rule="model is a torch.nn.Module")
    imported = _read_config(config, plan)
    _refuse_split_models(imported.plan)
    where = "the config" if isinstance(config, Mapping) or config is None else str(config)
    _log_config(imported)
    built = _job(imported, where, model, optimizer, data, loss, scheduler, collate, steps, seed, workers)
    _broadcast_weights(model)
    engine = core.initialize(built, imported.plan, dtype=dtype, threads=threads, guards=guards)
    _set_loss_scale(engine, imported)
    wrapped = DeepSpeedEngine(engine, imported)
    loader = None if data is None else MicroBatchLoader(wrapped)
    return wrapped, engine.optimizer, loader, engine.schedule


def _read_config(config: Config | None, plan: Plan | str | None) -> ImportedConfig:
    """The config's settings; without a config, the plan; without both, every rank is a replica."""
    if config is not None and plan is not None:
        raise JobError("initialize() got a config and a plan", rule="give one of the two: a config defines the plan")
    if config is not None:
        return read(config, connect().size)
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    return ImportedConfig(plan or Plan(dp=connect().size))


def _refuse_split_models(plan: Plan) -> None:
    """Refuse plans that split the model: the user's loop calls the model, and such a plan leaves none to call."""
    if plan.pp > 1:
        what, rule = (
            f"pp={plan.pp}",
            "a pipeline interleaves the forwards and backwards of many micro-batches, which a loop cannot do",
        )
    else:
        rows, columns = plan.tile
        sizes = {"tp": plan.tp, "cp": plan.cp, "ep": plan.ep, "tile": rows * columns}
        words = {"tile": f"tile={rows}x{columns}"}
        what = ", ".join(words.get(key, f"{key}={n}") for key, n in sizes.items() if n > 1)
        rule = "a plan that splits the model runs model and loss as one operator graph; a loop has its own loss"
    if what:
        raise PlanError(
            f"separate forward, backward and step calls with {what}",
            where=f"plan {plan}",
            rule=rule,
            fix="write a Job and call engine.step(batch), which works under every plan",
        )


def _log_config(imported: ImportedConfig) -> None:
    """Log, on one rank, every config key that has no effect, and warn of unknown ones."""
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
        _LOG.info("config: chosen by Drumline: %s", ", ".join(imported.auto))


def _job(
    imported: ImportedConfig,
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
    """A job made of these parts."""
    plan = imported.plan
    if optimizer is None:
        if imported.optimizer is None:
            raise JobError(
                "no optimizer given", where=where, fix="initialize(optimizer=...), or `optimizer` in the config"
            )
        optimizer = named_optimizer(imported.optimizer, where)
    elif isinstance(optimizer, torch.optim.Optimizer):
        optimizer = PrebuiltOptimizer(optimizer, model)
    if scheduler is None and imported.schedule is not None:
        scheduler = named_scheduler(imported.schedule.kind, imported.schedule.params, f"{where}: scheduler", steps)
    elif isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise JobError(
            "ReduceLROnPlateau cannot be stepped by the engine",
            rule="it needs a metric; other schedulers need only the step",
            fix="omit scheduler=, create it with the optimizer that initialize returns, and step it yourself",
        )
    elif scheduler is not None and hasattr(scheduler, "step"):
        scheduler = PrebuiltScheduler(scheduler)
    if data is not None and imported.batch_size is None:
        raise JobError(
            "the batch size is unknown",
            where=where,
            fix="set train_batch_size or train_micro_batch_size_per_gpu in the config; or omit data=",
        )
    dataset = NoDataset() if data is None else check_dataset(data)
    return Job(
        model=PrebuiltModel(model),
        loss=loss or MissingArgument("loss"),
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
def _broadcast_weights(model: nn.Module) -> None:
    """Broadcast the first rank's parameters and buffers."""
    where = connect()
    if where.size == 1:
        return
    model.to(device_of(where))
    for tensor in (*model.parameters(), *model.buffers()):
        whole = tensor.detach().contiguous()
        dist.broadcast(whole, src=0)
        tensor.copy_(whole)


def _set_loss_scale(engine: Engine, imported: ImportedConfig) -> None:
    """Apply the config's fp16 loss scale."""
    wanted = imported.loss_scale
    if engine.scaler is None or wanted is None:
        return
    scale = wanted.fixed or 2.0**wanted.power
    window = wanted.window if not wanted.fixed else 2**62  # a fixed scale never grows
    engine.scaler = LossScale(scale=scale, window=window, least=min(scale, wanted.least))


class MicroBatchLoader:
    """This rank's micro-batches as the collate function returns them. Iterates to the end of the epoch.

    Every batch has all its micro-batches, and every rank its share of each: if a ragged last batch has too few samples,
    its first is repeated, as a DistributedSampler does. The order is a function of (seed, epoch, step) alone, and
    starts at the current training position, also after a restart.
    """

    def __init__(self, wrapped: DeepSpeedEngine) -> None:
        engine = wrapped.engine
        self._engine = engine
        self._drop_last = wrapped.imported.drop_last
        self._stream = _EvenStream(
            engine.job, engine.stream.dataset, dp=engine.ranks, index=engine.rank, micro=engine.plan.micro
        )
        if not self._steps:
            raise JobError(
                f"{engine.stream.source.length} samples for batches of {engine.job.batch_size}",
                rule="dataloader_drop_last drops the last batch, and there is no other",
            )

    @property
    def _steps(self) -> int:
        """Batches per epoch."""
        whole = len(self._stream.dataset) // self._stream.job.batch_size
        return whole if self._drop_last else self._stream.steps_per_epoch

    def __len__(self) -> int:
        return self._steps * self._stream.micro

    def __iter__(self) -> Iterator[Any]:
        engine = self._engine
        epoch, first = divmod(engine.position, self._steps)
        pin = engine.device.type == "cuda"
        with Loader(self._stream, pin=pin) as loader:
            for step in range(first, self._steps):
                with engine.phase("data"):
                    batch = loader.batch(epoch * self._stream.steps_per_epoch + step)
                for micro in batch.micros:
                    yield micro.input


class _EvenStream(Stream):
    """Cuts every batch into all its micro-batches, with at least one sample per rank."""

    def cut(self, samples: Sequence[int], step: int) -> RankBatch:
        micros = []
        for part in split_range(len(samples), self.micro):
            part = part or range(1)
            mine = split_range(len(part), self.dp)[self.index] or range(1)
            chosen = [self._sample(samples[part[i]]) for i in mine]
            collated = call_user_code(self.job.collate or default_collate, "collating samples", chosen)
            micros.append(RankMicroBatch(collated, None, len(chosen), len(part)))
        return RankBatch(step, tuple(micros), len(samples))
