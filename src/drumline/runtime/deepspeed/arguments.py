"""DeepSpeed's own names for what `initialize` takes: `args`, `model_parameters`, `training_data`, `lr_scheduler`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypedDict

import torch
import torch.distributed as dist

from ...comm.environment import RankInfo, connect, rank_info
from ...core.errors import InputError, JobError, nearest

Config = str | Path | Mapping[str, Any]


class DeepSpeedArguments(TypedDict, total=False):
    """Arguments of DeepSpeed's `initialize` that have another name here, or none."""

    args: Any
    """The parsed command line: `deepspeed_config` in it is the config, and `local_rank` is set."""
    model_parameters: Any
    """The trainable parameters, or groups of them, for an optimizer that the config names."""
    training_data: Any
    """`data`."""
    lr_scheduler: Any
    """`scheduler`."""
    collate_fn: Callable[[list[Any]], Any] | None
    """`collate`."""
    config_params: Config | None
    """`config`, by its older name."""
    dist_init_required: bool | None
    """The group is joined if there is none: no effect."""
    distributed_port: int | None
    """The launcher decides: no effect."""
    mpu: Any
    """Refused: the plan makes the groups."""
    mesh_param: Any
    """Refused: the plan makes the mesh."""


_RENAMED = {
    "training_data": "data",
    "lr_scheduler": "scheduler",
    "collate_fn": "collate",
    "config_params": "config",
}
_REFUSED = {
    "mpu": "process groups of another library are not used; tensor_parallel.autotp_size in the config of a Job",
    "mesh_param": "the mesh follows from the plan; sequence_parallel_size in the config of a Job",
}


def renamed(own: dict[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Drumline's arguments, with those given under DeepSpeed's names in their places; `model_parameters` stays."""
    own = dict(own)
    for name in theirs:
        if name not in DeepSpeedArguments.__annotations__:
            near = nearest(name, [*own, *DeepSpeedArguments.__annotations__])
            raise TypeError(f"initialize() got an unexpected argument {name!r}. {near}")
    for name, reason in _REFUSED.items():
        if theirs.get(name) is not None:
            raise JobError(f"initialize({name}=...)", rule=reason, fix="leave it out")
    for name, mine in _RENAMED.items():
        if theirs.get(name) is None:
            continue
        if own[mine] is not None:
            raise JobError(f"initialize() got {mine} and {name}", rule="two names of one argument", fix="give one")
        own[mine] = theirs[name]
    args = theirs.get("args")
    if args is not None:
        _note_local_rank(args)
        config = config_of(args)
        if config is not None and own["config"] is not None:
            raise JobError(
                "initialize() got a config, and another in args.deepspeed_config",
                rule="one config",
                fix="omit --deepspeed_config, or config=",
            )
        own["config"] = config if config is not None else own["config"]
    own["model_parameters"] = theirs.get("model_parameters")
    return own


def config_of(args: Any) -> Config | None:
    """The config that a parsed command line names."""
    config: Config | None = getattr(args, "deepspeed_config", None)
    return config if config is not None else getattr(args, "deepscale_config", None)


def _note_local_rank(args: Any) -> None:
    """Set `args.local_rank` from the launcher's variables, as DeepSpeed does; refuse another number."""
    where = rank_info()
    given = getattr(args, "local_rank", None)
    if not where.launcher or given is None:
        return
    if given not in (-1, where.local_rank):
        raise InputError(
            f"--local_rank {given}, but {where.launcher} has started local rank {where.local_rank}",
            rule="the launcher decides",
            fix="leave --local_rank out",
        )
    args.local_rank = where.local_rank


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config FILE` to the options of a script; `initialize(args=...)` reads them."""
    group = parser.add_argument_group("DeepSpeed", "configuration, run by Drumline")
    group.add_argument("--deepspeed", action="store_true", help="for the script itself: whether to use an engine")
    group.add_argument("--deepspeed_config", metavar="FILE", help="a DeepSpeed config, in JSON")
    return parser


_BACKENDS = ("nccl", "gloo", "mpi", "shm")


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: Any = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> RankInfo:
    """Join the process group of the launcher's ranks, unless there is one. `timeout`: seconds, or a timedelta.

    Without `dist_backend`, NCCL where each rank has a GPU, else shared memory or gloo. The launcher says who the ranks
    are and where they meet, under torchrun, `drumline run`, srun and mpiexec.
    """
    if init_method not in (None, "env://"):
        raise InputError(f"init_method={init_method!r}", rule="the launcher says where ranks meet", fix="leave it out")
    if dist_backend is not None and dist_backend not in _BACKENDS:
        raise InputError(
            f"dist_backend={dist_backend!r}", rule=f"one of {', '.join(_BACKENDS)}", fix="leave it out: it is chosen"
        )
    seconds = timeout.total_seconds() if hasattr(timeout, "total_seconds") else timeout
    backend = "auto" if dist_backend == "nccl" and _shares_gpus() else dist_backend or "auto"
    where = connect(backend="auto" if dist.is_initialized() else backend, timeout=seconds)
    for name, given, real in (("rank", rank, where.rank), ("world_size", world_size, where.size)):
        if given not in (-1, None, real):
            raise InputError(f"{name}={given}, but the launcher says {real}", rule="the launcher decides")
    return where


def _shares_gpus() -> bool:
    """Without a GPU, scripts that always say nccl still run, as DeepSpeed's do with its CPU accelerator."""
    return not torch.cuda.is_available()
