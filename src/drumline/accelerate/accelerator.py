"""Accelerate's `Accelerator` over the engine: any data-parallel plan, the user's own loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from ..comm.environment import connect, device_of, disconnect, rank_zero_first
from ..core.errors import InputError, JobError
from ..plans import Plan
from ..runtime.deepspeed.initialize import Parts
from ..runtime.deepspeed.tagged_checkpoints import write_weights
from ..runtime.numerics.precision import compute_precision
from .gathering import first_samples, gather, reduce
from .loaders import PreparedLoader
from .options import PRECISIONS, REFUSED, check_options
from .prepared import PreparedModel, PreparedOptimizer, PreparedScheduler


class Accelerator:
    """Ranks, devices and an engine for a loop that was written for Accelerate.

    `plan` has the keys of a plan that are not in the other arguments: `"zero=2"`, `"zero=3,offload=optimizer"`.
    Batches are those of one rank, as in Accelerate without `split_batches`.
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = False,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        rng_types: Any = None,
        project_dir: str | Path | None = None,
        step_scheduler_with_optimizer: bool = True,
        *,
        plan: str = "",
        **options: Any,
    ) -> None:
        check_options(options, split_batches=split_batches, cpu=cpu)
        precision = mixed_precision or "no"
        if precision not in PRECISIONS:
            raise InputError(f"mixed_precision={precision!r}", rule=f"one of {', '.join(PRECISIONS)}")
        self._where = connect()
        keys = f"dp={self._where.size},micro={gradient_accumulation_steps},precision={PRECISIONS[precision]}"
        self._plan = Plan.parse(f"{keys},{plan}" if plan else keys)
        self.mixed_precision, self.gradient_accumulation_steps = precision, gradient_accumulation_steps
        self.project_dir, self.device = project_dir, device_of(self._where)
        self.sync_gradients = True
        """Whether the current micro-batch updates the weights."""
        self.step = 0
        self._place, self._with_optimizer = device_placement, step_scheduler_with_optimizer
        self._model: PreparedModel | None = None
        self._optimizer: PreparedOptimizer | None = None
        self._loaders: list[PreparedLoader] = []
        self._schedulers: list[PreparedScheduler] = []
        self._registered: list[Any] = []
        self._accumulating = False

    def __getattr__(self, name: str) -> Any:
        if name in REFUSED:
            raise AttributeError(f"drumline's Accelerator has no {name}(): {REFUSED[name]}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # -- ranks

    @property
    def process_index(self) -> int:
        """This rank."""
        return self._where.rank

    @property
    def local_process_index(self) -> int:
        """This rank's number on its host."""
        return self._where.local_rank

    @property
    def num_processes(self) -> int:
        """Number of ranks."""
        return self._where.size

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self._where.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first rank of its host."""
        return self._where.local_rank == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last rank."""
        return self._where.rank == self._where.size - 1

    @property
    def use_distributed(self) -> bool:
        """Whether there are several ranks."""
        return self._where.size > 1

    def wait_for_everyone(self) -> None:
        """Wait until all ranks have come here."""
        dist.barrier()

    def print(self, *values: Any, **options: Any) -> None:
        """Print on the first rank of each host."""
        if self.is_local_main_process:
            print(*values, **options)

    def on_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that runs on rank 0 only, and returns None elsewhere."""
        return function if self.is_main_process else lambda *args, **options: None

    def main_process_first(self) -> AbstractContextManager[None]:
        """Run the block on rank 0 first, then on the others."""
        return rank_zero_first()

    def end_training(self) -> None:
        """Leave the group, after all ranks have come here."""
        disconnect()

    # -- preparation

    def prepare(self, *objects: Any, device_placement: Any = None) -> Any:
        """The model with its optimizer, loaders and schedulers, ready for this rank; in the same order.

        Model and optimizer belong in one call: the optimizer is rebuilt over this rank's shards.
        """
        if device_placement is not None:
            raise JobError("prepare(device_placement=...)", fix="Accelerator(device_placement=...)")
        models = [x for x in objects if isinstance(x, nn.Module)]
        optimizers = [x for x in objects if isinstance(x, torch.optim.Optimizer)]
        if models or optimizers:
            self._prepare_model(models, optimizers)
        prepared = tuple(self._prepared(x) for x in objects)
        return prepared[0] if len(prepared) == 1 else prepared

    def _prepare_model(self, models: list[nn.Module], optimizers: list[Any]) -> None:
        if len(models) != 1 or len(optimizers) != 1 or self._model is not None:
            raise JobError(
                f"prepare() with {len(models)} models and {len(optimizers)} optimizers"
                + (", after a model" if self._model is not None else ""),
                rule="one model and one optimizer in one call: the optimizer is rebuilt over the model's shards",
                fix="model, optimizer = accelerator.prepare(model, optimizer)",
            )
        parts = Parts(model=models[0], optimizer=optimizers[0])
        model = parts.initialize(self._plan, wrapper=PreparedModel)[0]
        assert isinstance(model, PreparedModel)
        self._model, self._optimizer = model, PreparedOptimizer(model)

    def _prepared(self, x: Any) -> Any:
        if isinstance(x, nn.Module):
            return self._model
        if isinstance(x, torch.optim.Optimizer):
            return self._optimizer
        if isinstance(x, DataLoader):
            loader = PreparedLoader(x, self._where, place=self._place)
            self._loaders.append(loader)
            return loader
        if hasattr(x, "step") and hasattr(x, "state_dict"):
            if self._model is None or self._optimizer is None:
                raise JobError("prepare() of a scheduler before its optimizer", rule="it steps the prepared optimizer")
            times = self._where.size if self._with_optimizer else 1
            scheduler = PreparedScheduler(x, self._model, self._optimizer, times)
            self._schedulers.append(scheduler)
            return scheduler
        return x

    # -- a step

    @contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """One micro-batch: the last of every `gradient_accumulation_steps`, and of a loader, updates the weights."""
        model = self._prepared_model("accumulate()")
        model.loaders = tuple(self._loaders)
        self.sync_gradients = model.is_gradient_accumulation_boundary()
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Backward of the mean loss of this rank's micro-batch, divided by `gradient_accumulation_steps`."""
        if self.gradient_accumulation_steps > 1 and not self._accumulating:
            raise JobError(
                f"backward() with gradient_accumulation_steps={self.gradient_accumulation_steps} outside accumulate()",
                rule="accumulate() counts the micro-batches",
                fix="with accelerator.accumulate(model): forward, backward, optimizer.step()",
            )
        self._prepared_model("backward()").backward(loss, **options)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Clip the coming update to a norm over all ranks; returns the norm before. Where `sync_gradients` is true."""
        model = self._prepared_model("clip_grad_norm_()")
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        missing = {id(p) for p in model.module.parameters() if p.requires_grad} - {id(p) for p in given}
        if norm_type != 2 or missing:
            raise JobError(
                f"clip_grad_norm_() of {len(given)} tensors with norm_type={norm_type}",
                rule="the 2-norm of all trained parameters, which shards have in common",
                fix="accelerator.clip_grad_norm_(model.parameters(), max_norm)",
            )
        if not model.is_gradient_accumulation_boundary():
            raise JobError(
                "clip_grad_norm_() before the last micro-batch of a batch",
                rule="the gradients of a batch are clipped when they are complete",
                fix="if accelerator.sync_gradients: accelerator.clip_grad_norm_(...)",
            )
        return model.clip(max_norm)

    @contextmanager
    def autocast(self, *unused: Any, **options: Any) -> Iterator[None]:
        """Run the block in the compute type, as the model's forward does by itself."""
        with compute_precision(self._plan.precision, self.device):
            yield

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step had gradients that were not finite."""
        return self._optimizer is not None and self._optimizer.step_was_skipped

    def _prepared_model(self, what: str) -> PreparedModel:
        if self._model is None:
            raise JobError(f"{what} before prepare()", fix="model, optimizer = accelerator.prepare(model, optimizer)")
        return self._model

    # -- values of all ranks

    def gather(self, value: Any) -> Any:
        """The tensors of all ranks, one after the other along dim 0, in their structure."""
        return gather(value, self.device)

    def gather_for_metrics(self, value: Any, use_gather_object: bool = False) -> Any:
        """`gather`, without the samples that fill up the last round of a loader."""
        if use_gather_object:
            objects: list[Any] = [None] * self.num_processes
            dist.all_gather_object(objects, value)
            return self._without_padding([x for part in objects for x in part])
        return self._without_padding(self.gather(value))

    def _without_padding(self, value: Any) -> Any:
        loader = next((x for x in self._loaders if x.at_end), None)
        if loader is None or not loader.remainder or self.num_processes == 1:
            return value
        return first_samples(value, loader.remainder)

    def reduce(self, value: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum or mean of a tensor over the ranks."""
        return reduce(value, self.device, reduction, scale)

    # -- the model and its state

    def unwrap_model(self, model: Any, keep_fp32_wrapper: bool = True) -> Any:
        """The user's own model."""
        return model.module if isinstance(model, PreparedModel) else model

    def get_state_dict(self, model: Any, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """Full weights on every rank, whatever the plan."""
        if isinstance(model, PreparedModel):
            return model.module_state_dict()
        state: dict[str, torch.Tensor] = model.state_dict()
        return state

    def save_model(self, model: Any, save_directory: str | Path, safe_serialization: bool = True) -> None:
        """Write the full weights: `model.safetensors`, or `pytorch_model.bin`."""
        state = self.get_state_dict(model)
        if self.is_main_process:
            name = "model.safetensors" if safe_serialization else "pytorch_model.bin"
            write_weights(Path(save_directory) / name, state)
        self.wait_for_everyone()

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Store the `state_dict()` of these objects with `save_state`."""
        for x in objects:
            if not (hasattr(x, "state_dict") and hasattr(x, "load_state_dict")):
                raise JobError(
                    f"register_for_checkpointing({type(x).__name__})", rule="state_dict() and load_state_dict()"
                )
        self._registered += objects

    def save_state(self, output_dir: str | Path | None = None) -> str:
        """Save model, optimizer, schedulers and random states, all ranks together; it loads under any plan."""
        folder = self._folder(output_dir, "save_state")
        states = [x.state_dict() for x in (*self._schedulers, *self._registered)]
        self._prepared_model("save_state()").save_checkpoint(folder, "state", {"states": states})
        return str(folder)

    def load_state(self, input_dir: str | Path | None = None) -> None:
        """Continue from `save_state`, all ranks together. The place in a loader is the loop's: skip_first_batches."""
        folder = self._folder(input_dir, "load_state")
        client = self._prepared_model("load_state()").load_checkpoint(folder, "state")[1] or {}
        parts, states = [*self._schedulers, *self._registered], client.get("states", [])
        if len(parts) != len(states):
            raise InputError(
                f"{folder} has {len(states)} states of schedulers and objects, and there are {len(parts)} here",
                rule="the same objects are prepared and registered before load_state()",
            )
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(state)

    def _folder(self, given: str | Path | None, method: str) -> Path:
        folder = given if given is not None else self.project_dir
        if folder is None:
            raise InputError(f"{method}() without a folder", fix=f"{method}(folder), or Accelerator(project_dir=...)")
        return Path(folder)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> PreparedLoader:
        """A prepared loader without its first batches."""
        loader = skip_first_batches(dataloader, num_batches)
        self._loaders.append(loader)
        return loader

    def free_memory(self, *objects: Any) -> list[None]:
        """Forget what was prepared."""
        self._model = self._optimizer = None
        self._loaders, self._schedulers = [], []
        return [None] * len(objects)


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> PreparedLoader:
    """A prepared loader without its first batches."""
    if not isinstance(dataloader, PreparedLoader):
        raise JobError("skip_first_batches() of a loader that is not prepared", fix="accelerator.prepare(loader)")
    return dataloader.skipping(num_batches)
