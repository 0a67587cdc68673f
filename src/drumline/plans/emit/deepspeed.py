"""DeepSpeed's JSON for a plan. `plans/deepspeed.py` reads it back, and a test holds that it says the same plan."""

from __future__ import annotations

import json
from typing import Any

from ..plan import Plan
from .value import Emitted, Setting, Sheet

TF32 = "torch.backends.cuda.matmul.allow_tf32 = True"
"""The one place where torch is told, whatever drives it."""


def emit(plan: Plan, setting: Setting) -> Emitted:
    """The file; where DeepSpeed counts ranks as we do, with all three numbers of samples, so that it checks them."""
    sheet = Sheet("DeepSpeed", plan, setting)
    table = config(sheet)
    return sheet.close(json.dumps(table, indent=2) + "\n")


def config(sheet: Sheet) -> dict[str, Any]:
    """The table of the file; also what Fabric's DeepSpeedStrategy takes."""
    plan, setting = sheet.plan, sheet.setting
    table: dict[str, Any] = {
        "train_batch_size": setting.batch_size,
        "train_micro_batch_size_per_gpu": sheet.share,
        "gradient_accumulation_steps": plan.micro,
    }
    sheet.says("micro")
    if plan.tp > 1 and plan.pp == 1:
        del table["train_batch_size"]
        sheet.notes.append("batch: with tp alone DeepSpeed's train_batch_size would count the tp ranks too: left out")
    if setting.clip:
        table["gradient_clipping"] = setting.clip
    _optimizer(sheet, table)
    _zero(sheet, table)
    _precision(sheet, table)
    _parallel(sheet, table)
    _recompute(sheet, table)
    if plan.compile:
        table["compile"] = {"deepcompile": True}
        sheet.says("compile")
        sheet.notes.append("compile: call engine.compile() after deepspeed.initialize()")
    if plan.compress == "fp16" and not plan.zero and not plan.splits_model and plan.ep == 1:
        table["communication_data_type"] = "fp16"
        sheet.says("compress")
    return table


def _optimizer(sheet: Sheet, table: dict[str, Any]) -> None:
    """By its name where that is known; else the script gives it, and DeepSpeed must accept any."""
    found = sheet.setting.optimizer
    if found is not None:
        params = {key: list(value) if isinstance(value, tuple) else value for key, value in found.params.items()}
        if found.kind == "Adam":
            params["adam_w_mode"] = False  # DeepSpeed's Adam is AdamW unless told
        table["optimizer"] = {"type": found.kind, "params": params}
    else:
        sheet.notes.append("optimizer: give it to deepspeed.initialize(optimizer=...)")
        if sheet.plan.zero:
            table["zero_allow_untested_optimizer"] = True
        if sheet.plan.offload != "none":
            table["zero_force_ds_cpu_optimizer"] = False


def _zero(sheet: Sheet, table: dict[str, Any]) -> None:
    plan = sheet.plan
    zero: dict[str, Any] = {"stage": plan.zero}
    sheet.says("zero")
    if plan.zero:
        zero |= {"reduce_bucket_size": plan.bucket // 4, "overlap_comm": True, "contiguous_gradients": True}
        if plan.bucket % 4:
            sheet.cannot("bucket", "its buckets are counted in numbers of 4 bytes")
        sheet.says("bucket")
    if plan.pp > 1 and plan.zero > 1:
        sheet.cannot("zero", "its pipelines run with stages 0 and 1")
    if plan.shard not in (0, plan.dp):
        sheet.cannot("shard", "a copy lies over all replicas since MiCS was taken out")
    elif plan.shard:
        sheet.says("shard")
    if plan.offload != "none":
        if not plan.zero:
            sheet.cannot("offload", "it offloads with stage 1, 2 or 3")
        elif plan.offload == "all" and plan.zero < 3:
            sheet.cannot("offload", "parameters are offloaded with stage 3")
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        if plan.offload == "all":
            zero["offload_param"] = {"device": "cpu", "pin_memory": True}
        sheet.says("offload")
    table["zero_optimization"] = zero


def _precision(sheet: Sheet, table: dict[str, Any]) -> None:
    plan = sheet.plan
    if plan.precision in ("bf16", "fp16"):
        table[plan.precision] = {"enabled": True}
        sheet.says("precision")
    elif plan.precision == "tf32":
        sheet.in_script("precision", TF32)
    elif plan.precision == "bf16-pure":
        sheet.cannot("precision", "its bf16 keeps an fp32 master, or needs stages 1 to 3 to go without")


def _parallel(sheet: Sheet, table: dict[str, Any]) -> None:
    """The axes; of each, what the script must do beside the file."""
    plan = sheet.plan
    if plan.tp > 1:
        table["tensor_parallel"] = {"autotp_size": plan.tp}
        sheet.says("tp")
    if plan.pp > 1:
        table["pipeline"] = {"stages": plan.pp}
        sheet.says("pp")
        sheet.notes.append(f"pp: the model is a deepspeed.pipe.PipelineModule(layers, num_stages={plan.pp})")
    if plan.cp > 1:
        table["sequence_parallel_size"] = plan.cp
        sheet.says("cp")
        sheet.notes.append("cp: Ulysses divides the heads while attention runs; register UlyssesSPAttentionHF first")
    if plan.ep > 1:
        table["expert_parallel"] = {"enabled": True, "autoep_size": plan.ep}
        sheet.says("ep")


def _recompute(sheet: Sheet, table: dict[str, Any]) -> None:
    if sheet.plan.recompute == "full":
        table["activation_checkpointing"] = {"number_checkpoints": max(1, sheet.setting.blocks)}
        sheet.says("recompute")
        sheet.notes.append("recompute: the model calls deepspeed.checkpointing.checkpoint around its layers")
    elif sheet.plan.recompute == "selective":
        sheet.cannot("recompute", "its checkpoints hold whole layers")
