"""Records the data flow of a forward: every operator, the values that it writes, and who reads them.

A value is the content of a storage; views of it are the same value, and writing in place makes the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ..models.data_flow import DataFlow, FlowOperator, FlowRead, FlowValue
from .lineage import storage_key, written_by
from .op_costs import size_of
from .traced_batch import TracedBatch, affine


class DataFlowRecorder:
    """Receives the operators of a forward, in order."""

    def __init__(self, model: nn.Module, inputs: Iterable[torch.Tensor], batch: TracedBatch) -> None:
        self._batch = batch
        self._operators: list[FlowOperator] = []
        self._values: list[tuple[int, complex]] = []
        """(writer, bytes)"""
        self._reads: dict[tuple[int, int], complex] = {}
        """(value, reader) -> bytes"""
        self._saved: set[int] = set()
        self._current: dict[int, int] = {}
        """Storage -> the value that it contains."""
        named = [*model.named_buffers(), *model.named_parameters()]
        self._names = {storage_key(t): name for name, t in named}
        self._modules = [""]
        self.hooks = [hook for name, module in model.named_modules() for hook in self._hooks(name, module)]
        """To be removed when the trace ends."""
        for t in inputs:
            self._write(storage_key(t), -1, t)

    def _hooks(self, name: str, module: nn.Module) -> list[Any]:
        def enter(module: nn.Module, args: Any) -> None:
            self._modules.append(name)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._modules.pop()

        return [
            module.register_forward_pre_hook(enter),
            module.register_forward_hook(leave, always_call=True),
        ]

    def add(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        describe: Callable[[str, tuple[str, ...], bool], FlowOperator],
    ) -> None:
        """Add an operator that writes data; `describe(module, parameters, elementwise)` makes its entry."""
        number, read = len(self._operators), {storage_key(t) for t in inputs}
        names = dict.fromkeys(self._names[key] for key in map(storage_key, inputs) if key in self._names)
        # one tensor given twice is read once; different views of a value are read together, such as q, k and v
        for t in {(storage_key(t), t.storage_offset(), t.shape, t.stride()): t for t in inputs}.values():
            value = self._current.get(storage_key(t))
            if value is not None:
                both = self._reads.get((value, number), 0j) + self._size(t)
                self._reads[value, number] = min(both, self._values[value][1], key=self._batch.at_job_size)
        for t in written_by(func, args, kwargs):
            if storage_key(t) not in self._names:
                self._write(storage_key(t), number, t)
        for t in outputs:
            if storage_key(t) not in read:
                self._write(storage_key(t), number, t)
        self._operators.append(describe(self._modules[-1], tuple(names), torch.Tag.pointwise in func.tags))

    def save(self, t: torch.Tensor) -> None:
        """Note that autograd keeps a tensor."""
        value = self._current.get(storage_key(t))
        if value is not None:
            self._saved.add(value)

    def forget(self, key: int) -> None:
        """Note that a storage was freed: its address may be used again."""
        self._current.pop(key, None)

    def data_flow(self) -> DataFlow:
        """All that was recorded."""
        values = (FlowValue(writer, affine(size), i in self._saved) for i, (writer, size) in enumerate(self._values))
        reads = (FlowRead(value, reader, affine(size)) for (value, reader), size in self._reads.items())
        return DataFlow(tuple(self._operators), tuple(values), tuple(reads))

    def _write(self, key: int, writer: int, t: torch.Tensor) -> None:
        self._current[key] = len(self._values)
        self._values.append((writer, self._size(t)))

    def _size(self, t: torch.Tensor) -> complex:
        return self._batch.amount(size_of(t), t.numel())
