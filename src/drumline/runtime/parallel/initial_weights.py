"""Gives a split model the serial model's weights, and constants their values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn
from torch.fx import Node

from ...core.errors import TraceError
from ...partition.capture import CapturedGraph
from ...partition.program import ParameterHolder, register_tensor
from ...partition.sharding.redistribution import part_of
from ...torchkit.fake_tensors import FakeTensor
from ...tracing.op_costs import tensors
from ..state.prebuilt import PrebuiltModel
from ..state.weights import MODULE_ATTRIBUTES, BroadcastTensor, broadcast_tensors, seeded_model
from .job_capture import JobCapture
from .placement import Placement


class InitialWeights:
    """Fills this rank's parameters and buffers, once."""

    def __init__(self, captures: JobCapture, places: Placement, root: ParameterHolder) -> None:
        self.captures, self.places, self.root = captures, places, root
        self.job, self.template = captures.job, captures.template
        self.device, self.dtype = captures.device, captures.dtype
        self._constants: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def broadcast(self, captured: CapturedGraph) -> None:
        """The serial model's weights: the first rank builds it, each tensor travels once, a rank keeps its part."""
        given = isinstance(self.job.model, PrebuiltModel)
        leads = given or dist.get_rank() == 0
        source = self.job.model.trainable(self.dtype) if isinstance(self.job.model, PrebuiltModel) else None
        if source is None and leads:
            source = seeded_model(self.job, self.dtype)
        parcels = chain(self._state(captured, source), self._attributes(source))
        broadcast_tensors(parcels, None if given or dist.get_world_size() == 1 else dist.group.WORLD, self.device)

    def _state(self, captured: CapturedGraph, source: nn.Module | None) -> Iterator[BroadcastTensor]:
        held = dict(source.named_parameters()) | dict(source.named_buffers()) if source is not None else {}
        for role in ("parameter", "buffer"):
            for name, node in captured.placeholders(role).items():
                yield BroadcastTensor(held.get(name), node.meta["val"], partial(self._keep, name, node))

    def _keep(self, name: str, node: Node, whole: torch.Tensor) -> None:
        """This rank's part of a parameter or buffer, where it has one."""
        if not self.places.has(name):
            return
        split = self.places.splits.get(name)
        if split is not None:
            whole = part_of(whole, split, self.places.groups.coordinates["tp"])
        whole = whole.clone(memory_format=torch.contiguous_format)
        trained = node.meta.get("trained")
        register_tensor(self.root, name, whole if trained is None else nn.Parameter(whole, requires_grad=bool(trained)))

    def _attributes(self, source: nn.Module | None) -> Iterator[BroadcastTensor]:
        """Tensors that modules keep as attributes, also in lists: the template's have no values, the source's are sent.

        Not parameters in a list: they would be another name of what is trained, and what is sent here is constant.
        """
        theirs = dict(source.named_modules()) if source is not None else {}
        for name, module in self.template.named_modules():
            for key, value in vars(module).items():
                mine = [] if key in MODULE_ATTRIBUTES else tensors(value)
                values: Sequence[torch.Tensor | None] = tensors(getattr(theirs[name], key)) if theirs and mine else ()
                for t, own in zip(mine, values or [None] * len(mine), strict=True):
                    if not isinstance(t, nn.Parameter):
                        yield BroadcastTensor(own, t, partial(self._know, id(t)))

    def _know(self, which: int, value: torch.Tensor) -> None:
        self._constants[which] = value.clone()

    def constants(self, constants: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The constants with their values."""
        found = {}
        for name, tensor in constants.items():
            if isinstance(tensor, FakeTensor):
                if id(tensor) not in self._constants:
                    raise TraceError(
                        f"{type(self.template).__name__} uses a tensor that is no parameter, buffer or attribute",
                        rule="what a model reads can be found in its modules",
                        fix="register it as a buffer",
                    )
                tensor = self._constants[id(tensor)]
            found[name] = tensor.to(self.device)
        return found
