"""Gives a split model the serial model's weights, and the captured constants their values."""

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
    """Initial values of this rank's parameters, buffers and constants."""

    def __init__(self, capture: JobCapture, placement: Placement, root: ParameterHolder) -> None:
        self.capture, self.placement, self.root = capture, placement, root
        self.job, self.template = capture.job, capture.template
        self.device, self.dtype = capture.device, capture.dtype
        self._constants: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def broadcast(self, captured: CapturedGraph) -> None:
        """Build the serial model on the first rank and broadcast each tensor once; every rank keeps its part."""
        prebuilt = isinstance(self.job.model, PrebuiltModel)
        leads = prebuilt or dist.get_rank() == 0
        source = self.job.model.trainable(self.dtype) if isinstance(self.job.model, PrebuiltModel) else None
        if source is None and leads:
            source = seeded_model(self.job, self.dtype)
        items = chain(self._state(captured, source), self._attributes(source))
        broadcast_tensors(items, None if prebuilt or dist.get_world_size() == 1 else dist.group.WORLD, self.device)

    def _state(self, captured: CapturedGraph, source: nn.Module | None) -> Iterator[BroadcastTensor]:
        values = dict(source.named_parameters()) | dict(source.named_buffers()) if source is not None else {}
        for role in ("parameter", "buffer"):
            for name, node in captured.placeholders(role).items():
                yield BroadcastTensor(values.get(name), node.meta["val"], partial(self._store, name, node))

    def _store(self, name: str, node: Node, whole: torch.Tensor) -> None:
        """Store this rank's part of a parameter or buffer, if it has one."""
        if not self.placement.has(name):
            return
        split = self.placement.splits.get(name)
        if split is not None:
            whole = part_of(whole, split, self.placement.grid.coordinates["tp"])
        whole = whole.clone(memory_format=torch.contiguous_format)
        trained = node.meta.get("trained")
        register_tensor(self.root, name, whole if trained is None else nn.Parameter(whole, requires_grad=bool(trained)))

    def _attributes(self, source: nn.Module | None) -> Iterator[BroadcastTensor]:
        """Tensors that modules keep as attributes, also in lists: the template's are fake, the source's are sent.

        Not parameters in a list: they would be another name of a trained parameter, and these are constants.
        """
        theirs = dict(source.named_modules()) if source is not None else {}
        for name, module in self.template.named_modules():
            for key, value in vars(module).items():
                mine = [] if key in MODULE_ATTRIBUTES else tensors(value)
                values: Sequence[torch.Tensor | None] = tensors(getattr(theirs[name], key)) if theirs and mine else ()
                for t, own in zip(mine, values or [None] * len(mine), strict=True):
                    if not isinstance(t, nn.Parameter):
                        yield BroadcastTensor(own, t, partial(self._store_constant, id(t)))

    def _store_constant(self, which: int, value: torch.Tensor) -> None:
        self._constants[which] = value.clone()

    def constants(self, constants: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The constants of a graph, with their values."""
        values = {}
        for name, tensor in constants.items():
            if isinstance(tensor, FakeTensor):
                if id(tensor) not in self._constants:
                    raise TraceError(
                        f"{type(self.template).__name__} uses a tensor that is no parameter, buffer or attribute",
                        rule="every tensor that a model reads is in its modules",
                        fix="register it as a buffer",
                    )
                tensor = self._constants[id(tensor)]
            values[name] = tensor.to(self.device)
        return values
