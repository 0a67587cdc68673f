"""Accelerate's config, YAML or JSON, read as data: the plan that it asks for.

Such a file says who takes part and what is sharded. The batch, and into how many micro-batches it is cut, stand in the
script: they are open here, unless the file goes through DeepSpeed or Megatron-LM, which have keys for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..core.errors import InputError
from . import accelerate_keys as keys
from . import deepspeed
from .foreign import Log, Reader, read_table
from .imported import Imported
from .plan import Plan

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
"""What the words of `distributed_type` mean for a plan."""

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""FSDP's, in the order of their numbers from 1."""

_SIZE = "parallelism_config_{}_size"


def is_accelerate(table: Mapping[str, Any]) -> bool:
    """Whether a table is Accelerate's, and not DeepSpeed's."""
    return any(key in table for key in ("distributed_type", "compute_environment", "num_processes", "fsdp_config"))


def ranks_of(table: Mapping[str, Any], where: str = "the config") -> int | None:
    """How many ranks the config itself names; None where it leaves that open."""
    if table.get("distributed_type") is False or str(table.get("distributed_type", "NO")).upper() in ("NO", "MPS"):
        return 1
    count = Reader(table, where, Log()).given("num_processes")
    if count is None or count == -1:
        return None
    return Reader(table, where, Log()).whole("num_processes", least=1)


def read(source: str | Path | Mapping[str, Any], ranks: int) -> Imported:
    """Read a config (a file, or a table) for a number of ranks."""
    table, where = read_table(source)
    log = Log()
    top = Reader(table, where, log)
    bare_no = top.given("distributed_type") is False  # as YAML reads the word without quotes
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
    return Imported(
        plan=Plan.from_table({k: v for k, v in values.items() if v is not None}, where),
        clip=clip,
        auto=tuple(log.auto),
        free=tuple(free),
        stated=() if free else ("micro",),
        ignored=log.ignored,
        unknown=log.unknown,
        notes=tuple(log.notes),
    )


def _ranks(top: Reader, kind: str, ranks: int) -> None:
    """The config's own number of ranks, where it has one, is the number that it is read for."""
    named = ranks_of(top.table, top.where)
    given = top.given("num_processes")
    top.given("num_machines")
    if kind in ("no", "mps") and given not in (None, 1, -1):
        top.ignore("num_processes", f"distributed_type {kind.upper()} is one rank")
    if ranks < 1 or (named is not None and named != ranks):
        raise InputError(
            f"a config for {named or 'some'} ranks, read for {ranks}",
            where=f"{top.where}: num_processes",
            rule=f"num_processes({named}) != ranks({ranks})" if named else "there is at least one rank",
        )


def _sections(top: Reader, values: dict[str, Any], ranks: int, kind: str) -> float | None:
    """The tables by way of training: the one that `distributed_type` names counts; gives the largest norm."""
    clip = None
    parts = {name: top.section(f"{name}_config") for name in ("fsdp", "deepspeed", "megatron_lm", "parallelism", "tp")}
    if kind == "fsdp":
        _fsdp(_with_prefix(parts["fsdp"]), values, _nodes(top), ranks)
    elif kind == "deepspeed":
        clip = _deepspeed(parts["deepspeed"], values)
    elif kind == "megatron":
        clip = _megatron(parts["megatron_lm"], values, ranks)
    elif kind == "tensor":
        values["tp"] = parts["tp"].whole("tp_size", least=1) or 1
        _rest(top, values, ranks)
        parts["tp"].close({})
    if parts["parallelism"].table:
        _axes(parts["parallelism"], values, ranks, sharded=kind == "fsdp")
    read = {"fsdp": "fsdp", "deepspeed": "deepspeed", "megatron": "megatron_lm", "tensor": "tp"}.get(kind)
    for name, part in parts.items():
        if part.table and name not in (read, "parallelism"):
            top.ignore(f"{name}_config", f"distributed_type is {top.table.get('distributed_type', 'NO')}")
    return clip


def _with_prefix(part: Reader) -> Reader:
    """The first releases wrote these keys without `fsdp_` before them."""
    known = {*keys.FSDP, "fsdp_sharding_strategy", "fsdp_offload_params"}
    names = {key: f"fsdp_{key}" if f"fsdp_{key}" in known else key for key in part.table}
    if len(set(names.values())) < len(names) or list(names) == list(names.values()):
        return part
    return Reader({names[key]: value for key, value in part.table.items()}, part.where, part.log, part.path)


def _nodes(top: Reader) -> int:
    return top.whole("num_machines", least=1) or 1


def _fsdp(part: Reader, values: dict[str, Any], nodes: int, ranks: int) -> None:
    """FSDP's first and second form."""
    version = part.whole("fsdp_version", least=1) or 1
    strategy = _strategy(part)
    whole = part.given("fsdp_reshard_after_forward")
    if version >= 2 or (strategy is None and isinstance(whole, bool)):
        kept = part.switch("fsdp_reshard_after_forward") is False
        values["zero"] = 2 if kept else 3
        if strategy:
            part.ignore("fsdp_sharding_strategy", "fsdp_reshard_after_forward says it in version 2")
    else:
        if isinstance(whole, str) and whole.upper() in STRATEGIES:  # as some releases wrote it
            strategy = strategy or whole.upper()
        values["zero"] = {"FULL_SHARD": 3, "HYBRID_SHARD": 3, "NO_SHARD": 0}.get(strategy or "FULL_SHARD", 2)
        if strategy and strategy.startswith("HYBRID"):
            _inside_nodes(part, values, nodes, ranks)
    if part.switch("fsdp_offload_params"):
        values["offload"] = "all" if values["zero"] == 3 else "optimizer" if values["zero"] else "none"
        if values["zero"] != 3:
            part.log.notes.append(f"offload={values['offload']}: parameters that are not sharded stay on the device")
    if part.switch("fsdp_activation_checkpointing"):
        values["recompute"] = "full"
    part.close(keys.FSDP)


def _strategy(part: Reader) -> str | None:
    """The word, or in old files the number, of a strategy."""
    value = part.given("fsdp_sharding_strategy")
    if isinstance(value, str) and value.isdigit():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        if not 1 <= value <= len(STRATEGIES):
            raise part.wrong("fsdp_sharding_strategy", f"a number from 1 to {len(STRATEGIES)}, or a word")
        return STRATEGIES[value - 1]
    word = part.word("fsdp_sharding_strategy", [s.lower() for s in STRATEGIES])
    return word.upper() if word else None


def _inside_nodes(part: Reader, values: dict[str, Any], nodes: int, ranks: int) -> None:
    """A copy lies inside a node, and nodes are replicas of each other."""
    if ranks % nodes:
        raise InputError(
            f"{ranks} ranks on {nodes} machines",
            where=f"{part.where}: num_machines",
            rule=f"a copy lies inside a machine: num_processes({ranks}) % num_machines({nodes}) != 0",
        )
    if nodes > 1:
        values["shard"] = ranks // nodes


def _deepspeed(part: Reader, values: dict[str, Any]) -> float | None:
    """DeepSpeed by a few keys; without a stage, Accelerate takes the second."""
    stage = part.whole("zero_stage")
    if stage is not None and stage > 3:
        raise part.wrong("zero_stage", "0, 1, 2 or 3")
    values["zero"] = 2 if stage is None else stage
    values["micro"] = part.whole("gradient_accumulation_steps", least=1)
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


def _device(part: Reader, name: str) -> bool:
    key = f"offload_{name}_device"
    word = part.word(key, ("none", "cpu", "nvme"))
    if word == "nvme":
        part.log.ignored[part.name(key)] = "nvme: nothing is swapped to disk; it lies in host memory"
    return word in ("cpu", "nvme")


def _megatron(part: Reader, values: dict[str, Any], ranks: int) -> float | None:
    values["tp"] = part.whole("megatron_lm_tp_degree", least=1) or 1
    values["pp"] = part.whole("megatron_lm_pp_degree", least=1) or 1
    values["micro"] = part.whole("megatron_lm_num_micro_batches", least=1) or 1
    values["cp"] = part.whole("megatron_lm_context_parallel_size", least=1) or 1
    values["ep"] = part.whole("megatron_lm_expert_model_parallel_size", least=1) or 1
    granularity = part.word("megatron_lm_recompute_granularity", ("full", "selective"))
    if part.switch("megatron_lm_recompute_activations") or granularity:
        values["recompute"] = granularity or "selective"
    if part.switch("megatron_lm_optimizer_cpu_offload"):
        values["offload"] = "optimizer"
    if part.switch("megatron_lm_use_distributed_optimizer"):
        values["zero"] = 1
    clip = part.number("megatron_lm_gradient_clipping", least=0.0)
    part.close(keys.MEGATRON)
    _rest(part, values, ranks)
    return clip or None


def _rest(part: Reader, values: dict[str, Any], ranks: int) -> None:
    """What the other axes leave of the ranks is data-parallel."""
    sizes = {key: values.get(key, 1) for key in ("tp", "pp", "cp")}
    others = sizes["tp"] * sizes["pp"] * sizes["cp"]
    if ranks % others:
        raise InputError(
            f"{ranks} ranks for {', '.join(f'{key}={n}' for key, n in sizes.items())}",
            where=part.where,
            rule=f"tp x pp x cp divides the ranks: {ranks} % {others} != 0",
        )
    values["dp"] = ranks // others


def _axes(part: Reader, values: dict[str, Any], ranks: int, sharded: bool) -> None:
    """The mesh of `parallelism_config`: its product is the number of ranks."""
    names = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    sizes = {name: part.whole(_SIZE.format(name), least=1) or 1 for name in names}
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


def _precision(top: Reader, values: dict[str, Any]) -> None:
    """`mixed_precision`, or in old files a switch for fp16."""
    word = top.given("mixed_precision")
    if word is False:  # a bare `no` is false in YAML
        word = "no"
    elif word is not None:
        word = top.word("mixed_precision", ("no", "fp16", "bf16", "fp8"))
    if word is None and top.switch("fp16"):
        word = "fp16"
    elif "fp16" in top.table and word is not None:
        top.ignore("fp16", "mixed_precision says it")
    values["precision"] = {"no": "fp32", None: "fp32"}.get(word, word)


def _compiler(top: Reader, values: dict[str, Any]) -> None:
    part = top.section("dynamo_config")
    backend = part.given("dynamo_backend") or top.given("dynamo_backend")
    values["compile"] = bool(backend) and str(backend).upper() != "NO"
    if values["compile"] and str(backend).upper() != "INDUCTOR":
        part.log.notes.append(f"compile=true: by torch's own compiler, not by {backend}")
    part.close(keys.DYNAMO)


def _other_file(top: Reader, source: str | Path | Mapping[str, Any]) -> str | Path | None:
    """The DeepSpeed config that the file names: as it stands, or beside the file."""
    part = Reader(top.table["deepspeed_config"], top.where, Log(), "deepspeed_config")
    name = part.word("deepspeed_config_file")
    if name is None or isinstance(source, Mapping):
        return name
    beside = Path(source).parent / name
    return beside if beside.exists() or not Path(name).exists() else name


def _merged(top: Reader, found: Imported) -> Imported:
    """The plan of the file that is named; what else stands in Accelerate's is accounted for."""
    part = top.section("deepspeed_config")
    part.given("deepspeed_config_file")
    part.close(keys.DEEPSPEED)
    compiled: dict[str, Any] = {}
    _compiler(top, compiled)
    reason = "the file of deepspeed_config_file says it"
    top.close({**keys.TOP, **dict.fromkeys(("mixed_precision", "fp16", "fsdp_config", "megatron_lm_config"), reason)})
    return replace(
        found,
        plan=replace(found.plan, compile=found.plan.compile or bool(compiled["compile"])),
        ignored={**top.log.ignored, **found.ignored},
        unknown={**top.log.unknown, **found.unknown},
        notes=(*top.log.notes, *found.notes),
        auto=(*top.log.auto, *found.auto),
    )
