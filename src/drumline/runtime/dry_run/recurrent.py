"""Stand-ins for a GPU's recurrent layers, which torch does not have without values.

A stand-in computes nothing. It gives what the layer gives, keeps for the backward as much as the layer keeps, and takes
for itself what the layer takes: the GPU that is here is asked, by running such a layer once, alone, on zeros.
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
from ...tracing.kinds import size_of, tensors
from ..precision import computing
from ..recurrent import notice
from ..strategies.recurrent import stay

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Needs:
    """What a layer gives, and the bytes that its forward needs."""

    outputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    kept: int
    """Alive after it, beside what was before it; the outputs are in it."""
    most: int
    """Most alive in it, beside what was before it."""


@dataclass(frozen=True, slots=True)
class Gradients:
    """Which outputs have one, and how the first one's lies: a layer makes those that are missing, and copies some."""

    output: bool
    states: bool
    contiguous: bool

    @classmethod
    def of(cls, output: torch.Tensor | None, states: Iterable[torch.Tensor | None]) -> Gradients:
        """The kind that some are of."""
        return cls(output is not None, any(s is not None for s in states), output is None or output.is_contiguous())


KINDS = (
    Gradients(True, False, True),
    Gradients(True, False, False),
    Gradients(True, True, True),
    Gradients(True, True, False),
    Gradients(False, True, True),
)


class StandIns:
    """Puts stand-ins in the places of a model's recurrent layers, and remembers what the GPU said of each kind."""

    def __init__(self, device: torch.device, precision: str, *, apart: bool) -> None:
        self._device, self._precision, self._apart = device, precision, apart
        """`apart`: the weights of a layer do not lie one after the other, so it copies them for itself."""
        self._known: dict[Any, Asked] = {}

    def place(self, model: nn.Module) -> None:
        """From now on these layers only say what they need."""
        for name, module in model.named_modules():
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters = stay  # type: ignore[method-assign]  # it looks where the values lie
                module.forward = partial(self._forward, module, name)

    def _forward(self, module: nn.RNNBase, name: str, input: Any, hx: Any = None) -> Any:
        if isinstance(input, PackedSequence):
            raise JobError(
                f"{name} is given a packed sequence", rule="the lengths in it are values, which a dry run has not"
            )
        given = [input, *tensors(hx)]
        key = (_made_by(module), module.training, *(_said(t) for t in given))
        if key not in self._known:
            self._known[key] = self.ask(module, name, given)
        weights = [getattr(module, w) for w in module._flat_weights_names]
        output, *last = _StandIn.apply(self._known[key], *given, *weights)  # type: ignore[no-untyped-call]  # torch's
        return output, tuple(last) if module.mode == "LSTM" else last[0]

    def ask(self, module: nn.RNNBase, name: str, given: Sequence[torch.Tensor]) -> Asked:
        """Who answers for such a layer."""
        return Asked(module, name, given, self._device, self._precision, apart=self._apart)


class Asked:
    """A layer like one of the model's, with values, alone on the GPU."""

    def __init__(
        self,
        module: nn.RNNBase,
        name: str,
        given: Sequence[torch.Tensor],
        device: torch.device,
        precision: str,
        *,
        apart: bool,
    ) -> None:
        self._name, self._device, self._precision, self._apart = name, device, precision, apart
        self._kind, self._made_by = _made_by(module)
        notice(module)
        self._training = module.training
        self._dtype: torch.dtype = getattr(module, module._flat_weights_names[0]).dtype
        self._given = [_said(t) for t in given]
        self.needs: Needs = self._answer(self._forward)[0]
        # all of them now: when a backward runs, the thread that would run this one waits for it
        kinds = KINDS if self._training else ()
        self._backwards = {kind: self._answer(partial(self._backward, kind)) for kind in kinds}

    def backward(self, gradients: Gradients) -> int:
        """Most alive in the backward, beside what was before it; the gradients that it gives are in it."""
        if not self._backwards:
            raise JobError(f"the backward of {self._name} in evaluation", rule="cuDNN has one in training mode alone")
        return self._backwards[gradients]

    def _answer(self, question: Callable[[], Answer]) -> Answer:
        """In a thread of its own, which has none of the modes of a dry run."""
        found: list[Answer] = []
        failed: list[Exception] = []

        def run() -> None:
            try:
                question()  # the first call may load what stays
                found.append(question())
            except Exception as e:
                failed.append(e)

        thread = threading.Thread(target=run, name="recurrent")
        thread.start()
        thread.join()
        if failed:
            raise JobError(
                f"{self._name} could not be asked for its memory: {type(failed[0]).__name__}: {failed[0]}",
                rule="a dry run with recurrent layers runs each kind of them once on the GPU",
                fix='dry_run(..., device="cpu")',
            ) from failed[0]
        return found[0]

    def _forward(self) -> tuple[Needs, list[torch.Tensor]]:
        layer = self._kind(**dict(self._made_by), device=self._device, dtype=self._dtype).train(self._training)
        if self._apart:
            for p in layer.parameters():
                p.data = p.data.clone()
        input, *states = (
            torch.zeros(shape, dtype=dtype, device=self._device, requires_grad=wants)
            for shape, dtype, wants in self._given
        )
        start = self._start()
        with computing(self._precision, self._device):
            hx = None if not states else tuple(states) if self._kind is nn.LSTM else states[0]
            made = tensors(layer(input, hx))
        kept = torch.cuda.memory_allocated(self._device) - start
        return Needs(tuple((tuple(t.shape), t.dtype) for t in made), kept, self._most() - start), made

    def _backward(self, kind: Gradients) -> int:
        _, (output, *states) = self._forward()
        used = [output] * kind.output + states * kind.states
        gradients = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in used]
        if kind.output and not kind.contiguous:
            gradients[0] = gradients[0].transpose(0, 1).contiguous().transpose(0, 1)
        start = self._start()
        torch.autograd.backward(used, gradients)
        return self._most() - start

    def _start(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return torch.cuda.memory_allocated(self._device)

    def _most(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)


class _StandIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, asked: Asked, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        needs = asked.needs
        made = [given[0].new_empty(shape, dtype=dtype) for shape, dtype in needs.outputs]
        held = _bytes(given[0], needs.kept - _size(made))
        _bytes(given[0], needs.most - needs.kept)  # it is gone at once, but was counted
        ctx.save_for_backward(*given, held, *made)
        ctx.asked, ctx.given = asked, len(given)
        ctx.set_materialize_grads(False)
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        given = ctx.saved_tensors[: ctx.given]
        most = ctx.asked.backward(Gradients.of(gradients[0], gradients[1:]))
        wanted = zip(given, ctx.needs_input_grad[1:], strict=True)
        made = [torch.empty_like(t) if wants else None for t, wants in wanted]
        _bytes(given[0], most - _size(t for t in made if t is not None))
        return (None, *made)


def _said(t: torch.Tensor) -> tuple[tuple[int, ...], torch.dtype, bool]:
    """What a layer's needs depend on."""
    return tuple(t.shape), t.dtype, t.requires_grad


def _size(found: Iterable[torch.Tensor]) -> int:
    return int(sum(map(size_of, found)))


def _bytes(beside: torch.Tensor, n: int) -> torch.Tensor:
    """Some memory where another tensor is."""
    return beside.new_empty(max(0, n), dtype=torch.uint8)


def _made_by(module: nn.RNNBase) -> tuple[type[nn.RNNBase], tuple[tuple[str, Any], ...]]:
    """The class of a layer, and what it is made with."""
    kind = {"LSTM": nn.LSTM, "GRU": nn.GRU}.get(module.mode, nn.RNN)
    names = ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional")
    made_with = [(name, getattr(module, name)) for name in names]
    if kind is nn.LSTM:
        made_with.append(("proj_size", module.proj_size))
    elif kind is nn.RNN:
        made_with.append(("nonlinearity", module.mode.removeprefix("RNN_").lower()))
    return kind, tuple(made_with)
