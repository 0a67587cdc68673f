"""Which layers are read from outside: a head that multiplies by the embedding's weight, a table that nobody calls.

Under zero=3 the parameters of a layer are there while it runs, and are shards at other times. So what is read from
elsewhere must not be a unit of its own: it is gathered with the model's root, which stays through the whole forward.
"""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ..core.job import Job
from ..tracing.fake import call, fake_batch, fake_mode, fake_model, first_sample
from ..tracing.layers import layers_of


def read_outside(job: Job) -> frozenset[str]:
    """The names of the layers whose parameters one forward without values reads while they do not run.

    A forward that cannot be run without values shows them as far as it comes.
    """
    mode = fake_mode()
    try:
        model, _ = fake_model(job, mode)
        value, _ = fake_batch(job, mode, sample=first_sample(job), n=2)
    except Exception:  # a loop of the user's own has the data
        return frozenset()
    reads = _Reads(model)
    try:
        with mode, torch.random.fork_rng(devices=[]), warnings.catch_warnings(), reads:
            warnings.simplefilter("ignore")  # what is worth a warning warns again in the real run
            call(model, value)
    except Exception:  # noqa: S110  # whatever is wrong with it is told by the real forward
        pass
    return frozenset(reads.outside)


class _Reads(TorchFunctionMode):
    """Sees every function of torch that is called, with what it is given."""

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
