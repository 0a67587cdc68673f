"""Read a config of Accelerate (YAML or JSON) as a plan.

The file gives the ranks and the sharding. The batch and the number of micro-batches are set in the script, so they stay
open, unless the file uses DeepSpeed or Megatron-LM, which have keys for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..core.errors import InputError
from ..plans.plan import Plan
from . import accelerate_keys as keys
from . import deepspeed
from .config_reader import ConfigReader, KeyLog, read_table
from .imported import ImportedConfig

KINDS = {
    "NO": "",
    "MULTI_GPU": "replicas",
    "MULTI_CPU": "replicas",
    "MULTI_XPU": "replicas",
    "MULTI_NPU": "replicas",
    "MULTI_MLU": "replicas",
    "MULTI_MUSA": "replicas",
    "MULTI_SDAA": "replicas",
    "MULTI_HPU": "replicas",
    "MULTI_NEURON": "replicas",
    "XLA": "replicas",
    "TPU": "replicas",
    "MPS": "",
    "DATA_PARALLEL": "replicas",
    "MODEL_PARALLEL": "",
    "FSDP": "fsdp",
    "DEEPSPEED": "deepspeed",
    "MEGATRON_LM": "megatron",
    "TP": "tensor",
}
"""Kind of plan for each value of `distributed_type`."""

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""Sharding strategies of FSDP, in the order of their numbers from 1."""

_SIZE = "parallelism_config_{}_size"


def is_accelerate(table: Mapping[str, Any]) -> bool:
    """Whether a table is a config of Accelerate rather than DeepSpeed."""
    return any(key in table for key in ("distributed_type", "compute_environment", "num_processes", "fsdp_config"))


def ranks_of(table: Mapping[str, Any], where: str = "the config") -> int | None:
    """Number of ranks that the config names; None if it leaves that open."""
    if table.get("distributed_type") is False or str(table.get("distributed_type", "NO")).upper() in ("NO", "MPS"):
        return 1
    count = ConfigReader(table, where, KeyLog()).value("num_processes")
    if count is None or count == -1:
        return None
    return ConfigReader(table, where, KeyLog()).integer("num_processes", least=1)


def read(source: str | Path | Mapping[str, Any], ranks: int) -> ImportedConfig:
    """Read a config (a file, or a table) for a number of ranks."""
    table, where = read_table(source)
    log = KeyLog()
    top = ConfigReader(table, where, log)
    bare_no = top.value("distributed_type") is False  # YAML reads an unquoted `no` as false
    kind = "no" if bare_no else top.word("distributed_type", [k.lower() for k in KINDS]) or "no"
    _ranks(top, kind, ranks)
    if top.table.get("deepspeed_config") and (other := _other_file(top, source)) is not None:
        return _merged(top, deepspeed.read(other, ranks))
    values: dict[str, Any] = {"dp": ranks}
    clip = _sections(top, values, ranks, KINDS[kind.upper()])
    _precision(top, values)
    _compiler(top, values)
    top.close(keys.TOP)
    free = ["micro"] if "micro" not in values or values["micro"] is None else []
    return ImportedConfig(
        plan=Plan.from_table({k: v for k, v in values.items() if v is not None}, where),
        clip=clip,
        auto=tuple(log.auto),
        open_keys=tuple(free),
        given_sizes=() if free else ("micro",),
        ignored=log.ignored,
        unknown=log.unknown,
        notes=tuple(log.notes),
    )


def _ranks(top: ConfigReader, kind: str, ranks: int) -> None:
    """Check the number of ranks against the config's own."""
    named = ranks_of(top.table, top.where)
    given = top.value("num_processes")
    top.value("num_machines")
    if kind in ("no", "mps") and given not in (None, 1, -1):
        top.ignore("num_processes", f"distributed_type {kind.upper()} is one rank")
    if ranks < 1 or (named is not None and named != ranks):
        raise InputError(
            f"a config for {named or 'some'} ranks, read for {ranks}",
            where=f"{top.where}: num_processes",
            rule=f"num_processes({named}) != ranks({ranks})" if named else "at least one rank",
        )


def _sections(top: ConfigReader, values: dict[str, Any], ranks: int, kind: str) -> float | None:
    """Read the table that `distributed_type` selects; returns the gradient norm to clip at."""
    clip = None
    parts = {name: top.section(f"{name}_config") for name in ("fsdp", "deepspeed", "megatron_lm", "parallelism", "tp")}
    if kind == "fsdp":
        _fsdp(_with_prefix(parts["fsdp"]), values, _nodes(top), ranks)
    elif kind == "deepspeed":
        clip = _deepspeed(parts["deepspeed"], values)
    elif kind == "megatron":
        clip = _megatron(parts["megatron_lm"], values, ranks)
    elif kind == "tensor":
        values["tp"] = parts["tp"].integer("tp_size", least=1) or 1
        _rest(top, values, ranks)
        parts["tp"].close({})
    if parts["parallelism"].table:
        _axes(parts["parallelism"], values, ranks, sharded=kind == "fsdp")
    read = {"fsdp": "fsdp", "deepspeed": "deepspeed", "megatron": "megatron_lm", "tensor": "tp"}.get(kind)
    for name, part in parts.items():
        if part.table and name not in (read, "parallelism"):
            top.ignore(f"{name}_config", f"distributed_type is {top.table.get('distributed_type', 'NO')}")
    return clip


def _with_prefix(part: ConfigReader) -> ConfigReader:
    """Add the prefix `fsdp_` that the first releases left out."""
    known = {*keys.FSDP, "fsdp_sharding_strategy", "fsdp_offload_params"}
    names = {key: f"fsdp_{key}" if f"fsdp_{key}" in known else key for key in part.table}
    if len(set(names.values())) < len(names) or list(names) == list(names.values()):
        return part
    return ConfigReader({names[key]: value for key, value in part.table.items()}, part.where, part.log, part.path)


def _nodes(top: ConfigReader) -> int:
    return top.integer("num_machines", least=1) or 1


def _fsdp(part: ConfigReader, values: dict[str, Any], nodes: int, ranks: int) -> None:
    """FSDP versions 1 and 2."""
    version = part.integer("fsdp_version", least=1) or 1
    strategy = _strategy(part)
    whole = part.value("fsdp_reshard_after_forward")
    if version >= 2 or (strategy is None and isinstance(whole, bool)):
        kept = part.flag_or_word("fsdp_reshard_after_forward") is False
        values["zero"] = 2 if kept else 3
        if strategy:
            part.ignore("fsdp_sharding_strategy", "version 2 uses fsdp_reshard_after_forward")
    else:
        if isinstance(whole, str) and whole.upper() in STRATEGIES:  # as some releases wrote it
            strategy = strategy or whole.upper()
        values["zero"] = {"FULL_SHARD": 3, "HYBRID_SHARD": 3, "NO_SHARD": 0}.get(strategy or "FULL_SHARD", 2)
        if strategy and strategy.startswith("HYBRID"):
            _inside_nodes(part, values, nodes, ranks)
    if part.flag_or_word("fsdp_offload_params"):
        values["offload"] = "all" if values["zero"] == 3 else "optimizer" if values["zero"] else "none"
        if values["zero"] != 3:
            part.log.notes.append(f"offload={values['offload']}: parameters that are not sharded stay on the device")
    if part.flag_or_word("fsdp_activation_checkpointing"):
        values["recompute"] = "full"
    part.close(keys.FSDP)


def _strategy(part: ConfigReader) -> str | None:
    """Name of a strategy, which old files give as a number."""
    value = part.value("fsdp_sharding_strategy")
    if isinstance(value, str) and value.isdigit():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        if not 1 <= value <= len(STRATEGIES):
            raise part.bad_value("fsdp_sharding_strategy", f"a number from 1 to {len(STRATEGIES)}, or a word")
        return STRATEGIES[value - 1]
    word = part.word("fsdp_sharding_strategy", [s.lower() for s in STRATEGIES])
    return word.upper() if word else None


def _inside_nodes(part: ConfigReader, values: dict[str, Any], nodes: int, ranks: int) -> None:
    """Shard one copy inside each node; nodes are replicas of each other."""
    if ranks % nodes:
        raise InputError(
            f"{ranks} ranks on {nodes} machines",
            where=f"{part.where}: num_machines",
            rule=f"a copy is sharded inside one machine: num_processes({ranks}) % num_machines({nodes}) != 0",
        )
    if nodes > 1:
        values["shard"] = ranks // nodes


def _deepspeed(part: ConfigReader, values: dict[str, Any]) -> float | None:
    """The short form of DeepSpeed's config; without a stage, Accelerate takes stage 2."""
    stage = part.integer("zero_stage")
    if stage is not None and stage > 3:
        raise part.bad_value("zero_stage", "0, 1, 2 or 3")
    values["zero"] = 2 if stage is None else stage
    values["micro"] = part.integer("gradient_accumulation_steps", least=1)
    if values["micro"] is None and "gradient_accumulation_steps" not in part.table:
        values["micro"] = 1
    moved = {name: _device(part, name) for name in ("optimizer", "param")}
    if moved["param"] and values["zero"] != 3:
        part.ignore("offload_param_device", f"parameters are offloaded with stage 3, not {values['zero']}")
        moved["param"] = False
    values["offload"] = "all" if moved["param"] else "optimizer" if moved["optimizer"] else "none"
    clip = part.number("gradient_clipping", least=0.0)
    part.close(keys.DEEPSPEED)
    return clip or None


def _device(part: ConfigReader, name: str) -> bool:
    key = f"offload_{name}_device"
    word = part.word(key, ("none", "cpu", "nvme"))
    if word == "nvme":
        part.log.ignored[part.name(key)] = "nvme: not supported; host memory is used instead"
    return word in ("cpu", "nvme")


def _megatron(part: ConfigReader, values: dict[str, Any], ranks: int) -> float | None:
    values["tp"] = part.integer("megatron_lm_tp_degree", least=1) or 1
    values["pp"] = part.integer("megatron_lm_pp_degree", least=1) or 1
    values["micro"] = part.integer("megatron_lm_num_micro_batches", least=1) or 1
    values["cp"] = part.integer("megatron_lm_context_parallel_size", least=1) or 1
    values["ep"] = part.integer("megatron_lm_expert_model_parallel_size", least=1) or 1
    granularity = part.word("megatron_lm_recompute_granularity", ("full", "selective"))
    if part.flag_or_word("megatron_lm_recompute_activations") or granularity:
        values["recompute"] = granularity or "selective"
    if part.flag_or_word("megatron_lm_optimizer_cpu_offload"):
        values["offload"] = "optimizer"
    if part.flag_or_word("megatron_lm_use_distributed_optimizer"):
        values["zero"] = 1
    clip = part.number("megatron_lm_gradient_clipping", least=0.0)
    part.close(keys.MEGATRON)
    _rest(part, values, ranks)
    return clip or None


def _rest(part: ConfigReader, values: dict[str, Any], ranks: int) -> None:
    """Give the remaining ranks to data parallelism."""
    sizes = {key: values.get(key, 1) for key in ("tp", "pp", "cp")}
    others = sizes["tp"] * sizes["pp"] * sizes["cp"]
    if ranks % others:
        raise InputError(
            f"{ranks} ranks for {', '.join(f'{key}={n}' for key, n in sizes.items())}",
            where=part.where,
            rule=f"tp x pp x cp divides the ranks: {ranks} % {others} != 0",
        )
    values["dp"] = ranks // others


def _axes(part: ConfigReader, values: dict[str, Any], ranks: int, sharded: bool) -> None:
    """Read the mesh of `parallelism_config`, whose product is the number of ranks."""
    names = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    sizes = {name: part.integer(_SIZE.format(name), least=1) or 1 for name in names}
    part.close(keys.PARALLEL)
    product = 1
    for n in sizes.values():
        product *= n
    if product != ranks:
        raise InputError(
            f"a mesh of {product} for {ranks} ranks",
            where=f"{part.where}: {part.path}",
            rule=" x ".join(f"{name}({n})" for name, n in sizes.items()) + f" != num_processes({ranks})",
        )
    values["dp"] = sizes["dp_replicate"] * sizes["dp_shard"]
    values["tp"], values["cp"] = sizes["tp"], sizes["cp"] * sizes["sp"]
    if not sharded or sizes["dp_shard"] == 1:
        values["zero"] = 0
    elif sizes["dp_replicate"] > 1:
        values["shard"] = sizes["dp_shard"]


def _precision(top: ConfigReader, values: dict[str, Any]) -> None:
    """Read `mixed_precision`, or `fp16` of old files."""
    word = top.value("mixed_precision")
    if word is False:  # YAML reads an unquoted `no` as false
        word = "no"
    elif word is not None:
        word = top.word("mixed_precision", ("no", "fp16", "bf16", "fp8"))
    if word is None and top.flag_or_word("fp16"):
        word = "fp16"
    elif "fp16" in top.table and word is not None:
        top.ignore("fp16", "mixed_precision takes precedence")
    values["precision"] = {"no": "fp32", None: "fp32"}.get(word, word)


def _compiler(top: ConfigReader, values: dict[str, Any]) -> None:
    part = top.section("dynamo_config")
    backend = part.value("dynamo_backend") or top.value("dynamo_backend")
    values["compile"] = bool(backend) and str(backend).upper() != "NO"
    if values["compile"] and str(backend).upper() != "INDUCTOR":
        part.log.notes.append(f"compile=true: uses torch's own compiler, not {backend}")
    part.close(keys.DYNAMO)


def _other_file(top: ConfigReader, source: str | Path | Mapping[str, Any]) -> str | Path | None:
    """Path of the DeepSpeed config that the file names, relative to the file or to the working directory."""
    part = ConfigReader(top.table["deepspeed_config"], top.where, KeyLog(), "deepspeed_config")
    name = part.word("deepspeed_config_file")
    if name is None or isinstance(source, Mapping):
        return name
    sibling = Path(source).parent / name
    return sibling if sibling.exists() or not Path(name).exists() else name


def _merged(top: ConfigReader, imported: ImportedConfig) -> ImportedConfig:
    """Combine the named DeepSpeed config with the keys of Accelerate's own file."""
    part = top.section("deepspeed_config")
    part.value("deepspeed_config_file")
    part.close(keys.DEEPSPEED)
    compiled: dict[str, Any] = {}
    _compiler(top, compiled)
    reason = "deepspeed_config_file takes precedence"
    top.close({**keys.TOP, **dict.fromkeys(("mixed_precision", "fp16", "fsdp_config", "megatron_lm_config"), reason)})
    return replace(
        imported,
        plan=replace(imported.plan, compile=imported.plan.compile or bool(compiled["compile"])),
        ignored={**top.log.ignored, **imported.ignored},
        unknown={**top.log.unknown, **imported.unknown},
        notes=(*top.log.notes, *imported.notes),
        auto=(*top.log.auto, *imported.auto),
    )
