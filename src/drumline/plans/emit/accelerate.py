"""Accelerate's YAML for a plan: DDP, FSDP2 or DeepSpeed, whichever shards what the plan shards.

What Accelerate is told by its `Accelerator` and not by the file (micro-batches, options of DDP) is given as the line of
the script that says it, on top of the file.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .. import plain_yaml
from ..plan import Plan
from .deepspeed import TF32
from .value import Emitted, Setting, Sheet, comment


def emit(plan: Plan, setting: Setting) -> Emitted:
    """The file."""
    sheet = Sheet("Accelerate", plan, setting)
    way = _way(plan)
    table = {"compute_environment": "LOCAL_MACHINE", "debug": False, **way(sheet), **_launch(sheet)}
    _precision(sheet, table)
    if plan.compile:
        table["dynamo_config"] = {"dynamo_backend": "INDUCTOR", "dynamo_mode": "default"}
        sheet.says("compile")
    if plan.backend in ("nccl", "gloo"):
        sheet.in_script("backend", f'Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="{plan.backend}")])')
    sheet.notes.append(f"batch: DataLoader(batch_size={sheet.share}), samples of one rank in one micro-batch")
    done = sheet.close("")
    head = f"{plan}: a batch of {setting.batch_size}, from `drumline plan --emit accelerate`"
    text = comment(f"{head}\n{done}") + plain_yaml.write(dict(sorted(table.items())))
    return replace(done, text=text)


def _way(plan: Plan) -> Any:
    """FSDP2 where parameters are sharded, DeepSpeed where only states are, else replicas."""
    if plan.zero == 3 and plan.offload != "optimizer":
        return _fsdp
    return _deepspeed if plan.zero or plan.offload != "none" else _replicas


def _replicas(sheet: Sheet) -> dict[str, Any]:
    plan, cpu = sheet.plan, sheet.setting.device == "cpu"
    sheet.says("zero")
    _accumulate(sheet)
    _recompute_in_script(sheet)
    for key in ("tp", "cp"):
        if getattr(plan, key) > 1:
            sheet.cannot(key, "it divides them beside FSDP2 only: zero=3")
    options = []
    if plan.bucket != Plan().bucket:
        options.append(("bucket", f"bucket_cap_mb={plan.bucket / 2**20:g}"))
    if plan.static:
        options.append(("static", "static_graph=True"))
    if plan.compress != "none":
        hook = {"fp16": "FP16", "powersgd": "POWER_SGD"}[plan.compress]
        options.append(("compress", f"comm_hook=DDPCommunicationHookType.{hook}"))
    for key, option in options:
        sheet.in_script(key, f"Accelerator(kwargs_handlers=[DistributedDataParallelKwargs({option})])")
    return {"distributed_type": "NO" if plan.ranks == 1 else "MULTI_CPU" if cpu else "MULTI_GPU"}


def _fsdp(sheet: Sheet) -> dict[str, Any]:
    plan = sheet.plan
    sheet.says("zero", "offload", "recompute", "shard", "tp", "cp")
    _accumulate(sheet)
    if plan.recompute == "selective":
        sheet.cannot("recompute", "its checkpoints hold whole layers")
    if (plan.tp > 1 or plan.cp > 1) and plan.shards == 1:
        sheet.cannot("tp" if plan.tp > 1 else "cp", "beside it FSDP2 shards over at least two ranks: dp=2 or more")
    fsdp = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": True,
        "fsdp_offload_params": plan.offload == "all",
        "fsdp_activation_checkpointing": plan.recompute == "full",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": False,
        **_units(sheet),
    }
    table: dict[str, Any] = {"distributed_type": "FSDP", "fsdp_config": dict(sorted(fsdp.items()))}
    if plan.shards != plan.ranks:
        sizes = {"dp_replicate": plan.dp // plan.shards, "dp_shard": plan.shards, "tp": plan.tp, "cp": plan.cp}
        table["parallelism_config"] = {f"parallelism_config_{key}_size": n for key, n in sorted(sizes.items())}
    if plan.cp > 1:
        sheet.notes.append("cp: `with accelerator.maybe_context_parallel(...)` divides the buffers of a batch")
    return table


def _units(sheet: Sheet) -> dict[str, Any]:
    """What is sharded as one: the repeated layers by their class, or whatever is large enough."""
    setting = sheet.setting
    if not setting.blocks:
        return {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 1_000_000}
    if not setting.block:
        sheet.notes.append("units: by the model's _no_split_modules; else name fsdp_transformer_layer_cls_to_wrap")
        return {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    return {
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": setting.block,
    }


def _deepspeed(sheet: Sheet) -> dict[str, Any]:
    plan = sheet.plan
    sheet.says("zero", "micro", "offload")
    _recompute_in_script(sheet)
    if not plan.zero:
        sheet.cannot("offload", "it offloads with stage 1, 2 or 3 of DeepSpeed")
    elif plan.offload == "all" and plan.zero < 3:
        sheet.cannot("offload", "parameters are offloaded with zero=3")
    if plan.shard == plan.dp:
        sheet.says("shard")
    if plan.bucket != Plan().bucket:
        table = f'{{"zero_optimization": {{"stage": {plan.zero}, "reduce_bucket_size": {plan.bucket // 4}}}, ...}}'
        sheet.in_script("bucket", f"Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config={table}))")
    config: dict[str, Any] = {
        "gradient_accumulation_steps": plan.micro,
        "zero_stage": plan.zero,
        "zero3_init_flag": plan.zero == 3,
        "offload_optimizer_device": "none" if plan.offload == "none" else "cpu",
        "offload_param_device": "cpu" if plan.offload == "all" else "none",
    }
    if sheet.setting.clip:
        config["gradient_clipping"] = sheet.setting.clip
    return {"distributed_type": "DEEPSPEED", "deepspeed_config": dict(sorted(config.items()))}


def _accumulate(sheet: Sheet) -> None:
    plan, clip = sheet.plan, sheet.setting.clip
    if plan.micro > 1:
        line = f"Accelerator(gradient_accumulation_steps={plan.micro}), `with accelerator.accumulate(model)`"
        sheet.in_script("micro", line)
    if clip:
        sheet.notes.append(f"clipping: accelerator.clip_grad_norm_(model.parameters(), {clip:g})")


def _recompute_in_script(sheet: Sheet) -> None:
    if sheet.plan.recompute == "full":
        sheet.in_script("recompute", "model.gradient_checkpointing_enable() of a Transformers model")
    elif sheet.plan.recompute == "selective":
        sheet.cannot("recompute", "its checkpoints hold whole layers")


def _launch(sheet: Sheet) -> dict[str, Any]:
    setting, plan = sheet.setting, sheet.plan
    table: dict[str, Any] = {
        "machine_rank": 0,
        "main_training_function": "main",
        "num_machines": setting.nodes,
        "num_processes": plan.ranks,
        "same_network": True,
        "use_cpu": setting.device == "cpu",
    }
    if setting.nodes > 1:
        table |= {"rdzv_backend": "c10d", "main_process_ip": "127.0.0.1", "main_process_port": 29500}
        sheet.notes.append("nodes: put the first node's address into main_process_ip, and each node's own machine_rank")
    else:
        table["rdzv_backend"] = "static"
    return table


def _precision(sheet: Sheet, table: dict[str, Any]) -> None:
    word = {"fp32": "no", "tf32": "no", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}.get(sheet.plan.precision)
    if word is None:
        sheet.cannot("precision", "its bf16 keeps fp32 weights")
        return
    table["mixed_precision"] = word
    sheet.says("precision")
    if sheet.plan.precision == "tf32":
        sheet.in_script("precision", TF32)
