"""Write a plan as Accelerate's YAML: DDP, FSDP2 or DeepSpeed, whichever shards as the plan does.

Settings of the `Accelerator` object rather than the file (micro-batches, options of DDP) are given as a line of the
script, in a comment on top of the file.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..plans.plan import Plan
from . import yaml_text
from .deepspeed_emit import TF32
from .emission import EmitSettings, EmittedConfig, KeyCoverage, comment


def emit(plan: Plan, setting: EmitSettings) -> EmittedConfig:
    """The file."""
    coverage = KeyCoverage("Accelerate", plan, setting)
    base = _strategy(plan)(coverage)
    table = {"compute_environment": "LOCAL_MACHINE", "debug": False, **base, **_launch(coverage)}
    _precision(coverage, table)
    if plan.compile:
        table["dynamo_config"] = {"dynamo_backend": "INDUCTOR", "dynamo_mode": "default"}
        coverage.covers("compile")
    if plan.backend in ("nccl", "gloo"):
        coverage.set_in_script(
            "backend", f'Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="{plan.backend}")])'
        )
    coverage.notes.append(
        f"batch: DataLoader(batch_size={coverage.samples_per_rank}), samples of one rank in one micro-batch"
    )
    done = coverage.finish("")
    head = f"{plan}: a batch of {setting.batch_size}, from `drumline plan --emit accelerate`"
    text = comment(f"{head}\n{done}") + yaml_text.write(dict(sorted(table.items())))
    return replace(done, text=text)


def _strategy(plan: Plan) -> Any:
    """FSDP2 if parameters are sharded, DeepSpeed if only states are, else DDP."""
    if plan.zero == 3 and plan.offload != "optimizer":
        return _fsdp
    return _deepspeed if plan.zero or plan.offload != "none" else _replicas


def _replicas(coverage: KeyCoverage) -> dict[str, Any]:
    plan, cpu = coverage.plan, coverage.setting.device == "cpu"
    coverage.covers("zero")
    _accumulate(coverage)
    _recompute_in_script(coverage)
    for key in ("tp", "cp"):
        if getattr(plan, key) > 1:
            coverage.cannot_express(key, "it needs FSDP2: zero=3")
    options = []
    if plan.bucket != Plan().bucket:
        options.append(("bucket", f"bucket_cap_mb={plan.bucket / 2**20:g}"))
    if plan.static:
        options.append(("static", "static_graph=True"))
    if plan.compress != "none":
        hook = {"fp16": "FP16", "powersgd": "POWER_SGD"}[plan.compress]
        options.append(("compress", f"comm_hook=DDPCommunicationHookType.{hook}"))
    for key, option in options:
        coverage.set_in_script(key, f"Accelerator(kwargs_handlers=[DistributedDataParallelKwargs({option})])")
    return {"distributed_type": "NO" if plan.ranks == 1 else "MULTI_CPU" if cpu else "MULTI_GPU"}


def _fsdp(coverage: KeyCoverage) -> dict[str, Any]:
    plan = coverage.plan
    coverage.covers("zero", "offload", "recompute", "shard", "tp", "cp")
    _accumulate(coverage)
    if plan.recompute == "selective":
        coverage.cannot_express("recompute", "it checkpoints whole layers only")
    if (plan.tp > 1 or plan.cp > 1) and plan.shards == 1:
        coverage.cannot_express(
            "tp" if plan.tp > 1 else "cp", "FSDP2 then shards over at least two ranks: dp=2 or more"
        )
    fsdp = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": True,
        "fsdp_offload_params": plan.offload == "all",
        "fsdp_activation_checkpointing": plan.recompute == "full",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": False,
        **_units(coverage),
    }
    table: dict[str, Any] = {"distributed_type": "FSDP", "fsdp_config": dict(sorted(fsdp.items()))}
    if plan.shards != plan.ranks:
        sizes = {"dp_replicate": plan.dp // plan.shards, "dp_shard": plan.shards, "tp": plan.tp, "cp": plan.cp}
        table["parallelism_config"] = {f"parallelism_config_{key}_size": n for key, n in sorted(sizes.items())}
    if plan.cp > 1:
        coverage.notes.append("cp: `with accelerator.maybe_context_parallel(...)` divides the buffers of a batch")
    return table


def _units(coverage: KeyCoverage) -> dict[str, Any]:
    """Units of sharding: the repeated layers by their class, or modules by size."""
    setting = coverage.setting
    if not setting.blocks:
        return {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 1_000_000}
    if not setting.block:
        coverage.notes.append("units: by the model's _no_split_modules; else name fsdp_transformer_layer_cls_to_wrap")
        return {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    return {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_transformer_layer_cls_to_wrap": setting.block}


def _deepspeed(coverage: KeyCoverage) -> dict[str, Any]:
    plan = coverage.plan
    coverage.covers("zero", "micro", "offload")
    _recompute_in_script(coverage)
    if not plan.zero:
        coverage.cannot_express("offload", "it offloads with stage 1, 2 or 3 of DeepSpeed")
    elif plan.offload == "all" and plan.zero < 3:
        coverage.cannot_express("offload", "parameters are offloaded with zero=3")
    if plan.shard == plan.dp:
        coverage.covers("shard")
    if plan.bucket != Plan().bucket:
        table = f'{{"zero_optimization": {{"stage": {plan.zero}, "reduce_bucket_size": {plan.bucket // 4}}}, ...}}'
        coverage.set_in_script("bucket", f"Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config={table}))")
    config: dict[str, Any] = {
        "gradient_accumulation_steps": plan.micro,
        "zero_stage": plan.zero,
        "zero3_init_flag": plan.zero == 3,
        "offload_optimizer_device": "none" if plan.offload == "none" else "cpu",
        "offload_param_device": "cpu" if plan.offload == "all" else "none",
    }
    if coverage.setting.clip:
        config["gradient_clipping"] = coverage.setting.clip
    return {"distributed_type": "DEEPSPEED", "deepspeed_config": dict(sorted(config.items()))}


def _accumulate(coverage: KeyCoverage) -> None:
    plan, clip = coverage.plan, coverage.setting.clip
    if plan.micro > 1:
        line = f"Accelerator(gradient_accumulation_steps={plan.micro}), `with accelerator.accumulate(model)`"
        coverage.set_in_script("micro", line)
    if clip:
        coverage.notes.append(f"clipping: accelerator.clip_grad_norm_(model.parameters(), {clip:g})")


def _recompute_in_script(coverage: KeyCoverage) -> None:
    if coverage.plan.recompute == "full":
        coverage.set_in_script("recompute", "model.gradient_checkpointing_enable() of a Transformers model")
    elif coverage.plan.recompute == "selective":
        coverage.cannot_express("recompute", "it checkpoints whole layers only")


def _launch(coverage: KeyCoverage) -> dict[str, Any]:
    setting, plan = coverage.setting, coverage.plan
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
        coverage.notes.append(
            "nodes: put the first node's address into main_process_ip, and each node's own machine_rank"
        )
    else:
        table["rdzv_backend"] = "static"
    return table


def _precision(coverage: KeyCoverage, table: dict[str, Any]) -> None:
    word = {"fp32": "no", "tf32": "no", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}.get(coverage.plan.precision)
    if word is None:
        coverage.cannot_express("precision", "its bf16 keeps fp32 weights")
        return
    table["mixed_precision"] = word
    coverage.covers("precision")
    if coverage.plan.precision == "tf32":
        coverage.set_in_script("precision", TF32)
