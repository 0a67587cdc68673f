"""Features of Accelerate's `Accelerator` that this one refuses, each with what to do instead."""

from __future__ import annotations

from typing import Any

import torch

from ..core.errors import JobError

PRECISIONS = {"no": "fp32", "fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}
_PLUGIN = "Accelerator(plan='zero=2'): the plan's keys say what is sharded"
REFUSED = {
    "clip_grad_value_": "clip_grad_norm_(): a single value cannot be clipped where gradients are sharded",
    "no_sync": "accumulate(model), with gradient_accumulation_steps in Accelerator()",
    "join_uneven_inputs": "prepare() gives every rank equally many batches",
    "init_trackers": "write your own log on accelerator.is_main_process",
    "log": "write your own log on accelerator.is_main_process",
    "split_between_processes": "slice by accelerator.process_index and accelerator.num_processes",
    "set_trigger": "torch.distributed.all_reduce of a flag",
    "check_trigger": "torch.distributed.all_reduce of a flag",
    "unscale_gradients": "clip_grad_norm_() returns the norm of unscaled gradients",
    "lomo_backward": "an optimizer of torch",
}
"""Methods of Accelerate's that are refused, each with what to do instead."""
_OPTIONS = {
    "deepspeed_plugin": _PLUGIN,
    "deepspeed_plugins": _PLUGIN,
    "fsdp_plugin": _PLUGIN,
    "megatron_lm_plugin": "a Job, and tp=n or pp=n in its plan",
    "parallelism_config": "a Job, and tp=n or cp=n in its plan",
    "dynamo_plugin": "Accelerator(plan='compile=true')",
    "dynamo_backend": "Accelerator(plan='compile=true')",
    "log_with": "write your own log on accelerator.is_main_process",
    "project_config": "save_state(folder)",
    "gradient_accumulation_plugin": "gradient_accumulation_steps=n",
    "dataloader_config": "a DataLoader with the batch size of one rank",
    "kwargs_handlers": "the keys of plan=: bucket, compress, static",
}
"""Arguments of Accelerate's that are refused, each with what to do instead."""


def check_options(options: dict[str, Any], *, split_batches: bool, cpu: bool) -> None:
    """Refuse what this adapter does not do."""
    for name, value in options.items():
        if name not in _OPTIONS:
            raise TypeError(f"Accelerator() got an unexpected argument {name!r}")
        if value is not None:
            raise JobError(f"Accelerator({name}=...)", rule="the engine follows a plan", fix=_OPTIONS[name])
    if split_batches:
        raise JobError(
            "Accelerator(split_batches=True)",
            rule="a DataLoader has the batches of one rank",
            fix="batch_size // accelerator.num_processes in the DataLoader",
        )
    if cpu and torch.cuda.is_available():
        raise JobError("Accelerator(cpu=True) on a machine with GPUs", fix="CUDA_VISIBLE_DEVICES= python script.py")
