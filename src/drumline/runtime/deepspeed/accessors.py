"""Accessors of DeepSpeed's engine: ranks, batch sizes, precision, learning rates, and its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from ...comm.environment import connect, rank_info
from ...core.errors import JobError
from ...interop.imported import ImportedConfig
from ...torchkit.modules import is_persistent
from ..engine import Engine
from ..state.prebuilt import NoDataset
from . import tagged_checkpoints

REFUSED = {
    "train_batch": "a pipeline interleaves forwards and backwards: write a Job and call engine.step(batch)",
    "eval_batch": "a pipeline interleaves the forwards of a batch: write a Job and call engine.evaluate()",
    "deepspeed_io": "the loader is made by initialize(..., training_data=dataset)",
    "no_sync": "the engine sends gradients with the last micro-batch only: set gradient_accumulation_steps",
    "set_train_micro_batch_size": "the size of a micro-batch is that of your batches: change them, and the config",
    "set_gradient_accumulation_boundary": "the config's gradient_accumulation_steps, or set_train_batch_size()",
    "allreduce_gradients": "step() exchanges gradients",
}
"""Methods of DeepSpeed's engine that are refused, each with what to do instead."""


def refuse_options(method: str, options: Mapping[str, Any]) -> None:
    """Refuse arguments of DeepSpeed's method that would change what it computes."""
    for name, value in options.items():
        if value is not None:
            raise JobError(f"engine.{method}({name}=...)", rule=f"{method}() has no {name} here", fix="leave it out")


class EngineAccessors:
    """The part of the engine that asks and stores, and does not train."""

    engine: Engine
    imported: ImportedConfig
    accumulation: int
    micro_of_batch: int
    micro_steps: int
    skipped_steps: int

    def __getattr__(self, name: str) -> Any:
        """Attributes of the model, as in DeepSpeed: `engine.parameters()`, `engine.config`."""
        if name in REFUSED:
            raise AttributeError(f"drumline's engine has no {name}(): {REFUSED[name]}")
        if name.startswith("__") or "engine" not in vars(self):
            raise AttributeError(name)
        try:
            return getattr(self.engine.model, name)
        except AttributeError:
            raise AttributeError(f"neither drumline's engine nor the model has an attribute {name!r}") from None

    # -- sizes

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per step."""
        return self.accumulation

    def train_batch_size(self) -> int | None:
        """Samples per step over all ranks, if the config sets it."""
        return self.imported.batch_size

    def train_micro_batch_size_per_gpu(self) -> int | None:
        """Samples per rank and micro-batch, if the config sets it."""
        return self.imported.micro_size

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the samples per step by changing the number of micro-batches, from the next batch on."""
        samples = (self.imported.micro_size or 0) * self.engine.ranks
        if self.micro_of_batch or not isinstance(self.engine.stream.dataset, NoDataset) or not samples:
            raise JobError(
                f"set_train_batch_size({train_batch_size})",
                rule="between two batches, with a loader of your own and a micro-batch size in the config",
                fix="omit training_data, and set train_micro_batch_size_per_gpu",
            )
        micros, rest = divmod(train_batch_size, samples)
        if rest or micros < 1:
            raise JobError(
                f"set_train_batch_size({train_batch_size})",
                rule=f"a multiple of micro-batch({self.imported.micro_size}) x ranks({self.engine.ranks}): {samples}",
                fix=f"set_train_batch_size({max(1, round(train_batch_size / samples)) * samples})",
            )
        self.accumulation = micros
        self.imported = replace(self.imported, batch_size=train_batch_size)

    @property
    def global_steps(self) -> int:
        """Optimizer steps applied so far."""
        return self.engine.steps

    @property
    def global_samples(self) -> int:
        """Samples of the micro-batches so far, over all ranks, by the config's sizes."""
        return self.micro_steps * (self.imported.micro_size or 0) * self.engine.ranks

    # -- ranks

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self.engine.device

    @property
    def local_rank(self) -> int:
        """This rank's number on its host."""
        return rank_info().local_rank

    @property
    def global_rank(self) -> int:
        """This rank."""
        return self.engine.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.engine.ranks

    @property
    def dp_world_size(self) -> int:
        """Number of replicas, or of ranks that share one: all of them."""
        return self.engine.ranks

    # -- precision and sharding

    def fp16_enabled(self) -> bool:
        """Whether operators run in fp16. Parameters stay fp32 (autocast), so inputs of either type are accepted."""
        return self.engine.plan.precision == "fp16"

    def bfloat16_enabled(self) -> bool:
        """Whether operators run in bf16. Parameters stay fp32 (autocast), so inputs of either type are accepted."""
        return self.engine.plan.precision == "bf16"

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self.engine.plan.zero > 0

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage."""
        return self.engine.plan.zero

    def gradient_clipping(self) -> float:
        """The maximum gradient norm; 0 for none, as in DeepSpeed."""
        return self.imported.clip or 0.0

    def loss_scale(self) -> float:
        """Factor on the loss in the backward; gradients are divided by it."""
        return self.engine.scaler.scale if self.engine.scaler else 1.0

    @property
    def cur_scale(self) -> float:
        """The loss scale."""
        return self.loss_scale()

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale adapts."""
        return self.engine.scaler is not None and not (self.imported.loss_scale and self.imported.loss_scale.fixed)

    # -- optimizer

    def get_global_grad_norm(self) -> float:
        """Gradient norm of the last step, before clipping."""
        return self.engine.grad_norm

    def get_lr(self) -> list[float]:
        """Learning rates of the next step, one per parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer over this rank's shards."""
        return self.engine.optimizer

    @property
    def lr_scheduler(self) -> Any:
        """The learning-rate scheduler, or None."""
        return self.engine.schedule

    def zero_grad(self, set_to_none: bool = True) -> None:
        """No effect: a step clears its gradients."""

    # -- the model

    @property
    def module(self) -> nn.Module:
        """The user's model."""
        return self.engine.model

    def train(self, mode: bool = True) -> Self:
        """Set training mode."""
        self.engine.module.train(mode)
        return self

    def eval(self) -> Self:
        """Set evaluation mode."""
        return self.train(False)

    def module_state_dict(self) -> dict[str, torch.Tensor]:
        """Full weights and buffers under the model's own names, on every rank, whatever the plan."""
        model = self.engine.model
        state = self.engine.whole_parameters()
        first = {id(p): name for name, p in model.named_parameters()}
        for name, p in model.named_parameters(remove_duplicate=False):
            if first[id(p)] != name:  # tied to another
                state[self.engine.user_name(name)] = state[self.engine.user_name(first[id(p)])]
        for prefix, module in model.named_modules():
            for key, b in module._buffers.items():
                if b is not None and is_persistent(module, key):
                    state[f"{prefix}.{key}" if prefix else key] = b
        return state

    # -- checkpoints

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: object = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save to `save_dir/tag` (default: global_stepN), all ranks together; the file `latest` names the tag.

        The checkpoint is Drumline's: it loads under any plan. `client_state` consists of numbers, strings, tensors,
        lists and dicts.
        """
        refuse_options("save_checkpoint", {"exclude_frozen_parameters": exclude_frozen_parameters or None})
        counts = {"micro_steps": self.micro_steps - self.micro_of_batch, "skipped_steps": self.skipped_steps}
        name = f"global_step{self.global_steps}" if tag is None else str(tag)
        state = tagged_checkpoints.ClientState(dict(client_state or {}), counts)
        tagged_checkpoints.save(self.engine, Path(save_dir), name, state, latest=save_latest)
        return True

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: object = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Continue from `load_dir/tag` (default: the tag in `latest`), all ranks together, saved under any plan.

        Returns the path and the client state, or (None, None) with a warning if no tag is given and none was saved.
        Without optimizer states, only the weights are loaded, and the run begins at step 0.
        """
        refuse_options("load_checkpoint", {"custom_load_fn": custom_load_fn})
        if self.micro_of_batch:
            raise JobError("load_checkpoint() within a batch", rule="between two batches; forward, backward, step")
        weights_only = load_module_only or not load_optimizer_states
        if not weights_only and not (load_lr_scheduler_states and load_module_strict):
            raise JobError(
                "load_checkpoint() of a part of the training state",
                rule="the whole state, or the weights alone",
                fix="load_module_only=True, with load_module_strict as you like",
            )
        name = None if tag is None else str(tag)
        loaded = tagged_checkpoints.load(
            self.engine, Path(load_dir), name, weights_only=weights_only, strict=load_module_strict
        )
        if loaded is None:
            return None, None
        path, state = loaded
        if not weights_only:
            self.micro_steps = int(state.counts.get("micro_steps", 0))
            self.skipped_steps = int(state.counts.get("skipped_steps", 0))
        return str(path), dict(state.values)

    def save_16bit_model(self, save_dir: str | Path, save_filename: str = "pytorch_model.bin") -> bool:
        """Write the full weights in the compute type (bf16 or fp16, else their own), by rank 0: a state dict.

        A name that ends with .safetensors gives that format.
        """
        state = self.module_state_dict()
        kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
        kind = kinds.get(self.engine.plan.precision)
        if self.engine.rank == 0:
            cast = {k: v.detach().to(kind) if kind and v.is_floating_point() else v.detach() for k, v in state.items()}
            tagged_checkpoints.write_weights(Path(save_dir) / save_filename, cast)
        if connect().size > 1:
            torch.distributed.barrier()
        return True

    save_fp16_model = save_16bit_model
