"""A Python file for Lightning Fabric: `make_fabric(...)` gives the `Fabric` that runs a plan, by DDP, FSDP, DeepSpeed,
or, where layers are divided, its ModelParallelStrategy.
"""

from __future__ import annotations

import pprint
from dataclasses import dataclass, field, replace
from typing import Any

from ..plan import Plan
from . import deepspeed
from .value import EVERYWHERE, Emitted, Setting, Sheet, comment

PRECISIONS = {"fp32": "32-true", "tf32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed", "bf16-pure": "bf16-true"}


@dataclass(slots=True)
class _Program:
    """What differs between the strategies."""

    strategy: str
    """Its class."""
    words: dict[str, str] = field(default_factory=dict)
    """What it is called with, as expressions."""
    arguments: list[str] = field(default_factory=list)
    """What `make_fabric` must be given."""
    constants: dict[str, Any] = field(default_factory=dict)


def emit(plan: Plan, setting: Setting) -> Emitted:
    """The file."""
    sheet = Sheet("Fabric", plan, setting)
    program = _program(sheet)
    sheet.says("precision", "micro")
    if plan.precision not in PRECISIONS:
        sheet.cannot("precision", "it needs a plugin of its own")
    if plan.precision == "tf32":
        sheet.in_script("precision", 'torch.set_float32_matmul_precision("high")')
    if plan.compile:
        sheet.in_script("compile", "fabric.setup(torch.compile(model), optimizer)")
    counts = program.strategy == "DeepSpeedStrategy"
    if plan.micro > 1 and counts:
        sheet.notes.append("micro: backward and optimizer.step() for every micro-batch; DeepSpeed counts them")
    elif plan.micro > 1:
        sheet.notes.append(
            "micro: `with fabric.no_backward_sync(model, enabled=not last):` around forward and backward, "
            "the loss divided by MICRO_BATCHES"
        )
    if setting.clip and not counts:
        sheet.notes.append(f"clipping: fabric.clip_gradients(model, optimizer, max_norm={setting.clip:g})")
    done = sheet.close("")
    return replace(done, text=_text(sheet, program, str(done)))


def _program(sheet: Sheet) -> _Program:
    plan = sheet.plan
    if plan.tp > 1:
        return _tensor(sheet)
    if plan.zero in (1, 2) or plan.offload == "optimizer":
        return _deepspeed(sheet)
    return _sharded(sheet) if plan.zero == 3 else _replicas(sheet)


def _replicas(sheet: Sheet) -> _Program:
    plan = sheet.plan
    sheet.says("zero", "bucket", "static")
    _recompute_in_script(sheet)
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
        sheet.in_script("compress", f"model._forward_module.register_comm_hook({hook})")
    _backend(sheet, words)
    return _Program("DDPStrategy", words)


def _sharded(sheet: Sheet) -> _Program:
    plan = sheet.plan
    sheet.says("zero", "shard", "offload", "recompute")
    program = _Program("FSDPStrategy", {"auto_wrap_policy": "{block}"}, ["block: type[torch.nn.Module]"])
    if plan.recompute == "full":
        program.words["activation_checkpointing_policy"] = "{block}"
    elif plan.recompute == "selective":
        sheet.cannot("recompute", "its checkpoints hold whole layers")
    if plan.shards == plan.dp:
        program.words["sharding_strategy"] = '"FULL_SHARD"'
    else:
        program.words["sharding_strategy"] = '"HYBRID_SHARD"'
        program.words["device_mesh"] = f"({plan.dp // plan.shards}, {plan.shards})"
    if plan.offload == "all":
        program.words["cpu_offload"] = "True"
    _backend(sheet, program.words)
    sheet.notes.append(f"block: {sheet.setting.block or 'the class of the repeated layers'}, a unit that is sharded")
    return program


def _deepspeed(sheet: Sheet) -> _Program:
    """Fabric tells DeepSpeed the precision by itself, and has an optimizer of the script's."""
    table = deepspeed.config(sheet)
    for key in ("bf16", "fp16", "optimizer", "compile"):
        table.pop(key, None)
    sheet.notes[:] = [note for note in sheet.notes if not note.startswith(("optimizer", "compile"))]
    for key in ("pp", "cp"):
        if getattr(sheet.plan, key) > 1:
            sheet.cannot(key, EVERYWHERE[key])
    table.setdefault("zero_allow_untested_optimizer", True)
    if sheet.plan.offload != "none":
        table["zero_force_ds_cpu_optimizer"] = False
    return _Program("DeepSpeedStrategy", {"config": "DEEPSPEED"}, [], {"DEEPSPEED": table})


def _tensor(sheet: Sheet) -> _Program:
    plan = sheet.plan
    sheet.says("tp", "zero")
    if plan.precision == "fp16":
        sheet.cannot("precision", "beside tp it has no loss scale: bf16 or fp32")
    if plan.zero not in (0, 3):
        sheet.cannot("zero", "beside tp its replicas are whole, or sharded by fully_shard: zero=0 or 3")
    if plan.offload == "all":
        sheet.in_script("offload", "fully_shard(layer, offload_policy=CPUOffloadPolicy()) in `parallelize`")
    _recompute_in_script(sheet)
    what = "shard them by fully_shard" if plan.zero == 3 else "replicate them"
    sheet.notes.append(
        'tp: `parallelize(model, mesh)` divides the layers over mesh["tensor_parallel"] by parallelize_module'
        + (f' and lets mesh["data_parallel"] {what}' if plan.dp > 1 else "")
    )
    words = {"parallelize_fn": "parallelize", "data_parallel_size": str(plan.dp), "tensor_parallel_size": str(plan.tp)}
    _backend(sheet, words)
    argument = "parallelize: Callable[[torch.nn.Module, DeviceMesh], torch.nn.Module]"
    return _Program("ModelParallelStrategy", words, [argument])


def _backend(sheet: Sheet, words: dict[str, str]) -> None:
    if sheet.plan.backend in ("gloo", "nccl"):
        words["process_group_backend"] = f'"{sheet.plan.backend}"'
        sheet.says("backend")


def _recompute_in_script(sheet: Sheet) -> None:
    if sheet.plan.recompute == "full":
        which = f"check_fn=lambda m: isinstance(m, {sheet.setting.block or 'Block'})"
        sheet.in_script("recompute", f"apply_activation_checkpointing(model, {which})")
    elif sheet.plan.recompute == "selective":
        sheet.cannot("recompute", "its checkpoints hold whole layers")


def _text(sheet: Sheet, program: _Program, told: str) -> str:
    plan, setting = sheet.plan, sheet.setting
    name = program.strategy
    words = ", ".join(f"{key}={value}" for key, value in program.words.items())
    single = plan.ranks == 1 and name == "DDPStrategy"
    strategy = '"auto"' if single else f"{name}({words})"
    lines = [
        f'"""Lightning Fabric for {plan}, a batch of {setting.batch_size}; from `drumline plan --emit fabric`."""',
        "",
        *comment(told).splitlines(),
        *([""] if told else []),
        *(["from collections.abc import Callable", ""] if name == "ModelParallelStrategy" else []),
        *(["import torch"] if program.arguments else []),
        "from lightning.fabric import Fabric",
        *([] if single else [f"from lightning.fabric.strategies import {name}"]),
        *(["from torch.distributed.device_mesh import DeviceMesh"] if name == "ModelParallelStrategy" else []),
        "",
        f"BATCH_PER_RANK = {sheet.share}",
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
