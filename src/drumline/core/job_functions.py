"""How the functions of a job are called: a loss that the model returns, optimizers by name, objects in their place."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

from .errors import JobError

_NAMED = ("named_parameters", "named_params", "named")
"""Names of the first argument of an optimizer function that takes pairs (name, parameter)."""


def loss_of_output(output: Any, target: Any) -> Any:
    """The loss that a model returned: `output.loss`, `output["loss"]`, the first of a tuple, or the output itself."""
    if isinstance(output, Mapping):
        loss = output.get("loss")
    elif isinstance(output, tuple | list):
        loss = output[0] if output else None
    else:
        loss = getattr(output, "loss", output)
    if loss is None:
        raise JobError(
            f"the model returned no loss: its {type(output).__name__} has "
            f"{', '.join(map(str, output)) if isinstance(output, Mapping) and output else 'none'}",
            rule="a Job without `loss` trains on the loss that the model returns",
            fix="put the labels into the batch, under the name that the model's forward has for them; or give the job "
            "a loss: loss=lambda output, batch: ...",
        )
    return loss


def takes_names(optimizer: Callable[..., Any]) -> bool:
    """Whether an optimizer function wants pairs (name, parameter): its first argument is called so."""
    try:
        arguments = list(inspect.signature(optimizer).parameters)
    except (TypeError, ValueError):  # built in, without a signature
        return False
    return bool(arguments) and arguments[0] in _NAMED


def is_module(value: Any) -> bool:
    """Whether this is a module of torch, which can be called like a function."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def refuse_object(key: str, value: Any) -> None:
    """Refuse an object in the place of the function that makes one: each run needs its own."""
    if key in ("callbacks", "data", "validation") and isinstance(value, list | tuple):
        raise JobError(
            f"Job.{key} is a {type(value).__name__}, not a function",
            rule="it is a function that makes them: every run, on every rank, begins with new ones",
            fix=f"{key}=lambda: [...]",
        )
    torch: Any = sys.modules.get("torch")
    if torch is None:  # then no object of torch exists
        return
    if key == "model" and is_module(value):
        name = type(value).__name__
        raise JobError(
            f"Job.model is a {name}, not a function that makes one",
            rule="every rank, `verify` and its reference train a model of their own, built after the seed was set",
            fix=f"model=lambda: {name}(...), or a function that builds, loads and returns it",
        )
    kinds = {"optimizer": torch.optim.Optimizer, "schedule": torch.optim.lr_scheduler.LRScheduler}
    if key in kinds and isinstance(value, kinds[key]):
        name, argument = type(value).__name__, "parameters" if key == "optimizer" else "optimizer"
        raise JobError(
            f"Job.{key} is a {name}, not a function that makes one",
            rule=f"every plan makes it anew, on this rank's part of the {argument}",
            fix=f"{key}=lambda {argument}: {name}({argument}, ...)",
        )
    data = (torch.utils.data.Dataset, torch.utils.data.DataLoader)
    if key in ("data", "validation") and isinstance(value, data):
        name = type(value).__name__
        raise JobError(
            f"Job.{key} is a {name}, not a function that makes one",
            rule=f"{key} is a function: every rank opens the data for itself",
            fix=f"{key}=lambda: {name}(...)",
        )
