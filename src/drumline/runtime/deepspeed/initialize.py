"""The two entry points: `initialize(job, plan)`, and DeepSpeed's `initialize(model=, optimizer=, data=, config=)`.

The second takes objects that the user built, and returns (engine, optimizer, loader, scheduler). The first rank's
weights are broadcast, so that all ranks start equal.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack, overload

import torch
import torch.distributed as dist
from torch import nn

from ...comm.environment import connect, device_of
from ...core.errors import JobError, PlanError
from ...core.job import Job
from ...datasets.loader import Loader
from ...datasets.source_checks import check_dataset
from ...datasets.stream import RankBatch, RankMicroBatch, Stream, split_range
from ...interop.deepspeed import read
from ...interop.imported import ImportedConfig
from ...plans import Plan
from .. import engine as core
from ..engine import Engine
from ..guards.guard import Guards
from ..numerics.loss_scale import LossScale
from ..state.prebuilt import MissingArgument, NoDataset, PrebuiltModel, PrebuiltOptimizer, PrebuiltScheduler
from .arguments import Config, DeepSpeedArguments, renamed
from .engine import DeepSpeedEngine
from .optimizers import named_optimizer
from .schedulers import named_scheduler

DeepSpeedResult = tuple[DeepSpeedEngine, torch.optim.Optimizer, "MicroBatchLoader | None", Any]

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
    **deepspeed: Unpack[DeepSpeedArguments],
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
    **deepspeed: Unpack[DeepSpeedArguments],
) -> Engine | DeepSpeedResult:
    """Set up training on this rank: under `drumline run`, torchrun, srun or mpiexec, in `dl.spawn`, or in one process.

    With a job and a plan, returns the engine. With a model instance and a DeepSpeed config (or a plan), returns
    (engine, optimizer, loader, scheduler). There, `optimizer` and `scheduler` are instances, factory functions, or left
    to the config; `data` is a map-style dataset, or omitted if the loop has its own batches; `loss` is needed only by
    `engine.engine.step(batch)`; `steps` is the length of the run, for schedules that need it and a config that leaves
    it open. `guards` configure the handling of non-finite numbers. DeepSpeed's own names work too: `args`,
    `model_parameters`, `training_data`, `lr_scheduler`, `collate_fn` (arguments.py).
    """
    if isinstance(job, argparse.Namespace) and "args" not in deepspeed:
        job, deepspeed["args"] = None, job  # DeepSpeed's first argument is the parsed command line
    if job is not None:
        given = (model, optimizer, data, config, loss, scheduler, collate, *deepspeed.values())
        if not isinstance(job, Job) or any(value is not None for value in given):
            raise JobError(
                f"initialize({type(job).__name__}, ...) with parts of a job as well"
                if isinstance(job, Job)
                else f"initialize() got a {type(job).__name__} instead of a job",
                rule="either initialize(job, plan), or initialize(model=, optimizer=, data=, config=)",
            )
        return core.initialize(job, plan, dtype=dtype, threads=threads, guards=guards)
    own = {"data": data, "config": config, "scheduler": scheduler, "collate": collate}
    parts = Parts(
        model=model,
        optimizer=optimizer,
        loss=loss,
        steps=steps,
        seed=seed,
        workers=workers,
        **renamed(own, deepspeed),
    )
    return parts.initialize(plan, dtype=dtype, threads=threads, guards=guards)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The user's own objects: DeepSpeed's arguments of `initialize`."""

    model: Any
    optimizer: Any = None
    model_parameters: Any = None
    data: Any = None
    config: Config | None = None
    loss: Callable[..., Any] | None = None
    scheduler: Any = None
    collate: Callable[[list[Any]], Any] | None = None
    steps: int | None = None
    seed: int = 0
    workers: int = 0

    def initialize(
        self,
        plan: Plan | str | None,
        *,
        dtype: torch.dtype | None = None,
        threads: int | None = None,
        guards: Guards | None = None,
        wrapper: type[DeepSpeedEngine] = DeepSpeedEngine,
    ) -> DeepSpeedResult:
        """Set up training: the engine in its `wrapper`, the optimizer, the loader, the scheduler."""
        if not isinstance(self.model, nn.Module):
            raise JobError(f"initialize(model={type(self.model).__name__})", rule="model is a torch.nn.Module")
        imported = _read_config(self.config, plan)
        _refuse_split_models(imported.plan)
        where = "the config" if isinstance(self.config, Mapping) or self.config is None else str(self.config)
        _log_config(imported)
        built = self._job(imported, where)
        _broadcast_weights(self.model)
        engine = core.initialize(built, imported.plan, dtype=dtype, threads=threads, guards=guards)
        _set_loss_scale(engine, imported)
        wrapped = wrapper(engine, imported)
        loader = None if self.data is None else MicroBatchLoader(wrapped)
        return wrapped, engine.optimizer, loader, engine.schedule

    def _job(self, imported: ImportedConfig, where: str) -> Job:
        """A job made of these parts."""
        plan = imported.plan
        if self.data is not None and imported.batch_size is None:
            raise JobError(
                "the batch size is unknown",
                where=where,
                fix="set train_batch_size or train_micro_batch_size_per_gpu in the config; or omit data=",
            )
        optimizer, scheduler = self._optimizer(imported, where), self._scheduler(imported, where)
        dataset = NoDataset() if self.data is None else check_dataset(self.data)
        return Job(
            model=PrebuiltModel(self.model),
            loss=self.loss or MissingArgument("loss"),
            optimizer=optimizer,
            data=lambda: dataset,
            batch_size=imported.batch_size or plan.micro * plan.dp,
            schedule=scheduler,
            clip=imported.clip,
            seed=self.seed,
            collate=self.collate,
            workers=self.workers,
            steps=self.steps or 100,
        )

    def _optimizer(self, imported: ImportedConfig, where: str) -> Any:
        """The given optimizer, or the one that the config names, on `model_parameters` if these are given."""
        if isinstance(self.optimizer, torch.optim.Optimizer):
            return PrebuiltOptimizer(self.optimizer, self.model)
        make = self.optimizer
        if make is None and imported.optimizer is not None:
            make = named_optimizer(imported.optimizer, where)
        if make is None:
            raise JobError(
                "no optimizer given", where=where, fix="initialize(optimizer=...), or `optimizer` in the config"
            )
        if self.model_parameters is None:
            return make
        parameters = list(self.model_parameters)
        if not parameters:
            raise JobError(
                "model_parameters is empty",
                rule="the trainable parameters, or groups of them",
                fix="model_parameters=model.parameters(); a generator can be read once only",
            )
        return PrebuiltOptimizer(make(parameters), self.model)

    def _scheduler(self, imported: ImportedConfig, where: str) -> Any:
        scheduler = self.scheduler
        if scheduler is None:
            named = imported.schedule
            return named and named_scheduler(named.kind, named.params, f"{where}: scheduler", self.steps)
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise JobError(
                "ReduceLROnPlateau cannot be stepped by the engine",
                rule="it needs a metric; other schedulers need only the step",
                fix="omit scheduler=, create it with the optimizer that initialize returns, and step it yourself",
            )
        return PrebuiltScheduler(scheduler) if hasattr(scheduler, "step") else scheduler


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
            before = samples[: part[mine[0]]]
            collated = self.source.load([samples[part[i]] for i in mine], self.job.seed, step, before=before)
            micros.append(RankMicroBatch(collated, None, len(mine), len(part)))
        return RankBatch(step, tuple(micros), len(samples))
