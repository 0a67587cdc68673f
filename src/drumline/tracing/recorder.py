"""Watches one forward and backward on fake tensors and writes down every operator: where, how much, how deep, and what
is alive meanwhile. Nothing is computed and no parameter is allocated.
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
from torch.utils._python_dispatch import TorchDispatchMode

from .amount import Batch
from .dims import dims_of
from .entered import Entered
from .kinds import depth_of, flops_of, kind_of_call, picked_from, rearranged, size_of, tensors
from .layers import LayerSpec
from .lineage import Lineage
from .sizes import rows_of, sizes_of, type_of

RESERVE = 5
"""Values that cuDNN keeps for each that a recurrent layer with four gates makes: the gates, and the cell's state."""

LOSS = "loss"
"""The layer that holds what happens after the model."""


@dataclass(slots=True)
class Call:
    """One operator as it was called."""

    name: str
    kind: str
    flops: complex
    bytes: complex
    output: complex = 0j
    """Bytes of the values that it made."""
    number: int = -1
    """Its place in the lineage of its layer."""
    dims: tuple[int, ...] = ()
    """In the forward, the sizes that ranks can share it by."""
    dtype: str = ""
    shape: tuple[complex, ...] = ()


@dataclass(slots=True)
class Seen:
    """What was seen of one layer in one phase."""

    calls: list[Call] = field(default_factory=list)
    most_alive: complex = 0j
    depth: float = 0.0
    views: int = 0
    """Operators that only look at a tensor in another way."""
    entered: int = 0
    """Python functions, in the forward."""


@dataclass(slots=True)
class LayerTrace:
    """What was seen of one layer."""

    forward: Seen = field(default_factory=Seen)
    backward: Seen = field(default_factory=Seen)
    saved: complex = 0j
    """Bytes that came alive in its forward and stayed."""
    output: complex = 0j
    lineage: Lineage | None = None
    """Of the values that its forward makes; only where recomputation may work on it."""
    bare: dict[int, complex] = field(default_factory=dict)
    """Bytes that were taken without a value, by their place in the lineage."""
    handed: set[int] = field(default_factory=set)
    """Places of the operators that made what it hands on."""
    needed: int = 0
    """How many of the operators in the lineage a backward needs."""
    cast: float = 0.0
    """Bytes of copies of parameters in another type."""


class Recorder(TorchDispatchMode):
    """Records one training step's forward and backward. Use `with`, run the forward, call `start_backward`, go on."""

    def __init__(
        self, model: nn.Module, layers: list[LayerSpec], resident: list[torch.Tensor], batch: Batch, device: str = "cpu"
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.layers: dict[str, LayerTrace] = {}
        self.order: list[str] = []
        """Layers in the order in which they first ran."""
        self.alive = 0j
        self._batch = batch
        self._on_gpu = device == "cuda"
        self.depth = 0.0
        """Longest chain so far."""
        self._phase = "forward"
        self._stack = [""]
        self._marks: list[tuple[int, str]] = [(0, "")]
        self._sizes: dict[int, complex] = {}
        self._watch: dict[int, weakref.ref[Any]] = {}
        self._depths: dict[int, float] = {}
        self._hooks: list[Any] = []
        self._resident = {self._key(t) for t in resident}
        self._cast: set[int] = set()
        """Copies of weights that autocast made: a product with one of them is a product with the weight."""
        self._at: tuple[complex, str] = (0j, "")
        self._entered = Entered()
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

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled while tracing; torch's wrapper would cost time at every operator

    def __enter__(self) -> Recorder:
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
        """Take the hooks off the model."""
        for hook in self._hooks:
            hook.remove()

    def start_backward(self) -> None:
        """From here on, operators belong to the layer whose forward made their node."""
        self._settle(self._stack[-1])
        self._phase = "backward"
        self._counting.__exit__(None, None, None)
        self._saving.__exit__()

    def layer(self, name: str) -> LayerTrace:
        """The record of a layer, made when it is first met."""
        if name not in self.layers:
            self.layers[name] = LayerTrace(lineage=Lineage() if name in self._composite else None)
            self.order.append(name)
        return self.layers[name]

    # -- where we are

    def _entering(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            self._move(name, push=True)

        return hook

    def _leaving(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self._phase == "forward":
                layer, found = self.layer(name), tensors(output)
                layer.output += sum(map(self._size, (t for t in found if t.requires_grad)))
                if layer.lineage is not None:
                    layer.handed |= {i for t in found if (i := layer.lineage.writer(t)) is not None}
            self._stack.pop()
            self._move(self._stack[-1])

        return hook

    def _finished(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._phase == "forward":
            self._stack[0] = LOSS
            self._move(LOSS)

    def _move(self, name: str, push: bool = False) -> None:
        if push:
            self._settle(self._stack[-1])
            self._stack.append(name)
        else:
            self._settle(self._at[1])
        self.layer(name)
        self._at = (self.alive, name)
        if self._phase == "forward":
            self._marks.append((torch.autograd._get_sequence_nr(), name))

    def _settle(self, name: str) -> None:
        """What came alive since the last move was kept by the layer that we leave."""
        if self._phase == "forward":
            layer = self.layer(name)
            layer.saved += self.alive - self._at[0]
            layer.forward.entered += self._entered.taken()
            self._at = (self.alive, name)

    def _here(self) -> str:
        if self._phase == "forward" or len(self._stack) > 1:
            return self._stack[-1]
        node = torch._C._current_autograd_node()
        if node is None:
            return LOSS
        number = node._sequence_nr()
        if number >= 2**62:  # gradients of parameters have no number of their own
            return self._at[1]
        return self._marks[bisect.bisect_right(self._marks, number, key=lambda m: m[0]) - 1][1]

    # -- what is alive

    def _key(self, t: torch.Tensor) -> int:
        return int(t.untyped_storage()._cdata)

    def _dims(self, name: str, kind: str, args: Any, kwargs: Any) -> tuple[int, ...]:
        if self._phase != "forward":
            return ()
        return dims_of(name, kind, args, kwargs, self._batch.size, self._own)

    def _own(self, t: torch.Tensor) -> bool:
        return (key := self._key(t)) in self._resident or key in self._cast

    def _moved(self, name: str, args: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> complex:
        """Bytes that are read and written. Of a table, no more is read than is taken out."""
        table = picked_from(name, args)
        read = sum((self._size(t) for t in inputs if t is not table), 0j)
        written = sum(map(self._size, outputs), 0j)
        return read + written + (written if table is not None and "backward" not in name else 0j)

    def _size(self, t: torch.Tensor) -> complex:
        return self._batch.amount(size_of(t), t.numel())

    def _born(self, t: torch.Tensor, key: int) -> None:
        storage = t.untyped_storage()
        self._sizes[key] = self._batch.amount(storage.nbytes(), storage.nbytes())
        self.alive += self._sizes[key]
        self._watch[key] = weakref.ref(storage, functools.partial(self._died, key))

    def _reserve(self, outputs: list[torch.Tensor]) -> None:
        """A GPU's recurrent layer keeps more for its backward than a CPU's: it lives as long as the CPU's workspace."""
        key = self._key(outputs[-1])
        if key in self._sizes:
            more = RESERVE * self._size(outputs[0])
            self._sizes[key] += more
            self.alive += more

    def _died(self, key: int, _: Any) -> None:
        self.alive -= self._sizes.pop(key, 0j)
        self._watch.pop(key, None)
        self._depths.pop(key, None)
        self._cast.discard(key)

    def _gradient(self, p: torch.Tensor) -> None:
        """A finished gradient is counted with the gradients, not with the activations."""
        if p.grad is not None:
            key = self._key(p.grad)
            self.alive -= self._sizes.pop(key, 0j)
            self._watch.pop(key, None)
            self._resident.add(key)

    def _bias_gradient(self, gradient: torch.Tensor) -> Call:
        size, rows = self._size(gradient), rows_of(gradient, [0, *range(2, gradient.dim())])
        values = self._batch.amount(gradient.numel(), gradient.numel())
        shape = tuple(self._batch.amount(n, n) for n in rows)
        return Call("sum", "reduce", values, size, dtype=type_of([gradient], []), shape=shape)

    def _save(self, t: torch.Tensor) -> torch.Tensor:
        """Autograd keeps a tensor: all operators up to here are needed, should the layer be computed again."""
        layer = self.layer(self._stack[-1])
        if layer.lineage is not None:
            layer.needed = len(layer.lineage)
        layer.forward.views -= 1  # the next line is not the model's
        return t.detach()  # a result that kept itself would live forever

    # -- what is done

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._entered.still += 1
        try:
            return self._dispatch(func, args, kwargs or {})
        finally:
            self._entered.still -= 1

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        if func.namespace == "prim":  # questions about a tensor's device or layout
            return out
        where = self._here()
        layer = self.layer(where)
        seen = layer.forward if self._phase == "forward" else layer.backward
        if self._phase == "backward":
            self._at = (self.alive, where)
        inputs = tensors(args) + tensors(kwargs) if kwargs else tensors(args)
        outputs = tensors(out)
        read, written = [self._key(t) for t in inputs], [self._key(t) for t in outputs]
        depth = max((self._depths.get(k, 0.0) for k in read), default=0.0)
        made, number = 0j, -1
        if self._phase == "forward" and layer.lineage is not None:
            number = len(layer.lineage)
            made = sum(map(self._size, layer.lineage.add(func, args, kwargs, out)), 0j)
        if func._schema.is_mutable or any(k not in read for k in written):
            name = func._overloadpacket.__name__
            kind = kind_of_call(name, inputs, outputs)
            depth += depth_of(kind, args, out)
            if not name.startswith(("empty", "new_empty")):
                flops = flops_of(func, kind, args, kwargs, out)
                sizes = sizes_of(name, kind, args, kwargs, out)
                seen.calls.append(
                    Call(
                        name,
                        kind,
                        self._batch.amount(flops, int(4 * flops)),
                        self._moved(name, args, inputs, outputs),
                        made,
                        number,
                        self._dims(name, kind, args, kwargs),
                        type_of(inputs, outputs),
                        tuple(self._batch.amount(n, n) for n in sizes),
                    )
                )
                for t in rearranged(kind, inputs):
                    seen.calls.append(Call("contiguous", "transpose", 0j, 2 * self._size(t), dtype=type_of([t], [])))
                if self._on_gpu and name == "convolution_backward" and args[10][2]:  # cuDNN has no gradient of a bias
                    seen.calls.append(self._bias_gradient(args[0]))
                if name == "_to_copy" and self._phase == "forward" and read[0] in self._resident:
                    layer.cast += sum(size_of(t) for t in outputs)
                    self._cast.update(written)
            elif made:
                layer.bare[number] = made
        else:
            seen.views += 1
        for t, key in zip(outputs, written, strict=True):
            if key not in self._sizes and key not in self._resident:
                self._born(t, key)
            self._depths[key] = max(depth, self._depths.get(key, 0.0))
        if self._on_gpu and func._overloadpacket.__name__ == "mkldnn_rnn_layer":
            self._reserve(outputs)
        if depth > self.depth:
            seen.depth += depth - self.depth
            self.depth = depth
        seen.most_alive = max(seen.most_alive, self.alive, key=self._batch.at_real)
        return out
