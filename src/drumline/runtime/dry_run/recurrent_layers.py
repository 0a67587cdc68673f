"""Stand-ins for a GPU's recurrent layers, which torch cannot run without values.

A stand-in computes nothing. It returns outputs of the same shapes, saves as many bytes for the backward, and allocates
as much workspace as the layer does. These are measured by running such a layer once, alone, on zeros, on the local GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from ...core.errors import JobError
from ...torchkit.recurrent import weight_names
from ...tracing.op_costs import size_of, tensors
from ..numerics.precision import compute_precision
from ..numerics.recurrent import note_recurrent_layers, skip_flattening

Measured = TypeVar("Measured")


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """The outputs of a layer, and the bytes of its forward."""

    outputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    kept: int
    """Allocated by the forward and live after it, outputs included."""
    peak: int
    """Peak bytes allocated during the forward."""


@dataclass(frozen=True, slots=True)
class GradientLayout:
    """Which outputs have a gradient, and whether the first's is contiguous: a layer creates or copies the others."""

    output: bool
    states: bool
    contiguous: bool

    @classmethod
    def of(cls, output: torch.Tensor | None, states: Iterable[torch.Tensor | None]) -> GradientLayout:
        """The layout of some gradients."""
        return cls(output is not None, any(s is not None for s in states), output is None or output.is_contiguous())


LAYOUTS = (
    GradientLayout(True, False, True),
    GradientLayout(True, False, False),
    GradientLayout(True, True, True),
    GradientLayout(True, True, False),
    GradientLayout(False, True, True),
)


class RecurrentStandIns:
    """Replaces a model's recurrent layers by stand-ins, and caches what was measured."""

    def __init__(self, device: torch.device, precision: str, *, separate_weights: bool) -> None:
        self._device, self._precision, self._separate_weights = device, precision, separate_weights
        """`separate_weights`: the weights of a layer are not contiguous in memory, so the layer copies them."""
        self._cache: dict[Any, MeasuredLayer] = {}

    def install(self, model: nn.Module) -> None:
        """Replace the forward of every recurrent layer."""
        for name, module in model.named_modules():
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters = skip_flattening  # type: ignore[method-assign]  # it inspects data pointers
                module.forward = partial(self._forward, module, name)

    def _forward(self, module: nn.RNNBase, name: str, input: Any, hx: Any = None) -> Any:
        if isinstance(input, PackedSequence):
            raise JobError(
                f"{name} gets a packed sequence", rule="its lengths are values, which a dry run does not have"
            )
        given = [input, *tensors(hx)]
        key = (_constructor(module), module.training, *(_signature(t) for t in given))
        if key not in self._cache:
            self._cache[key] = self.measure(module, name, given)
        weights = [getattr(module, w) for w in weight_names(module)]
        output, *last = _StandIn.apply(self._cache[key], *given, *weights)  # type: ignore[no-untyped-call]  # torch's
        return output, tuple(last) if module.mode == "LSTM" else last[0]

    def measure(self, module: nn.RNNBase, name: str, given: Sequence[torch.Tensor]) -> MeasuredLayer:
        """Measure a layer of this kind."""
        return MeasuredLayer(
            module, name, given, self._device, self._precision, separate_weights=self._separate_weights
        )


class MeasuredLayer:
    """A real layer like one of the model's, run alone on the GPU to measure its memory."""

    def __init__(
        self,
        module: nn.RNNBase,
        name: str,
        given: Sequence[torch.Tensor],
        device: torch.device,
        precision: str,
        *,
        separate_weights: bool,
    ) -> None:
        self._name, self._device, self._precision, self._separate_weights = name, device, precision, separate_weights
        self._class, self._arguments = _constructor(module)
        note_recurrent_layers(module)
        self._training = module.training
        self._dtype: torch.dtype = getattr(module, weight_names(module)[0]).dtype
        self._given = [_signature(t) for t in given]
        self.memory: LayerMemory = self._in_thread(self._forward)[0]
        # all of them now: during a backward, the thread that would run this one is blocked
        layouts = LAYOUTS if self._training else ()
        self._backwards = {layout: self._in_thread(partial(self._backward, layout)) for layout in layouts}

    def backward(self, gradients: GradientLayout) -> int:
        """Peak bytes allocated during the backward, its gradients included."""
        if not self._backwards:
            raise JobError(
                f"the backward of {self._name} in evaluation mode", rule="cuDNN has a backward only in training mode"
            )
        return self._backwards[gradients]

    def _in_thread(self, measure: Callable[[], Measured]) -> Measured:
        """Run in a separate thread, which has none of the modes of a dry run."""
        results: list[Measured] = []
        failed: list[Exception] = []

        def run() -> None:
            try:
                measure()  # the first call may load persistent state
                results.append(measure())
            except Exception as e:
                failed.append(e)

        thread = threading.Thread(target=run, name="recurrent")
        thread.start()
        thread.join()
        if failed:
            raise JobError(
                f"the memory of {self._name} could not be measured: {type(failed[0]).__name__}: {failed[0]}",
                rule="a dry run with recurrent layers runs each distinct one once on the GPU",
                fix='dry_run(..., device="cpu")',
            ) from failed[0]
        return results[0]

    def _forward(self) -> tuple[LayerMemory, list[torch.Tensor]]:
        layer = self._class(**dict(self._arguments), device=self._device, dtype=self._dtype).train(self._training)
        if self._separate_weights:
            for p in layer.parameters():
                p.data = p.data.clone()
        input, *states = (
            torch.zeros(shape, dtype=dtype, device=self._device, requires_grad=wants)
            for shape, dtype, wants in self._given
        )
        start = self._start()
        with compute_precision(self._precision, self._device):
            hx = None if not states else tuple(states) if self._class is nn.LSTM else states[0]
            outputs = tensors(layer(input, hx))
        kept = torch.cuda.memory_allocated(self._device) - start
        return LayerMemory(tuple((tuple(t.shape), t.dtype) for t in outputs), kept, self._peak() - start), outputs

    def _backward(self, layout: GradientLayout) -> int:
        _, (output, *states) = self._forward()
        used = [output] * layout.output + states * layout.states
        gradients = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in used]
        if layout.output and not layout.contiguous:
            gradients[0] = gradients[0].transpose(0, 1).contiguous().transpose(0, 1)
        start = self._start()
        torch.autograd.backward(used, gradients)
        return self._peak() - start

    def _start(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return torch.cuda.memory_allocated(self._device)

    def _peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)


class _StandIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: MeasuredLayer, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        memory = layer.memory
        outputs = [given[0].new_empty(shape, dtype=dtype) for shape, dtype in memory.outputs]
        saved = _allocate_like(given[0], memory.kept - _size(outputs))
        _allocate_like(given[0], memory.peak - memory.kept)  # freed at once, but counted
        ctx.save_for_backward(*given, saved, *outputs)
        ctx.layer, ctx.given = layer, len(given)
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        given = ctx.saved_tensors[: ctx.given]
        peak = ctx.layer.backward(GradientLayout.of(gradients[0], gradients[1:]))
        wanted = zip(given, ctx.needs_input_grad[1:], strict=True)
        results = [torch.empty_like(t) if wants else None for t, wants in wanted]
        _allocate_like(given[0], peak - _size(t for t in results if t is not None))
        return (None, *results)


def _signature(t: torch.Tensor) -> tuple[tuple[int, ...], torch.dtype, bool]:
    """The properties that determine the memory of a layer."""
    return tuple(t.shape), t.dtype, t.requires_grad


def _size(given: Iterable[torch.Tensor]) -> int:
    return int(sum(map(size_of, given)))


def _allocate_like(tensor: torch.Tensor, n: int) -> torch.Tensor:
    """Allocate n bytes on the device of a tensor."""
    return tensor.new_empty(max(0, n), dtype=torch.uint8)


def _constructor(module: nn.RNNBase) -> tuple[type[nn.RNNBase], tuple[tuple[str, Any], ...]]:
    """The class of a layer and its constructor arguments."""
    kind = {"LSTM": nn.LSTM, "GRU": nn.GRU}.get(module.mode, nn.RNN)
    names = ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional")
    arguments = [(name, getattr(module, name)) for name in names]
    if kind is nn.LSTM:
        arguments.append(("proj_size", module.proj_size))
    elif kind is nn.RNN:
        arguments.append(("nonlinearity", module.mode.removeprefix("RNN_").lower()))
    return kind, tuple(arguments)
