"""The supported tools: read a config of DeepSpeed or Accelerate, write a plan as the config of any of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..core.errors import InputError, nearest
from ..plans import Plan
from . import accelerate, accelerate_emit, deepspeed, deepspeed_emit, fabric_emit, megatron_emit, torchtitan_emit
from .config_reader import read_table
from .emission import EmitSettings, EmittedConfig
from .imported import ImportedConfig

TOOLS: dict[str, Callable[[Plan, EmitSettings], EmittedConfig]] = {
    "deepspeed": deepspeed_emit.emit,
    "accelerate": accelerate_emit.emit,
    "torchtitan": torchtitan_emit.emit,
    "fabric": fabric_emit.emit,
    "megatron": megatron_emit.emit,
}


def read_config(source: str | Path | Mapping[str, Any], devices: int) -> ImportedConfig:
    """Read a config for at most `devices` devices: the number of ranks that it names, or all devices.

    The keys decide whether it is DeepSpeed's or Accelerate's.
    """
    table, where = read_table(source)
    if not accelerate.is_accelerate(table):
        return deepspeed.read(source, devices)
    ranks = accelerate.ranks_of(table, where)
    if ranks is not None and ranks > devices:
        raise InputError(
            f"{where} is for {ranks} ranks",
            where=f"{where}: num_processes",
            rule=f"a rank needs a device: num_processes({ranks}) > devices({devices})",
            fix=f"--devices {ranks}",
        )
    return accelerate.read(source, ranks or devices)


def config_ranks(source: str | Path | Mapping[str, Any]) -> int | None:
    """Number of ranks that a config names; None if it leaves that open, as DeepSpeed's always do."""
    table, where = read_table(source)
    return accelerate.ranks_of(table, where) if accelerate.is_accelerate(table) else None


def emit(tool: str, plan: Plan, setting: EmitSettings) -> EmittedConfig:
    """Write a plan as the config of a tool; a PlanError lists every part that the tool cannot express."""
    if tool not in TOOLS:
        raise InputError(f"no tool {tool!r}", rule=f"one of {', '.join(TOOLS)}", fix=nearest(tool, TOOLS))
    return TOOLS[tool](plan, setting)
