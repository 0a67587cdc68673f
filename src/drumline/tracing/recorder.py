"""Records every operator of one forward and backward on fake tensors: layer, work, depth and live memory. Nothing is
computed and no parameter is allocated.
"""

from __future__ import annotations

import bisect
import functools
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..models.data_flow import FlowOperator
from ..torchkit.autograd import next_node_number, running_node_number
from ..torchkit.dispatch_modes import UnwrappedDispatchMode
from ..torchkit.schemas import writes_in_place
from .data_flow import DataFlowRecorder
from .layers import LayerSpec
from .lineage import Lineage, storage_key
from .op_costs import copied_first, depth_of, flops_of, kind_of_call, size_of, sparsely_read, tensors
from .op_sizes import dims_of, rows_of, sizes_of, type_of
from .python_calls import PythonCallCounter
from .traced_batch import TracedBatch, affine

RESERVE = 5
"""Values that cuDNN keeps per output value of a recurrent layer with four gates: the gates and the cell state."""

LOSS = "loss"
"""The layer for operators after the model."""


@dataclass(slots=True)
class OperatorCall:
    """One call of an operator."""

    name: str
    kind: str
    flops: complex
    bytes: complex
    output: complex = 0j
    """Bytes of the values that it created."""
    number: int = -1
    """Its index in the lineage of its layer."""
    dims: tuple[int, ...] = ()
    """In the forward, the sizes that ranks can split it by."""
    dtype: str = ""
    shape: tuple[complex, ...] = ()


@dataclass(slots=True)
class PhaseTrace:
    """The record of one layer in one phase."""

    calls: list[OperatorCall] = field(default_factory=list)
    most_alive: complex = 0j
    depth: float = 0.0
    views: int = 0
    """Views: operators that move no data."""
    python_calls: int = 0
    """Python functions entered in the forward."""


@dataclass(slots=True)
class LayerTrace:
    """The record of one layer."""

    forward: PhaseTrace = field(default_factory=PhaseTrace)
    backward: PhaseTrace = field(default_factory=PhaseTrace)
    saved: complex = 0j
    """Bytes allocated in its forward that stayed alive."""
    output: complex = 0j
    lineage: Lineage | None = None
    """Data flow of its forward; only where it may be recomputed."""
    unwritten: dict[int, complex] = field(default_factory=dict)
    """Bytes allocated without a value, by index in the lineage."""
    output_ops: set[int] = field(default_factory=set)
    """Indices of the operators that created its outputs."""
    needed: int = 0
    """Number of operators in the lineage that a backward needs."""
    cast: float = 0.0
    """Bytes of parameters cast to another type."""


class TraceRecorder(UnwrappedDispatchMode):
    """Records one training step: enter, run the forward, call `start_backward`, run the backward."""

    def __init__(
        self,
        model: nn.Module,
        layers: list[LayerSpec],
        resident: list[torch.Tensor],
        batch: TracedBatch,
        device: str = "cpu",
        flow: DataFlowRecorder | None = None,
    ) -> None:
        super().__init__()
        self.flow = flow
        self.layers: dict[str, LayerTrace] = {}
        self.order: list[str] = []
        """Layers in the order of their first call."""
        self.alive = 0j
        self._batch = batch
        self._on_gpu = device == "cuda"
        self.depth = 0.0
        """The longest chain of dependent operations so far."""
        self._phase = "forward"
        self._stack = [""]
        self._marks: list[tuple[int, str]] = [(0, "")]
        self._sizes: dict[int, complex] = {}
        self._watch: dict[int, weakref.ref[Any]] = {}
        self._depths: dict[int, float] = {}
        self._hooks: list[Any] = list(flow.hooks) if flow else []
        self._resident = {storage_key(t) for t in resident}
        self._cast: set[int] = set()
        """Copies of weights made by autocast: a matmul with one of them is a matmul with the weight."""
        self._at: tuple[complex, str] = (0j, "")
        self._entered = PythonCallCounter()
        self._counting = self._entered.counting() if self._on_gpu else nullcontext()
        self._saving = torch.autograd.graph.saved_tensors_hooks(self._save, lambda t: t)
        self._composite = {spec.name for spec in layers if spec.composite}
        for spec in layers:
            self._hooks.append(spec.module.register_forward_pre_hook(self._entering(spec.name)))
            self._hooks.append(spec.module.register_forward_hook(self._leaving(spec.name), always_call=True))
        self._hooks.append(model.register_forward_hook(self._finished, always_call=True))
        for p in model.parameters():
            if p.requires_grad:
                self._hooks.append(p.register_post_accumulate_grad_hook(self._gradient))

    def __enter__(self) -> TraceRecorder:
        self._saving.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's own
        self._counting.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch's own
        if self._phase == "forward":
            self._counting.__exit__(None, None, None)
            self._saving.__exit__(*error)

    def close(self) -> None:
        """Remove the hooks from the model."""
        for hook in self._hooks:
            hook.remove()

    def start_backward(self) -> None:
        """Start the backward: from here on, an operator belongs to the layer whose forward created its node."""
        self._close_span(self._stack[-1])
        self._phase = "backward"
        self._counting.__exit__(None, None, None)
        self._saving.__exit__()

    def layer(self, name: str) -> LayerTrace:
        """The record of a layer, created at its first use."""
        if name not in self.layers:
            self.layers[name] = LayerTrace(lineage=Lineage() if name in self._composite else None)
            self.order.append(name)
        return self.layers[name]

    # -- the current layer

    def _entering(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            self._switch_to(name, push=True)

        return hook

    def _leaving(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self._phase == "forward":
                layer, outputs = self.layer(name), tensors(output)
                layer.output += sum(map(self._size, (t for t in outputs if t.requires_grad)))
                if layer.lineage is not None:
                    layer.output_ops |= {i for t in outputs if (i := layer.lineage.writer(t)) is not None}
            self._stack.pop()
            self._switch_to(self._stack[-1])

        return hook

    def _finished(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._phase == "forward":
            self._stack[0] = LOSS
            self._switch_to(LOSS)

    def _switch_to(self, name: str, push: bool = False) -> None:
        if push:
            self._close_span(self._stack[-1])
            self._stack.append(name)
        else:
            self._close_span(self._at[1])
        self.layer(name)
        self._at = (self.alive, name)
        if self._phase == "forward":
            self._marks.append((next_node_number(), name))

    def _close_span(self, name: str) -> None:
        """Memory allocated since the last change of layer was kept by the layer that we leave."""
        if self._phase == "forward":
            layer = self.layer(name)
            layer.saved += self.alive - self._at[0]
            layer.forward.python_calls += self._entered.take_count()
            self._at = (self.alive, name)

    def _current_layer(self) -> str:
        if self._phase == "forward" or len(self._stack) > 1:
            return self._stack[-1]
        number = running_node_number()
        if number is None:
            return LOSS
        if number < 0:  # accumulating a parameter's gradient has no number
            return self._at[1]
        return self._marks[bisect.bisect_right(self._marks, number, key=lambda m: m[0]) - 1][1]

    # -- live memory

    def _dims(self, name: str, kind: str, args: Any, kwargs: Any) -> tuple[int, ...]:
        if self._phase != "forward":
            return ()
        return dims_of(name, kind, args, kwargs, self._batch.size, self._is_weight)

    def _is_weight(self, t: torch.Tensor) -> bool:
        return (key := storage_key(t)) in self._resident or key in self._cast

    def _bytes_moved(self, name: str, args: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> complex:
        """Bytes read and written. Of a table, only the selected rows are read."""
        table = sparsely_read(name, args)
        read = sum((self._size(t) for t in inputs if t is not table), 0j)
        written = sum(map(self._size, outputs), 0j)
        return read + written + (written if table is not None and "backward" not in name else 0j)

    def _size(self, t: torch.Tensor) -> complex:
        return self._batch.amount(size_of(t), t.numel())

    def _allocated(self, t: torch.Tensor, key: int) -> None:
        storage = t.untyped_storage()
        self._sizes[key] = self._batch.amount(storage.nbytes(), storage.nbytes())
        self.alive += self._sizes[key]
        self._watch[key] = weakref.ref(storage, functools.partial(self._freed, key))

    def _add_workspace(self, outputs: list[torch.Tensor]) -> None:
        """A GPU's recurrent layer keeps more for its backward than a CPU's, as long as the CPU's workspace lives."""
        key = storage_key(outputs[-1])
        if key in self._sizes:
            more = RESERVE * self._size(outputs[0])
            self._sizes[key] += more
            self.alive += more

    def _freed(self, key: int, _: Any) -> None:
        self.alive -= self._sizes.pop(key, 0j)
        self._watch.pop(key, None)
        self._depths.pop(key, None)
        self._cast.discard(key)
        if self.flow is not None:
            self.flow.forget(key)

    def _gradient(self, p: torch.Tensor) -> None:
        """Count a finished gradient with the gradients, not with the activations."""
        if p.grad is not None:
            key = storage_key(p.grad)
            self.alive -= self._sizes.pop(key, 0j)
            self._watch.pop(key, None)
            self._resident.add(key)

    def _extra_calls(self, name: str, kind: str, args: Any, inputs: list[torch.Tensor]) -> list[OperatorCall]:
        """Kernels that a call launches besides its own."""
        copies = copied_first(kind, inputs)
        calls = [OperatorCall("contiguous", "transpose", 0j, 2 * self._size(t), dtype=type_of([t], [])) for t in copies]
        if self._on_gpu and name == "convolution_backward" and args[10][2]:
            calls.append(self._bias_gradient(args[0]))  # cuDNN does not compute the gradient of a bias
        return calls

    def _bias_gradient(self, gradient: torch.Tensor) -> OperatorCall:
        size, rows = self._size(gradient), rows_of(gradient, [0, *range(2, gradient.dim())])
        values = self._batch.amount(gradient.numel(), gradient.numel())
        shape = tuple(self._batch.amount(n, n) for n in rows)
        return OperatorCall("sum", "reduce", values, size, dtype=type_of([gradient], []), shape=shape)

    def _save(self, t: torch.Tensor) -> torch.Tensor:
        """Autograd saves a tensor: a recomputation needs all operators up to here."""
        layer = self.layer(self._stack[-1])
        if layer.lineage is not None:
            layer.needed = len(layer.lineage)
        if self.flow is not None:
            self.flow.save(t)
        layer.forward.views -= 1  # the detach below is not part of the model
        return t.detach()  # a result that saves itself would never be freed

    # -- operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._entered.paused += 1
        try:
            return self._dispatch(func, args, kwargs or {})
        finally:
            self._entered.paused -= 1

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        if func.namespace == "prim":  # queries of a tensor's device or layout
            return out
        where = self._current_layer()
        layer = self.layer(where)
        seen = layer.forward if self._phase == "forward" else layer.backward
        if self._phase == "backward":
            self._at = (self.alive, where)
        inputs = tensors(args) + tensors(kwargs) if kwargs else tensors(args)
        outputs = tensors(out)
        read, written = [storage_key(t) for t in inputs], [storage_key(t) for t in outputs]
        depth = max((self._depths.get(k, 0.0) for k in read), default=0.0)
        made, number = 0j, -1
        if self._phase == "forward" and layer.lineage is not None:
            number = len(layer.lineage)
            made = sum(map(self._size, layer.lineage.add(func, args, kwargs, out)), 0j)
        if writes_in_place(func) or any(k not in read for k in written):
            name = func.overloadpacket.__name__
            kind = kind_of_call(name, inputs, outputs)
            own_depth = depth_of(kind, args, out)
            depth += own_depth
            if not name.startswith(("empty", "new_empty")):
                flops = flops_of(func, kind, args, kwargs, out)
                call = OperatorCall(
                    name,
                    kind,
                    self._batch.amount(flops, int(4 * flops)),
                    self._bytes_moved(name, args, inputs, outputs),
                    made,
                    number,
                    self._dims(name, kind, args, kwargs),
                    type_of(inputs, outputs),
                    tuple(self._batch.amount(n, n) for n in sizes_of(name, kind, args, kwargs, out)),
                )
                seen.calls += [call, *self._extra_calls(name, kind, args, inputs)]
                if self.flow is not None and self._phase == "forward":
                    self.flow.add(
                        func, args, kwargs, inputs, outputs, functools.partial(_entry, call, where, own_depth)
                    )
                if name == "_to_copy" and self._phase == "forward" and read[0] in self._resident:
                    layer.cast += sum(size_of(t) for t in outputs)
                    self._cast.update(written)
            elif made:
                layer.unwritten[number] = made
        else:
            seen.views += 1
        for t, key in zip(outputs, written, strict=True):
            if key not in self._sizes and key not in self._resident:
                self._allocated(t, key)
            self._depths[key] = max(depth, self._depths.get(key, 0.0))
        if self._on_gpu and func.overloadpacket.__name__ == "mkldnn_rnn_layer":
            self._add_workspace(outputs)
        if depth > self.depth:
            seen.depth += depth - self.depth
            self.depth = depth
        seen.most_alive = max(seen.most_alive, self.alive, key=self._batch.at_job_size)
        return out


def _entry(
    call: OperatorCall, layer: str, depth: float, module: str, parameters: tuple[str, ...], elementwise: bool
) -> FlowOperator:
    """A call as an operator of the data flow."""
    work, moved = affine(call.flops), affine(call.bytes)
    return FlowOperator(call.name, call.kind, layer, module, work, moved, depth, parameters, elementwise)
