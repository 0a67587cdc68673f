"""Read DeepSpeed's `ds_config.json` as a plan, a batch, an optimizer and a schedule.

`"auto"` leaves a key to Drumline. Keys without effect are reported with the reason, unknown ones by name; contradictory
batch sizes are refused. Nothing that the config names is imported or run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.errors import InputError
from ..plans.plan import Plan
from . import deepspeed_keys as keys
from .config_reader import ConfigReader, KeyLog, read_table
from .imported import ImportedConfig as ImportedConfig
from .imported import LossScaleSettings as LossScaleSettings
from .imported import NamedComponent as NamedComponent

PLAN_KEYS = {
    "gradient_accumulation_steps": "micro",
    "bf16.enabled": "precision",
    "fp16.enabled": "precision",
    "torch_autocast.enabled": "precision",
    "zero_optimization.stage": "zero",
    "zero_optimization.reduce_bucket_size": "bucket",
    "zero_optimization.offload_optimizer.device": "offload",
    "zero_optimization.offload_param.device": "offload",
    "tensor_parallel.autotp_size": "tp",
    "pipeline.stages": "pp",
    "expert_parallel.autoep_size": "ep",
    "sequence_parallel_size": "cp",
    "zero_optimization.mics_shard_size": "shard",
}
"""The plan key that "auto" leaves open."""

BATCH_KEYS = {
    "train_batch_size": "batch_size",
    "train_micro_batch_size_per_gpu": "micro_size",
    "gradient_accumulation_steps": "micro",
}


def read(source: str | Path | Mapping[str, Any], ranks: int) -> ImportedConfig:
    """Read a config (a file, or a table) for a number of ranks."""
    table, where = read_table(source)
    log = KeyLog()
    top = ConfigReader(table, where, log)
    values: dict[str, Any] = {}
    _parallel(top, values, ranks)
    batch, micro_size, values["micro"] = _batch(top, values["dp"], values["tp"])
    scale = _precision(top, values)
    _zero(top, values)
    _compress(top, values)
    _recompute(top, values)
    compiler = top.section("compile")
    values["compile"] = bool(compiler.flag("deepcompile"))
    compiler.close(dict.fromkeys(compiler.table, "torch.compile's own choices are kept"))
    optimizer, schedule = _named(top, "optimizer"), _named(top, "scheduler")
    clip = top.number("gradient_clipping", least=0.0) or None
    drop_last = bool(top.flag("dataloader_drop_last"))
    top.close(keys.TOP, keys.CHANGES)
    return ImportedConfig(
        plan=Plan.from_table({k: v for k, v in values.items() if v is not None}, where),
        batch_size=batch,
        micro_size=micro_size,
        optimizer=optimizer,
        schedule=schedule,
        clip=clip,
        loss_scale=scale,
        drop_last=drop_last,
        auto=tuple(log.auto),
        open_keys=_open_keys(top),
        given_sizes=_given_sizes(top),
        ignored=log.ignored,
        unknown=log.unknown,
        notes=tuple(log.notes),
    )


def _open_keys(top: ConfigReader) -> tuple[str, ...]:
    """Open plan keys; `micro` is not open where the batch sizes determine it."""
    open_keys = dict.fromkeys(PLAN_KEYS[key] for key in top.log.auto if key in PLAN_KEYS)
    if {"batch_size", "micro_size"} <= set(_given_sizes(top)):
        open_keys.pop("micro", None)
    return tuple(open_keys)


def _given_sizes(top: ConfigReader) -> tuple[str, ...]:
    return tuple(word for key, word in BATCH_KEYS.items() if isinstance(top.table.get(key), int | float))


def _parallel(top: ConfigReader, values: dict[str, Any], ranks: int) -> None:
    """Read the mesh axes; the remaining ranks are data-parallel."""
    tensor, pipeline, expert = top.section("tensor_parallel"), top.section("pipeline"), top.section("expert_parallel")
    values["tp"] = tensor.integer("autotp_size") or 1  # 0 means none
    values["pp"] = pipeline.integer("stages", least=1) or 1
    values["ep"] = _experts(expert)
    values["cp"] = top.integer("sequence_parallel_size", least=1) or 1
    if pipeline.integer("activation_checkpoint_interval"):
        values["recompute"] = "full"
        top.log.notes.append("recompute=full: pipeline.activation_checkpoint_interval is on")
    tensor.close(keys.TENSOR)
    pipeline.close(keys.PIPELINE)
    expert.close(dict.fromkeys(expert.table, "experts are detected automatically"))
    others = values["tp"] * values["pp"] * values["cp"]
    if ranks < 1 or ranks % others:
        raise InputError(
            f"{ranks} ranks for tp={values['tp']}, pp={values['pp']}, cp={values['cp']}",
            where=top.where,
            rule=f"tp x pp x cp divides the ranks: {ranks} % {others} != 0",
        )
    values["dp"] = ranks // others


def _experts(part: ConfigReader) -> int:
    """Expert parallelism, unless it is switched off."""
    size, on = part.integer("autoep_size") or 1, part.flag("enabled")
    if on is False and size > 1:
        part.ignore("autoep_size", "expert_parallel.enabled is false")
    elif on is None and size > 1:
        part.log.notes.append(f"ep={size}: DeepSpeed itself also needs expert_parallel.enabled")
    return 1 if on is False else size


def _batch(top: ConfigReader, dp: int, tp: int) -> tuple[int | None, int | None, int]:
    """Samples per step, samples per rank and micro-batch, and micro-batches: any two determine the third."""
    batch = top.integer("train_batch_size", least=1)
    micro = top.integer("train_micro_batch_size_per_gpu", least=1)
    steps = top.integer("gradient_accumulation_steps", least=1)
    if tp > 1 and batch and micro and steps and batch == micro * steps * dp * tp:
        given, batch = batch, batch // tp  # tensor-parallel ranks run the same samples
        top.log.notes.append(f"a batch of {batch}: DeepSpeed's train_batch_size({given}) counts the tp({tp}) ranks")
    equation = (
        f"train_batch_size({batch}) != train_micro_batch_size_per_gpu({micro})"
        f" x gradient_accumulation_steps({steps}) x data-parallel ranks({dp})"
    )
    if batch is None:
        return (None if micro is None else micro * (steps or 1) * dp), micro, steps or 1
    parts, rest = divmod(batch, (micro or 1) * (steps or 1) * dp)
    if rest or parts < 1 or (micro and steps and parts != 1):
        raise InputError(
            f"a batch of {batch} on {dp} data-parallel ranks",
            where=f"{top.where}: train_batch_size",
            rule=equation.replace("(None)", "(a whole number)"),
            fix="give two of the three; the third follows" if micro and steps else "",
        )
    if micro is None:
        return batch, parts, steps or 1
    return batch, micro, steps or parts


def _precision(top: ConfigReader, values: dict[str, Any]) -> LossScaleSettings | None:
    """Read the compute type, and the loss scale of fp16."""
    half = top.section("fp16")
    brain = top.section("bf16") if "bf16" in top.table or "bfloat16" not in top.table else top.section("bfloat16")
    cast = top.section("torch_autocast")
    wanted = [name for name, part in (("fp16", half), ("bf16", brain)) if part.flag("enabled")]
    kind = cast.word("dtype", ("fp16", "float16", "half", "bf16", "bfloat16", "fp32", "float32"))
    if cast.flag("enabled"):
        wanted.append("fp16" if kind in ("fp16", "float16", "half") else "bf16" if kind != "fp32" else "fp32")
    if len(set(wanted)) > 1:
        raise InputError(
            f"{' and '.join(wanted)} are both enabled",
            where=f"{top.where}: {wanted[0]}.enabled",
            rule="a step has one compute type",
        )
    values["precision"] = wanted[0] if wanted else "fp32"
    scale = LossScaleSettings(
        half.number("loss_scale", least=0.0) or 0.0,
        _or(half.integer("initial_scale_power"), 16),
        _or(half.integer("loss_scale_window", least=1), 1000),
        _or(half.integer("hysteresis", least=1), 2),
        _or(half.number("min_loss_scale", least=0.0), 1.0),
    )
    half.close(keys.FP16)
    brain.close(keys.BF16)
    cast.close({"lower_precision_safe_modules": "autocast decides by operator"})
    return scale if values["precision"] == "fp16" else None


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _zero(top: ConfigReader, values: dict[str, Any]) -> None:
    """Read the stage, the bucket size and the offloading."""
    if isinstance(top.table.get("zero_optimization"), bool):  # as in the first releases
        values["zero"] = 1 if top.flag("zero_optimization") else 0
        return
    zero = top.section("zero_optimization")
    values["zero"] = zero.integer("stage") or 0
    if values["zero"] > 3:
        raise zero.bad_value("stage", "0, 1, 2 or 3")
    elements = zero.integer("reduce_bucket_size", least=1)
    if elements is not None:
        values["bucket"] = 4 * elements  # gradients are summed in fp32
        top.log.notes.append(f"bucket={4 * elements} bytes: reduce_bucket_size({elements}) numbers of 4 bytes")
    size = zero.value("mics_shard_size")
    if size not in (None, -1):
        values["shard"] = zero.integer("mics_shard_size", least=1)
    optimizer = _offloaded(zero, "offload_optimizer") or bool(zero.flag("cpu_offload"))
    parameters = _offloaded(zero, "offload_param") or bool(zero.flag("cpu_offload_param"))
    if parameters and values["zero"] != 3:
        zero.ignore("offload_param", f"parameters are offloaded with stage 3, not {values['zero']}")
        parameters = False
    if parameters and not optimizer:
        top.log.notes.append("offload=all: with parameters in host memory, the optimizer is there too")
    values["offload"] = "all" if parameters else "optimizer" if optimizer else "none"
    zero.close(keys.ZERO, keys.CHANGES)


def _offloaded(zero: ConfigReader, key: str) -> bool:
    part = zero.section(key)
    device = part.word("device", ("none", "cpu", "nvme"))
    part.close(keys.OFFLOAD)
    if device == "nvme":
        zero.log.ignored[part.name("device")] = "nvme: not supported; host memory is used instead"
    return device in ("cpu", "nvme")


def _compress(top: ConfigReader, values: dict[str, Any]) -> None:
    """Compress gradients to fp16 for plain replicas; sharded gradients are summed in fp32."""
    kind = top.word("communication_data_type", ("fp32", "fp16", "bf16", "bfp16"))
    if kind == "fp16" and not values["zero"] and all(values[key] == 1 for key in ("tp", "pp", "cp", "ep")):
        values["compress"] = "fp16"
        top.log.notes.append("compress=fp16: communication_data_type is fp16")
    elif kind:
        top.ignore("communication_data_type", keys.TOP["communication_data_type"])


def _recompute(top: ConfigReader, values: dict[str, Any]) -> None:
    """Turn recomputation on; DeepSpeed's keys only tune what the model itself checkpoints."""
    part = top.section("activation_checkpointing")
    wanted = [bool(part.flag("partition_activations")), bool(part.flag("cpu_checkpointing"))]
    if any([*wanted, part.integer("number_checkpoints")]):
        values["recompute"] = "full"
        top.log.notes.append("recompute=full: activation_checkpointing is on")
        for key in ("partition_activations", "cpu_checkpointing"):
            if part.table.get(key):
                part.ignore(key, keys.ACTIVATIONS[key])
    part.close(keys.ACTIVATIONS)


def _named(top: ConfigReader, key: str) -> NamedComponent | None:
    """Type and params of `optimizer` or `scheduler`, without params that are "auto"."""
    part = top.section(key)
    kind = part.word("type")
    params = part.section("params")
    arguments = {name: value for name in params.table if (value := params.value(name)) is not None}
    part.close(keys.OPTIMIZER)
    if kind is None:
        if arguments:
            raise InputError(f"{key}.params without {key}.type", where=f"{top.where}: {key}", rule="both, or neither")
        return None
    for name, value in arguments.items():
        for number in value if isinstance(value, list) else [value]:
            if not isinstance(number, bool | int | float | str):
                raise params.bad_value(name, "a number, a word, true or false, or a list of numbers")
    return NamedComponent(kind, arguments)
