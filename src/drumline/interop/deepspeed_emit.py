"""Write a plan as DeepSpeed's JSON, which `interop/deepspeed.py` reads back as the same plan."""

from __future__ import annotations

import json
from typing import Any

from ..plans.plan import Plan
from .emission import EmitSettings, EmittedConfig, KeyCoverage

TF32 = "torch.backends.cuda.matmul.allow_tf32 = True"
"""The setting of torch itself, for any tool."""


def emit(plan: Plan, setting: EmitSettings) -> EmittedConfig:
    """Write the file, with all three batch sizes where DeepSpeed counts ranks as we do, so that it checks them."""
    coverage = KeyCoverage("DeepSpeed", plan, setting)
    table = config(coverage)
    return coverage.finish(json.dumps(table, indent=2) + "\n")


def config(coverage: KeyCoverage) -> dict[str, Any]:
    """The table of the file, which Fabric's DeepSpeedStrategy takes too."""
    plan, setting = coverage.plan, coverage.setting
    table: dict[str, Any] = {
        "train_batch_size": setting.batch_size,
        "train_micro_batch_size_per_gpu": coverage.samples_per_rank,
        "gradient_accumulation_steps": plan.micro,
    }
    coverage.covers("micro")
    if plan.tp > 1 and plan.pp == 1:
        del table["train_batch_size"]
        coverage.notes.append(
            "batch: with tp alone DeepSpeed's train_batch_size would count the tp ranks too: left out"
        )
    if setting.clip:
        table["gradient_clipping"] = setting.clip
    _optimizer(coverage, table)
    _zero(coverage, table)
    _precision(coverage, table)
    _parallel(coverage, table)
    _recompute(coverage, table)
    if plan.compile:
        table["compile"] = {"deepcompile": True}
        coverage.covers("compile")
        coverage.notes.append("compile: call engine.compile() after deepspeed.initialize()")
    if plan.compress == "fp16" and not plan.zero and not plan.splits_model and plan.ep == 1:
        table["communication_data_type"] = "fp16"
        coverage.covers("compress")
    return table


def _optimizer(coverage: KeyCoverage, table: dict[str, Any]) -> None:
    """Write the optimizer by name; otherwise the script provides it and DeepSpeed must accept any."""
    optimizer = coverage.setting.optimizer
    if optimizer is not None:
        params = {key: list(value) if isinstance(value, tuple) else value for key, value in optimizer.params.items()}
        if optimizer.kind == "Adam":
            params["adam_w_mode"] = False  # DeepSpeed's Adam defaults to AdamW
        table["optimizer"] = {"type": optimizer.kind, "params": params}
    else:
        coverage.notes.append("optimizer: give it to deepspeed.initialize(optimizer=...)")
        if coverage.plan.zero:
            table["zero_allow_untested_optimizer"] = True
        if coverage.plan.offload != "none":
            table["zero_force_ds_cpu_optimizer"] = False


def _zero(coverage: KeyCoverage, table: dict[str, Any]) -> None:
    plan = coverage.plan
    zero: dict[str, Any] = {"stage": plan.zero}
    coverage.covers("zero")
    if plan.zero:
        zero |= {"reduce_bucket_size": plan.bucket // 4, "overlap_comm": True, "contiguous_gradients": True}
        if plan.bucket % 4:
            coverage.cannot_express("bucket", "its buckets are counted in numbers of 4 bytes")
        coverage.covers("bucket")
    if plan.pp > 1 and plan.zero > 1:
        coverage.cannot_express("zero", "its pipelines run with stages 0 and 1")
    if plan.shard not in (0, plan.dp):
        coverage.cannot_express("shard", "a copy is sharded over all replicas since MiCS was removed")
    elif plan.shard:
        coverage.covers("shard")
    if plan.offload != "none":
        if not plan.zero:
            coverage.cannot_express("offload", "it offloads with stage 1, 2 or 3")
        elif plan.offload == "all" and plan.zero < 3:
            coverage.cannot_express("offload", "parameters are offloaded with stage 3")
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        if plan.offload == "all":
            zero["offload_param"] = {"device": "cpu", "pin_memory": True}
        coverage.covers("offload")
    table["zero_optimization"] = zero


def _precision(coverage: KeyCoverage, table: dict[str, Any]) -> None:
    plan = coverage.plan
    if plan.precision in ("bf16", "fp16"):
        table[plan.precision] = {"enabled": True}
        coverage.covers("precision")
    elif plan.precision == "tf32":
        coverage.set_in_script("precision", TF32)
    elif plan.precision == "bf16-pure":
        coverage.cannot_express("precision", "its bf16 keeps an fp32 master, or needs stages 1 to 3 to go without")


def _parallel(coverage: KeyCoverage, table: dict[str, Any]) -> None:
    """Write the mesh axes, with notes on changes to the script."""
    plan = coverage.plan
    if plan.tp > 1:
        table["tensor_parallel"] = {"autotp_size": plan.tp}
        coverage.covers("tp")
    if plan.pp > 1:
        table["pipeline"] = {"stages": plan.pp}
        coverage.covers("pp")
        coverage.notes.append(f"pp: the model is a deepspeed.pipe.PipelineModule(layers, num_stages={plan.pp})")
    if plan.cp > 1:
        table["sequence_parallel_size"] = plan.cp
        coverage.covers("cp")
        coverage.notes.append("cp: Ulysses divides the heads while attention runs; register UlyssesSPAttentionHF first")
    if plan.ep > 1:
        table["expert_parallel"] = {"enabled": True, "autoep_size": plan.ep}
        coverage.covers("ep")


def _recompute(coverage: KeyCoverage, table: dict[str, Any]) -> None:
    if coverage.plan.recompute == "full":
        table["activation_checkpointing"] = {"number_checkpoints": max(1, coverage.setting.blocks)}
        coverage.covers("recompute")
        coverage.notes.append("recompute: the model calls deepspeed.checkpointing.checkpoint around its layers")
    elif coverage.plan.recompute == "selective":
        coverage.cannot_express("recompute", "it checkpoints whole layers only")
