"""Gives a split model the serial model's weights, and constants their values."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ...errors import TraceError
from ...partition.capture import Captured
from ...partition.moves import part_of
from ...partition.program import Holder, put
from ..adopt.given import Given
from ..weights import seeded_model
from .captures import Captures
from .placing import Placement


class Filling:
    """Fills this rank's parameters and buffers, once."""

    def __init__(self, captures: Captures, places: Placement, root: Holder) -> None:
        self.captures, self.places, self.root = captures, places, root
        self.job, self.template = captures.job, captures.template
        self.device, self.dtype = captures.device, captures.dtype
        self._constants: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def fill(self, captured: Captured) -> None:
        """The serial model's weights: the first rank builds it, each tensor travels once, a rank keeps its part."""
        given = isinstance(self.job.model, Given)
        leads = given or dist.get_rank() == 0
        source = self.job.model.take(self.dtype) if isinstance(self.job.model, Given) else None
        if source is None and leads:
            source = seeded_model(self.job, self.dtype)
        held = dict(source.named_parameters()) | dict(source.named_buffers()) if source is not None else {}
        for role in ("parameter", "buffer"):
            for name, node in captured.placeholders(role).items():
                whole = self._arrived(held.get(name), node.meta["val"], given)
                if not self.places.has(name):
                    continue
                split = self.places.splits.get(name)
                if split is not None:
                    whole = part_of(whole, split, self.places.groups.at["tp"]).contiguous().clone()
                if role == "parameter":
                    put(self.root, name, nn.Parameter(whole, requires_grad=bool(node.meta["trained"])))
                else:
                    put(self.root, name, whole)
        self._constants = self._attributes(source, given)

    def _arrived(self, value: torch.Tensor | None, like: torch.Tensor, given: bool) -> torch.Tensor:
        if value is None:
            whole = torch.empty(like.shape, dtype=like.dtype, device=self.device)
        else:
            whole = value.detach().to(self.device, like.dtype).contiguous().clone()
        if not given and dist.get_world_size() > 1:
            dist.broadcast(whole, 0)
        return whole

    def _attributes(self, source: nn.Module | None, given: bool) -> dict[int, torch.Tensor]:
        """Tensors that modules keep as plain attributes: the template's have no values, so the source's are sent."""
        theirs = dict(source.named_modules()) if source is not None else {}
        found: dict[int, torch.Tensor] = {}
        for name, module in self.template.named_modules():
            for key, value in vars(module).items():
                if isinstance(value, torch.Tensor):
                    found[id(value)] = self._arrived(getattr(theirs[name], key) if theirs else None, value, given)
        return found

    def values(self, constants: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The constants with their values."""
        found = {}
        for name, tensor in constants.items():
            if isinstance(tensor, FakeTensor):
                if id(tensor) not in self._constants:
                    raise TraceError(
                        f"{type(self.template).__name__} uses a tensor that is no parameter, buffer or attribute",
                        rule="what a model reads can be found in its modules", fix="register it as a buffer",
                    )  # fmt: skip
                tensor = self._constants[id(tensor)]
            found[name] = tensor.to(self.device)
        return found
