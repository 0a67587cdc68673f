"""The model and its loss as one flat graph of operators: what the partitioner splits and the pipeline cuts.

torch's own tracer runs the job's Python once, on tensors without values, and writes down the operators as they are
called (before autograd takes them apart), so that a linear layer, a convolution or an attention is one node. A model
whose operators depend on values cannot be written down; it is refused with the line that asks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx.traceback as traceback
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..core.errors import DrumlineError
from ..tracing.fake import untraceable
from ..tracing.kinds import tensors as tensors_in
from ..tracing.running import with_values
from .opaque import opaque
from .statistics import averaged
from .tidy import tidy

Call = tuple[str, int]
"""A module, and which of its calls."""


@dataclass(frozen=True, eq=False)
class Captured:
    """A flat graph. Its placeholders are the parameters, the buffers and the tensors of the batch, in this order."""

    graph: Graph
    mode: FakeTensorMode
    constants: Mapping[str, torch.Tensor]
    """Tensors that the code made of numbers, by the name of their node's target."""
    outputs: Mapping[Call, tuple[Node | None, ...]] = field(default_factory=dict)
    """Call of a module -> what it returned, tensor by tensor, in the order in which the calls ended."""

    def placeholders(self, role: str) -> dict[str, Node]:
        """By name: those of `parameter`, `buffer` or `batch`."""
        nodes = (n for n in self.graph.nodes if n.op == "placeholder")
        return {n.meta["name"]: n for n in nodes if n.meta["role"] == role}


_around: list[Callable[[], AbstractContextManager[object]]] = []


@contextmanager
def captured_within(context: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Whatever is captured inside is captured within such a context: one that a run will have around it, too."""
    _around.append(context)
    try:
        yield
    finally:
        _around.pop()


@with_values()
def capture(
    model: nn.Module, run: Callable[[nn.Module, list[Any]], Any], leaves: list[Any], mode: FakeTensorMode
) -> Captured:
    """Write down `run(model, leaves)`, which gives tensors. `model` and `leaves` have fake tensors of `mode`."""
    parameters = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    state = [
        mode.from_tensor(t.detach()) if not isinstance(t, FakeTensor) else t.detach()
        for t in (*parameters.values(), *buffers.values())
    ]
    names = [*parameters, *buffers]
    outputs: dict[Call, tuple[Node | None, ...]] = {}

    def program(values: list[torch.Tensor], given: list[torch.Tensor]) -> Any:
        filled = list(leaves)
        for i, tensor in zip(tensors, given, strict=True):
            filled[i] = tensor
        with _held(model, dict(zip(names, values, strict=True))):
            return tuple(t for t in tree_flatten(run(model, filled))[0] if isinstance(t, torch.Tensor))

    given = [leaves[i] for i in tensors]
    try:
        with ExitStack() as stack:
            for context in (opaque(model), _watched(model, outputs), traceback.preserve_node_meta()):
                stack.enter_context(context)
            for make in _around:
                stack.enter_context(make())
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # what is worth a warning warns again in the real run
            made = make_fx(program, pre_dispatch=True, tracing_mode="fake", _allow_non_fake_inputs=True)(state, given)
    except DrumlineError:
        raise
    except Exception as e:
        raise untraceable(model, e) from e
    roles = [("parameter", n) for n in parameters] + [("buffer", n) for n in buffers]
    roles += [("batch", str(i)) for i in range(len(tensors))]
    heads = [n for n in made.graph.nodes if n.op == "placeholder"]
    for node, (role, name) in zip(heads, roles, strict=True):
        node.meta.update(role=role, name=name)
        if role == "parameter":
            node.meta["trained"] = parameters[name].requires_grad
    averaged(made.graph)
    constants = {n.target: getattr(made, n.target) for n in made.graph.nodes if n.op == "get_attr"}
    for node in made.graph.nodes:
        node.meta["module"] = _innermost(node)
    return Captured(made.graph, mode, constants, tidy(made.graph, outputs))


def _innermost(node: Node) -> str:
    stack = node.meta.get("nn_module_stack")
    return list(stack)[-1] if stack else ""


@contextmanager
def _held(model: nn.Module, state: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Put tensors in the place of the parameters and buffers; tied ones stay tied."""
    with torch.nn.utils.stateless._reparametrize_module(model, dict(state), tie_weights=True):
        yield


@contextmanager
def _watched(model: nn.Module, outputs: dict[Call, tuple[Node | None, ...]]) -> Iterator[None]:
    """Tell every node which module made it, and note what the modules return."""
    handles = []
    calls: dict[str, int] = {}
    for name, module in model.named_modules():

        def before(m: nn.Module, _: Any, name: str = name) -> None:
            stack = traceback.current_meta.get("nn_module_stack", {})
            traceback.current_meta["nn_module_stack"] = {**stack, name: (name, type(m).__name__)}

        def after(m: nn.Module, _: Any, out: Any, name: str = name) -> None:
            stack = dict(traceback.current_meta.get("nn_module_stack", {}))
            stack.pop(name, None)
            traceback.current_meta["nn_module_stack"] = stack
            mode = get_proxy_mode()
            if mode is not None:
                nodes = [get_proxy_slot(t, mode.tracer, None, lambda p: p.proxy.node) for t in tensors_in(out)]
                outputs[name, calls.get(name, 0)] = tuple(n if isinstance(n, Node) else None for n in nodes)
                calls[name] = calls.get(name, 0) + 1

        handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def flatten(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The leaves of a batch, and how they are put together again."""
    leaves, spec = tree_flatten(value)
    return leaves, lambda new: tree_unflatten(new, spec)
