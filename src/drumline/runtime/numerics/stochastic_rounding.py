"""The update of weights and optimizer states that are stored in bf16: computed in float32, rounded stochastically.

bf16 has 8 significant bits, so an update below 1/256 of a weight would vanish if it were rounded to the nearest number,
and training would stop early. A value is therefore rounded up with a probability equal to its distance from the lower
neighbour: right on average, without memory. Of a parameter, every rank that stores the same elements rounds with the
same random numbers, so replicas stay equal; the numbers depend on seed, step and parameter alone, so a resumed run
repeats them.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ...core.errors import PlanError
from ...plans.engine_constants import ROUNDED_AT_ONCE
from ...torchkit.operators import foreach_copy_


class StochasticRounding:
    """Steps an optimizer over bf16 parameters, some at a time, on float32 copies."""

    def __init__(self, optimizer: torch.optim.Optimizer, names: dict[torch.Tensor, str], seed: int) -> None:
        """`names` identify parameters, and are the same on every rank that stores the same elements."""
        if sys.byteorder != "little":
            raise PlanError("precision=bf16-pure", rule="it needs a little-endian machine", fix="precision=bf16")
        self._optimizer, self._names, self._seed = optimizer, names, seed
        self._generators: dict[torch.device, torch.Generator] = {}

    @torch.no_grad()
    def step(self, number: int) -> None:
        """Step the optimizer once, as step `number` of the run."""
        optimizer = self._optimizer
        groups = optimizer.param_groups
        try:
            for group in groups:
                optimizer.param_groups = [group]
                self._step_group(group, number)
        finally:
            optimizer.param_groups = groups

    def _step_group(self, group: dict[str, Any], number: int) -> None:
        whole = group["params"]
        before = {k: v for k, v in group.items() if k != "params"}
        try:
            for chunk in _chunks([p for p in whole if p.grad is not None]):
                for key in group.keys() - before.keys() - {"params"}:
                    del group[key]
                group.update(before)  # some optimizers count their steps in the group
                if chunk[0].dtype is torch.bfloat16:
                    self._step_chunk(group, chunk, number)
                else:
                    group["params"] = chunk
                    self._optimizer.step()
        finally:
            group["params"] = whole

    def _step_chunk(self, group: dict[str, Any], chunk: list[nn.Parameter], number: int) -> None:
        """Widen parameters, gradients and states, step, and round parameters and states."""
        states = self._optimizer.state
        copies = [nn.Parameter(wide) for wide in _widened(chunk)]
        for copy, gradient in zip(copies, _widened([p.grad for p in chunk]), strict=True):
            copy.grad = gradient
        for key in _stored(states, chunk):
            wide = _widened([states[p][key] for p in chunk])
            for p, copy, value in zip(chunk, copies, wide, strict=True):
                states[copy][key] = value.view(states[p][key].shape)
        for p, copy in zip(chunk, copies, strict=True):
            for key, value in states.get(p, {}).items():
                states[copy].setdefault(key, value)
        group["params"] = copies
        self._optimizer.step()
        self._round_into(chunk, copies, "", number)
        for key in _stored(states, copies):
            made = [states[copy][key] for copy in copies]
            kept = [states[p].get(key) for p in chunk]
            places = [
                old if old is not None and old.dtype is torch.bfloat16 else torch.empty_like(new, dtype=torch.bfloat16)
                for old, new in zip(kept, made, strict=True)
            ]
            self._round_into(places, made, key, number, names=[self._names[p] for p in chunk])
            for copy, place in zip(copies, places, strict=True):
                states[copy][key] = place
        for p, copy in zip(chunk, copies, strict=True):
            if copy in states:
                states[p] = states.pop(copy)

    def _round_into(
        self,
        places: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        key: str,
        number: int,
        names: Sequence[str] | None = None,
    ) -> None:
        """Round float32 values into bf16 tensors, with random numbers of their own for each parameter and state."""
        flat = torch.cat([v.detach().flatten() for v in values])
        noise = torch.empty_like(flat, dtype=torch.int32)
        sizes = [v.numel() for v in values]
        names = names if names is not None else [self._names[p] for p in places]
        for part, name in zip(noise.split(sizes), names, strict=True):
            part.random_(0, 2**16, generator=self._generator(part.device, f"{self._seed}/{number}/{name}/{key}"))
        rounded = round_with(flat, noise)
        foreach_copy_(list(places), [r.view(p.shape) for r, p in zip(rounded.split(sizes), places, strict=True)])

    def _generator(self, device: torch.device, words: str) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device)
        digest = hashlib.blake2b(words.encode(), digest_size=7).digest()
        return self._generators[device].manual_seed(int.from_bytes(digest, "little"))


def round_with(values: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Flat float32 values as bf16: `noise`, from 0 to 65535, is added below the last bit that is kept. Overwrites both.

    Numbers that bf16 has stay as they are, and so do infinities; NaN stays NaN.
    """
    nan = values.isnan()
    bits = noise.add_(values.view(torch.int32))
    rounded = bits.view(torch.bfloat16).view(-1, 2)[:, 1].contiguous()
    return rounded.masked_fill_(nan, torch.nan)


def _widened(tensors: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Copies in float32, which share one memory."""
    flat = torch.cat([t.detach().flatten() for t in tensors]).float()
    parts = flat.split([t.numel() for t in tensors])
    return (part.view(t.shape) for part, t in zip(parts, tensors, strict=True))


def _stored(states: Any, parameters: Sequence[torch.Tensor]) -> list[str]:
    """The states of all parameters that have a number for each of their elements."""
    first = states.get(parameters[0], {})

    def is_stored(key: str) -> bool:
        tensors = [(states.get(p, {}).get(key), p) for p in parameters]
        return all(
            isinstance(t, torch.Tensor) and t.is_floating_point() and t.shape == p.shape and key != "step"
            for t, p in tensors
        )

    return [key for key in first if is_stored(key)]


def _chunks(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Runs of parameters of one type and device, of ROUNDED_AT_ONCE numbers at most, or one parameter."""
    run: list[nn.Parameter] = []
    size = 0
    for p in parameters:
        other = run and (p.dtype, p.device) != (run[0].dtype, run[0].device)
        if run and (other or size + p.numel() > ROUNDED_AT_ONCE):
            yield run
            run, size = [], 0
        run.append(p)
        size += p.numel()
    if run:
        yield run
