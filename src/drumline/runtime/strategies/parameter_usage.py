"""How a forward uses the parameters, by one step on fake tensors: two of torch's engines need to know in advance.

DDP must know whether every trained parameter gets a gradient, or it waits for one that never comes. Under zero=3
the parameters of a layer are whole only while it runs. So a layer that is read from outside (a head that multiplies by
the embedding's weight, a table without a forward) must not be a unit of its own: it is gathered with the model's root,
which stays through the whole forward.
"""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ...core.errors import DrumlineError
from ...core.job import Job
from ...torchkit.pytree import tree_leaves
from ...tracing.fake import call_model, fake_batch, fake_mode, fake_model, first_sample
from ...tracing.layers import layers_of
from ..state.prebuilt import MissingArgument

_unused: WeakKeyDictionary[Job, bool] = WeakKeyDictionary()
"""Answers by job: a verification builds two engines of one job."""


def has_unused_parameters(job: Job) -> bool:
    """True when a fake step leaves a parameter without a gradient, or cannot be run (then anything may happen)."""
    if job not in _unused:
        _unused[job] = _leaves_unused(job)
    return _unused[job]


def _leaves_unused(job: Job) -> bool:
    if isinstance(job.loss, MissingArgument):  # the user's own loop has the loss
        return True
    mode = fake_mode()
    try:
        sample = first_sample(job)
        model, _ = fake_model(job, mode)
        value, target = fake_batch(mode, sample=sample, n=2)
        with mode, torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is worth a warning warns again in the real run
            loss = job.loss(call_model(model, value), target)
            loss = loss[0] if isinstance(loss, tuple | list) else loss
            loss.backward()
    except DrumlineError:
        raise
    except Exception:
        return True
    return any(p.requires_grad and p.grad is None for p in model.parameters())


def layers_read_outside(job: Job) -> frozenset[str]:
    """The names of the layers whose parameters a fake forward reads while they do not run.

    A forward that fails on fake tensors shows them as far as it runs.
    """
    mode = fake_mode()
    try:
        model, _ = fake_model(job, mode)
        value, _ = fake_batch(mode, sample=first_sample(job), n=2)
    except Exception:  # the user's own loop has the data
        return frozenset()
    reads = _OutsideReads(model)
    try:
        with mode, torch.random.fork_rng(devices=[]), warnings.catch_warnings(), reads:
            warnings.simplefilter("ignore")  # what is worth a warning warns again in the real run
            call_model(model, value)
    except Exception:  # noqa: S110  # the real forward raises it again
        pass
    return frozenset(reads.outside)


class _OutsideReads(TorchFunctionMode):
    """Collects the layers whose parameters are arguments of a torch function while they do not run."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.outside: set[str] = set()
        self._layer: dict[int, str] = {}
        self._running: Counter[str] = Counter()
        for spec in layers_of(model):
            self._layer |= {id(p): spec.name for p in spec.module.parameters()}
            spec.module.register_forward_pre_hook(lambda *_, name=spec.name: self._running.update([name]))
            spec.module.register_forward_hook(lambda *_, name=spec.name: self._running.subtract([name]))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            name = self._layer.get(id(leaf))
            if name is not None and not self._running[name]:
                self.outside.add(name)
        return func(*args, **(kwargs or {}))
