"""DeepSpeed's `ds_config.json`, read as data: the plan that it asks for, the batch, the optimizer, the schedule.

`"auto"` leaves a key to Drumline. Keys without effect here are listed with the reason, unknown ones by name; numbers of
samples that contradict each other are refused. Nothing is imported or run, whatever the config names.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.errors import InputError
from . import deepspeed_keys as keys
from .foreign import Log, Reader, read_table
from .imported import Imported as Imported
from .imported import LossScale as LossScale
from .imported import Named as Named
from .plan import Plan

FREE = {
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
"""The key of a plan that "auto" leaves open."""

STATED = {
    "train_batch_size": "batch_size",
    "train_micro_batch_size_per_gpu": "micro_size",
    "gradient_accumulation_steps": "micro",
}


def read(source: str | Path | Mapping[str, Any], ranks: int) -> Imported:
    """Read a config (a file, or a table) for a number of ranks."""
    table, where = read_table(source)
    log = Log()
    top = Reader(table, where, log)
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
    return Imported(
        plan=Plan.from_table({k: v for k, v in values.items() if v is not None}, where),
        batch_size=batch,
        micro_size=micro_size,
        optimizer=optimizer,
        schedule=schedule,
        clip=clip,
        loss_scale=scale,
        drop_last=drop_last,
        auto=tuple(log.auto),
        free=_free(top),
        stated=_stated(top),
        ignored=log.ignored,
        unknown=log.unknown,
        notes=tuple(log.notes),
    )


def _free(top: Reader) -> tuple[str, ...]:
    """What of the plan is open; micro-batches are not where the numbers of samples give their number."""
    found = dict.fromkeys(FREE[key] for key in top.log.auto if key in FREE)
    if {"batch_size", "micro_size"} <= set(_stated(top)):
        found.pop("micro", None)
    return tuple(found)


def _stated(top: Reader) -> tuple[str, ...]:
    return tuple(word for key, word in STATED.items() if isinstance(top.table.get(key), int | float))


def _parallel(top: Reader, values: dict[str, Any], ranks: int) -> None:
    """The axes of the mesh; what they leave of the ranks is data-parallel."""
    tensor, pipeline, expert = top.section("tensor_parallel"), top.section("pipeline"), top.section("expert_parallel")
    values["tp"] = tensor.whole("autotp_size") or 1  # 0 is DeepSpeed's word for none
    values["pp"] = pipeline.whole("stages", least=1) or 1
    values["ep"] = _experts(expert)
    values["cp"] = top.whole("sequence_parallel_size", least=1) or 1
    if pipeline.whole("activation_checkpoint_interval"):
        values["recompute"] = "full"
        top.log.notes.append("recompute=full: pipeline.activation_checkpoint_interval is on")
    tensor.close(keys.TENSOR)
    pipeline.close(keys.PIPELINE)
    expert.close(dict.fromkeys(expert.table, "experts are found by trying"))
    others = values["tp"] * values["pp"] * values["cp"]
    if ranks < 1 or ranks % others:
        raise InputError(
            f"{ranks} ranks for tp={values['tp']}, pp={values['pp']}, cp={values['cp']}",
            where=top.where,
            rule=f"tp x pp x cp divides the ranks: {ranks} % {others} != 0",
        )
    values["dp"] = ranks // others


def _experts(part: Reader) -> int:
    """Expert parallelism, unless it is switched off."""
    size, on = part.whole("autoep_size") or 1, part.flag("enabled")
    if on is False and size > 1:
        part.ignore("autoep_size", "expert_parallel.enabled is false")
    elif on is None and size > 1:
        part.log.notes.append(f"ep={size}: DeepSpeed itself wants expert_parallel.enabled beside it")
    return 1 if on is False else size


def _batch(top: Reader, dp: int, tp: int) -> tuple[int | None, int | None, int]:
    """Samples per step, per rank and micro-batch, and the number of micro-batches: any two give the third."""
    batch = top.whole("train_batch_size", least=1)
    micro = top.whole("train_micro_batch_size_per_gpu", least=1)
    steps = top.whole("gradient_accumulation_steps", least=1)
    if tp > 1 and batch and micro and steps and batch == micro * steps * dp * tp:
        said, batch = batch, batch // tp  # they run the same samples
        top.log.notes.append(f"a batch of {batch}: DeepSpeed's train_batch_size({said}) counts the tp({tp}) ranks")
    words = (
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
            rule=words.replace("(None)", "(a whole number)"),
            fix="give two of the three, and let the third follow" if micro and steps else "",
        )
    if micro is None:
        return batch, parts, steps or 1
    return batch, micro, steps or parts


def _precision(top: Reader, values: dict[str, Any]) -> LossScale | None:
    """The type that is computed in, and the scale of the loss in fp16."""
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
            rule="a step computes in one type",
        )
    values["precision"] = wanted[0] if wanted else "fp32"
    scale = LossScale(
        half.number("loss_scale", least=0.0) or 0.0,
        _or(half.whole("initial_scale_power"), 16),
        _or(half.whole("loss_scale_window", least=1), 1000),
        _or(half.whole("hysteresis", least=1), 2),
        _or(half.number("min_loss_scale", least=0.0), 1.0),
    )
    half.close(keys.FP16)
    brain.close(keys.BF16)
    cast.close({"lower_precision_safe_modules": "autocast decides by operator"})
    return scale if values["precision"] == "fp16" else None


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _zero(top: Reader, values: dict[str, Any]) -> None:
    """The stage, the bucket, and what lies in host memory."""
    if isinstance(top.table.get("zero_optimization"), bool):  # as in the first releases
        values["zero"] = 1 if top.flag("zero_optimization") else 0
        return
    zero = top.section("zero_optimization")
    values["zero"] = zero.whole("stage") or 0
    if values["zero"] > 3:
        raise zero.wrong("stage", "0, 1, 2 or 3")
    elements = zero.whole("reduce_bucket_size", least=1)
    if elements is not None:
        values["bucket"] = 4 * elements  # gradients are summed in fp32
        top.log.notes.append(f"bucket={4 * elements} bytes: reduce_bucket_size({elements}) numbers of 4 bytes")
    size = zero.given("mics_shard_size")
    if size not in (None, -1):
        values["shard"] = zero.whole("mics_shard_size", least=1)
    optimizer = _offloaded(zero, "offload_optimizer") or bool(zero.flag("cpu_offload"))
    parameters = _offloaded(zero, "offload_param") or bool(zero.flag("cpu_offload_param"))
    if parameters and values["zero"] != 3:
        zero.ignore("offload_param", f"parameters are offloaded with stage 3, not {values['zero']}")
        parameters = False
    if parameters and not optimizer:
        top.log.notes.append("offload=all: where parameters lie in host memory, the optimizer does too")
    values["offload"] = "all" if parameters else "optimizer" if optimizer else "none"
    zero.close(keys.ZERO, keys.CHANGES)


def _offloaded(zero: Reader, key: str) -> bool:
    part = zero.section(key)
    device = part.word("device", ("none", "cpu", "nvme"))
    part.close(keys.OFFLOAD)
    if device == "nvme":
        zero.log.ignored[part.name("device")] = "nvme: nothing is swapped to disk; it lies in host memory"
    return device in ("cpu", "nvme")


def _compress(top: Reader, values: dict[str, Any]) -> None:
    """Replicas that send their gradients in fp16; what is sharded is summed in fp32 here."""
    kind = top.word("communication_data_type", ("fp32", "fp16", "bf16", "bfp16"))
    if kind == "fp16" and not values["zero"] and all(values[key] == 1 for key in ("tp", "pp", "cp", "ep")):
        values["compress"] = "fp16"
        top.log.notes.append("compress=fp16: communication_data_type is fp16")
    elif kind:
        top.ignore("communication_data_type", keys.TOP["communication_data_type"])


def _recompute(top: Reader, values: dict[str, Any]) -> None:
    """DeepSpeed's keys tune what the model's own code checkpoints; here they turn recomputation on."""
    part = top.section("activation_checkpointing")
    wanted = [bool(part.flag("partition_activations")), bool(part.flag("cpu_checkpointing"))]
    if any([*wanted, part.whole("number_checkpoints")]):
        values["recompute"] = "full"
        top.log.notes.append("recompute=full: activation_checkpointing is on")
        for key in ("partition_activations", "cpu_checkpointing"):
            if part.table.get(key):
                part.ignore(key, keys.ACTIVATIONS[key])
    part.close(keys.ACTIVATIONS)


def _named(top: Reader, key: str) -> Named | None:
    """Type and params of `optimizer` or `scheduler`; params that are "auto" are left out."""
    part = top.section(key)
    kind = part.word("type")
    params = part.section("params")
    found = {name: value for name in params.table if (value := params.given(name)) is not None}
    part.close(keys.OPTIMIZER)
    if kind is None:
        if found:
            raise InputError(f"{key}.params without {key}.type", where=f"{top.where}: {key}", rule="both, or neither")
        return None
    for name, value in found.items():
        for number in value if isinstance(value, list) else [value]:
            if not isinstance(number, bool | int | float | str):
                raise params.wrong(name, "a number, a word, true or false, or a list of numbers")
    return Named(kind, found)
