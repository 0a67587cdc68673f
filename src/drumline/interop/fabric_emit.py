"""Write a plan as a Python file for Lightning Fabric: `make_fabric(...)` returns a `Fabric` with DDP, FSDP, DeepSpeed
or, for tensor parallelism, ModelParallelStrategy.
"""

from __future__ import annotations

import pprint
from dataclasses import dataclass, field, replace
from typing import Any

from ..plans.plan import Plan
from . import deepspeed_emit
from .emission import DEFAULT_REASONS, EmitSettings, EmittedConfig, KeyCoverage, comment

PRECISIONS = {"fp32": "32-true", "tf32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed", "bf16-pure": "bf16-true"}


@dataclass(slots=True)
class _Program:
    """The parts of the file that depend on the strategy."""

    strategy: str
    """Its class."""
    words: dict[str, str] = field(default_factory=dict)
    """Its keyword arguments, as expressions."""
    arguments: list[str] = field(default_factory=list)
    """Parameters of `make_fabric`."""
    constants: dict[str, Any] = field(default_factory=dict)


def emit(plan: Plan, setting: EmitSettings) -> EmittedConfig:
    """The file."""
    coverage = KeyCoverage("Fabric", plan, setting)
    program = _program(coverage)
    coverage.covers("precision", "micro")
    if plan.precision not in PRECISIONS:
        coverage.cannot_express("precision", "it needs a separate plugin")
    if plan.precision == "tf32":
        coverage.set_in_script("precision", 'torch.set_float32_matmul_precision("high")')
    if plan.compile:
        coverage.set_in_script("compile", "fabric.setup(torch.compile(model), optimizer)")
    counts = program.strategy == "DeepSpeedStrategy"
    if plan.micro > 1 and counts:
        coverage.notes.append("micro: backward and optimizer.step() for every micro-batch; DeepSpeed counts them")
    elif plan.micro > 1:
        coverage.notes.append(
            "micro: `with fabric.no_backward_sync(model, enabled=not last):` around forward and backward, "
            "the loss divided by MICRO_BATCHES"
        )
    if setting.clip and not counts:
        coverage.notes.append(f"clipping: fabric.clip_gradients(model, optimizer, max_norm={setting.clip:g})")
    done = coverage.finish("")
    return replace(done, text=_text(coverage, program, str(done)))


def _program(coverage: KeyCoverage) -> _Program:
    plan = coverage.plan
    if plan.tp > 1:
        return _tensor(coverage)
    if plan.zero in (1, 2) or plan.offload == "optimizer":
        return _deepspeed(coverage)
    return _sharded(coverage) if plan.zero == 3 else _replicas(coverage)


def _replicas(coverage: KeyCoverage) -> _Program:
    plan = coverage.plan
    coverage.covers("zero", "bucket", "static")
    _recompute_in_script(coverage)
    words = {}
    if plan.bucket != Plan().bucket:
        words["bucket_cap_mb"] = f"{plan.bucket / 2**20:g}"
    if plan.static:
        words["static_graph"] = "True"
    if plan.compress != "none":
        hook = {
            "fp16": "None, default_hooks.fp16_compress_hook",
            "powersgd": "powerSGD_hook.PowerSGDState(None), powerSGD_hook.powerSGD_hook",
        }[plan.compress]
        coverage.set_in_script("compress", f"model._forward_module.register_comm_hook({hook})")
    _backend(coverage, words)
    return _Program("DDPStrategy", words)


def _sharded(coverage: KeyCoverage) -> _Program:
    plan = coverage.plan
    coverage.covers("zero", "shard", "offload", "recompute")
    program = _Program("FSDPStrategy", {"auto_wrap_policy": "{block}"}, ["block: type[torch.nn.Module]"])
    if plan.recompute == "full":
        program.words["activation_checkpointing_policy"] = "{block}"
    elif plan.recompute == "selective":
        coverage.cannot_express("recompute", "it checkpoints whole layers only")
    if plan.shards == plan.dp:
        program.words["sharding_strategy"] = '"FULL_SHARD"'
    else:
        program.words["sharding_strategy"] = '"HYBRID_SHARD"'
        program.words["device_mesh"] = f"({plan.dp // plan.shards}, {plan.shards})"
    if plan.offload == "all":
        program.words["cpu_offload"] = "True"
    _backend(coverage, program.words)
    coverage.notes.append(
        f"block: {coverage.setting.block or 'the class of the repeated layers'}, a unit that is sharded"
    )
    return program


def _deepspeed(coverage: KeyCoverage) -> _Program:
    """DeepSpeed without precision and optimizer, which Fabric and the script set."""
    table = deepspeed_emit.config(coverage)
    for key in ("bf16", "fp16", "optimizer", "compile"):
        table.pop(key, None)
    coverage.notes[:] = [note for note in coverage.notes if not note.startswith(("optimizer", "compile"))]
    for key in ("pp", "cp"):
        if getattr(coverage.plan, key) > 1:
            coverage.cannot_express(key, DEFAULT_REASONS[key])
    table.setdefault("zero_allow_untested_optimizer", True)
    if coverage.plan.offload != "none":
        table["zero_force_ds_cpu_optimizer"] = False
    return _Program("DeepSpeedStrategy", {"config": "DEEPSPEED"}, [], {"DEEPSPEED": table})


def _tensor(coverage: KeyCoverage) -> _Program:
    plan = coverage.plan
    coverage.covers("tp", "zero")
    if plan.precision == "fp16":
        coverage.cannot_express("precision", "with tp it has no loss scaling: bf16 or fp32")
    if plan.zero not in (0, 3):
        coverage.cannot_express("zero", "with tp, replicas are plain or sharded by fully_shard: zero=0 or 3")
    if plan.offload == "all":
        coverage.set_in_script("offload", "fully_shard(layer, offload_policy=CPUOffloadPolicy()) in `parallelize`")
    _recompute_in_script(coverage)
    what = "shard them by fully_shard" if plan.zero == 3 else "replicate them"
    coverage.notes.append(
        'tp: `parallelize(model, mesh)` splits the layers over mesh["tensor_parallel"] by parallelize_module'
        + (f' and lets mesh["data_parallel"] {what}' if plan.dp > 1 else "")
    )
    words = {"parallelize_fn": "parallelize", "data_parallel_size": str(plan.dp), "tensor_parallel_size": str(plan.tp)}
    _backend(coverage, words)
    argument = "parallelize: Callable[[torch.nn.Module, DeviceMesh], torch.nn.Module]"
    return _Program("ModelParallelStrategy", words, [argument])


def _backend(coverage: KeyCoverage, words: dict[str, str]) -> None:
    if coverage.plan.backend in ("gloo", "nccl"):
        words["process_group_backend"] = f'"{coverage.plan.backend}"'
        coverage.covers("backend")


def _recompute_in_script(coverage: KeyCoverage) -> None:
    if coverage.plan.recompute == "full":
        which = f"check_fn=lambda m: isinstance(m, {coverage.setting.block or 'Block'})"
        coverage.set_in_script("recompute", f"apply_activation_checkpointing(model, {which})")
    elif coverage.plan.recompute == "selective":
        coverage.cannot_express("recompute", "it checkpoints whole layers only")


def _text(coverage: KeyCoverage, program: _Program, notes: str) -> str:
    plan, setting = coverage.plan, coverage.setting
    name = program.strategy
    words = ", ".join(f"{key}={value}" for key, value in program.words.items())
    single = plan.ranks == 1 and name == "DDPStrategy"
    strategy = '"auto"' if single else f"{name}({words})"
    lines = [
        f'"""Lightning Fabric for {plan}, a batch of {setting.batch_size}; from `drumline plan --emit fabric`."""',
        "",
        *comment(notes).splitlines(),
        *([""] if notes else []),
        *(["from collections.abc import Callable", ""] if name == "ModelParallelStrategy" else []),
        *(["import torch"] if program.arguments else []),
        "from lightning.fabric import Fabric",
        *([] if single else [f"from lightning.fabric.strategies import {name}"]),
        *(["from torch.distributed.device_mesh import DeviceMesh"] if name == "ModelParallelStrategy" else []),
        "",
        f"BATCH_PER_RANK = {coverage.samples_per_rank}",
        f"MICRO_BATCHES = {plan.micro}",
        *(f"{key} = {pprint.pformat(value, sort_dicts=False)}" for key, value in program.constants.items()),
        "",
        "",
        f"def make_fabric({', '.join(program.arguments)}) -> Fabric:",
        "    return Fabric(",
        f'        accelerator="{setting.device}",',
        f"        devices={-(-plan.ranks // setting.nodes)},",
        f"        num_nodes={setting.nodes},",
        f'        precision="{PRECISIONS[plan.precision]}",',
        f"        strategy={strategy},",
        "    )",
    ]
    return "\n".join(lines) + "\n"
