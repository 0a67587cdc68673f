"""The optimizer that a config names: torch's, with the config's parameters. Names come from a fixed list."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from ...core.errors import JobError, nearest
from ...interop.imported import NamedComponent

_NAMES = ("Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
OPTIMIZERS: dict[str, Any] = {name.lower(): getattr(torch.optim, name) for name in _NAMES}
"""By lower-case name, as DeepSpeed compares them. All are element-wise."""

DEEPSPEED_ONLY = {
    "lamb": "Lamb",
    "lion": "Lion",
    "muon": "Muon",
    "onebitadam": "OneBitAdam",
    "onebitlamb": "OneBitLamb",
    "zerooneadam": "ZeroOneAdam",
    "muadam": "MuAdam",
    "muadamw": "MuAdamW",
    "musgd": "MuSGD",
}
"""Optimizers that torch lacks or implements differently."""

_DEEPSPEED_KEYS = frozenset({"torch_adam", "adam_w_mode", "bias_correction", "max_grad_norm"})
"""Keys of DeepSpeed's Adam that torch's Adam lacks."""


def named_optimizer(named: NamedComponent, where: str) -> Callable[[Any], torch.optim.Optimizer]:
    """A function (parameters) -> optimizer. Invalid configurations are refused here, before there are parameters."""
    kind, params = named.kind.lower(), dict(named.params)
    if kind in DEEPSPEED_ONLY:
        raise JobError(
            f"the optimizer {DEEPSPEED_ONLY[kind]} is DeepSpeed's own",
            where=f"{where}: optimizer.type",
            fix="pass your own instance as optimizer=, or use AdamW in the config",
        )
    if kind not in OPTIMIZERS:
        known = [c.__name__ for c in OPTIMIZERS.values()]
        raise JobError(
            f"unknown optimizer {named.kind!r}",
            where=f"{where}: optimizer.type",
            rule=", ".join(known),
            fix=nearest(named.kind, known),
        )
    if kind == "adam" and params.get("adam_w_mode", True):
        kind = "adamw"  # like DeepSpeed: its Adam uses decoupled weight decay by default
    if kind == "adamw" and not params.get("torch_adam"):
        params.setdefault("weight_decay", 0.0)  # DeepSpeed's default; torch's is 0.01
    if params.get("bias_correction", True) is not True:
        raise JobError(
            "Adam without bias correction is DeepSpeed's own", where=f"{where}: optimizer.params.bias_correction"
        )
    optimizer_class = OPTIMIZERS[kind]
    known = [name for name in inspect.signature(optimizer_class.__init__).parameters if name not in ("self", "params")]
    for key in params:
        if key not in known and key not in _DEEPSPEED_KEYS:
            raise JobError(
                f"unknown key {key!r} of the optimizer {named.kind}",
                where=f"{where}: optimizer.params.{key}",
                fix=nearest(key, known),
            )
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in params.items() if k in known}

    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = optimizer_class(parameters, **values)
        return optimizer

    try:
        make([torch.nn.Parameter(torch.zeros(1))])
    except (TypeError, ValueError) as e:
        raise JobError(f"the optimizer {named.kind} with {values}", where=f"{where}: optimizer", rule=str(e)) from None
    return make
