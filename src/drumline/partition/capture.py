"""Captures a model and its loss as one flat graph of operators, which the partitioner splits and the pipeline cuts.

torch's tracer runs the job's Python once on fake tensors and records operators as they are called, before autograd
decomposes them: a linear layer, a convolution or an attention is one node. A model whose operators depend on values is
refused with the line that reads one. A `torch.autograd.Function` becomes one node that calls it, because the tracer
would record its forward, whose derivative is another one. Then the graph is cleaned up: in-place operators are replaced
where that is safe, and dead nodes removed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx.traceback as traceback
from torch import nn
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    make_fx,
    track_tensor_tree,
)
from torch.utils.checkpoint import CheckpointFunction

from ..core.errors import DrumlineError, TraceError
from ..torchkit.dispatch_modes import enter_autocast, exit_autocast, set_grad_enabled
from ..torchkit.fake_tensors import FakeTensor, FakeTensorMode, with_real_tensors
from ..torchkit.modules import BatchNormBase, reparametrize
from ..torchkit.pytree import tree_flatten, tree_map, tree_unflatten
from ..torchkit.schemas import overload_name, schema_of, schema_or_none
from ..tracing.fake import untraceable_error
from ..tracing.op_costs import tensors as tensors_in
from .batch_statistics import CUMULATIVE_MOMENTUM, count_batches_at_run_time
from .capture_conditions import capture_contexts
from .operator_properties import STATISTICS, is_view, mutates

ModuleCall = tuple[str, int]
"""A module, and which of its calls."""


@dataclass(frozen=True, eq=False)
class CapturedGraph:
    """A flat graph. Its placeholders are the parameters, the buffers and the tensors of the batch, in this order."""

    graph: Graph
    mode: FakeTensorMode
    constants: Mapping[str, torch.Tensor]
    """Tensors that the code created from numbers, by the target of their node."""
    outputs: Mapping[ModuleCall, tuple[Node | None, ...]] = field(default_factory=dict)
    """Call of a module -> the tensors that it returned, in the order in which the calls ended."""

    def placeholders(self, role: str) -> dict[str, Node]:
        """Placeholders of a role (`parameter`, `buffer` or `batch`), by name."""
        nodes = (n for n in self.graph.nodes if n.op == "placeholder")
        return {n.meta["name"]: n for n in nodes if n.meta["role"] == role}


@with_real_tensors()
def capture(
    model: nn.Module, run: Callable[[nn.Module, list[Any]], Any], leaves: list[Any], mode: FakeTensorMode
) -> CapturedGraph:
    """Capture `run(model, leaves)`, which returns tensors. `model` and `leaves` have fake tensors of `mode`."""
    parameters = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    state = [
        mode.from_tensor(t.detach()) if not isinstance(t, FakeTensor) else t.detach()
        for t in (*parameters.values(), *buffers.values())
    ]
    names = [*parameters, *buffers]
    outputs: dict[ModuleCall, tuple[Node | None, ...]] = {}

    def program(values: list[torch.Tensor], given: list[torch.Tensor]) -> Any:
        filled = list(leaves)
        for i, tensor in zip(tensors, given, strict=True):
            filled[i] = tensor
        with _with_state(model, dict(zip(names, values, strict=True))):
            return tuple(t for t in tree_flatten(run(model, filled))[0] if isinstance(t, torch.Tensor))

    given = [leaves[i] for i in tensors]
    try:
        with ExitStack() as stack:
            for context in (
                custom_functions_as_nodes(model),
                _recorded_modules(model, outputs),
                traceback.preserve_node_meta(),
            ):
                stack.enter_context(context)
            for make in capture_contexts():
                stack.enter_context(make())
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # real problems warn again in the real run
            traced = make_fx(program, pre_dispatch=True, tracing_mode="fake", _allow_non_fake_inputs=True)(state, given)
    except DrumlineError:
        raise
    except Exception as e:
        raise untraceable_error(model, e) from e
    roles = [("parameter", n) for n in parameters] + [("buffer", n) for n in buffers]
    roles += [("batch", str(i)) for i in range(len(tensors))]
    placeholders = [n for n in traced.graph.nodes if n.op == "placeholder"]
    for node, (role, name) in zip(placeholders, roles, strict=True):
        node.meta.update(role=role, name=name)
        if role == "parameter":
            node.meta["trained"] = parameters[name].requires_grad
    count_batches_at_run_time(traced.graph)
    constants = {n.target: getattr(traced, n.target) for n in traced.graph.nodes if n.op == "get_attr"}
    for node in traced.graph.nodes:
        node.meta["module"] = _innermost(node)
    return CapturedGraph(traced.graph, mode, constants, clean_up(traced.graph, outputs))


def _innermost(node: Node) -> str:
    stack = node.meta.get("nn_module_stack")
    return list(stack)[-1] if stack else ""


@contextmanager
def _with_state(model: nn.Module, state: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Replace the parameters and buffers by tensors; tied ones stay tied."""
    with reparametrize(model, dict(state), tie_weights=True):
        yield


@contextmanager
def _recorded_modules(model: nn.Module, outputs: dict[ModuleCall, tuple[Node | None, ...]]) -> Iterator[None]:
    """Record the module of every node, and the outputs of every module."""
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
    """The leaves of a batch, and a function that rebuilds it from leaves."""
    leaves, spec = tree_flatten(value)
    return leaves, lambda new: tree_unflatten(new, spec)


@contextmanager
def custom_functions_as_nodes(model: nn.Module) -> Iterator[None]:
    """Capture a model inside: custom functions become nodes, tensor hooks are refused, module state is restored."""
    plain: Any = torch.autograd.Function.__dict__["apply"]
    hook: Any = torch.Tensor.register_hook
    attributes = [
        (m, {k: (v, dict(v) if isinstance(v, dict) else None) for k, v in vars(m).items()}) for m in model.modules()
    ]
    for m in model.modules():
        if isinstance(m, BatchNormBase) and m.momentum is None and m.track_running_stats:
            m.momentum = CUMULATIVE_MOMENTUM

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        mode = get_proxy_mode()
        call = plain.__get__(None, cls)
        if mode is None:
            return call(*args, **kwargs)
        if cls is CheckpointFunction:  # its arguments: (function, whether to keep the random state, *inputs)
            return args[0](*args[2:])
        with disable_proxy_modes_tracing():
            out = call(*args, **kwargs)
        tracer: Any = mode.tracer
        proxies = tree_map(tracer.unwrap_proxy, args)
        node = tracer.create_proxy("call_function", call, proxies, kwargs, name=cls.__name__)
        return track_tensor_tree(out, node, constant=None, tracer=tracer)

    def refuse(tensor: torch.Tensor, *_: Any, **__: Any) -> Any:
        if get_proxy_mode() is None:
            return hook(tensor, *_, **__)
        raise TraceError(
            f"{type(model).__name__} puts a hook on a tensor in its forward",
            rule="a plan that splits the model runs its operators, and would run without the hook",
            fix="write it as a torch.autograd.Function",
        )

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]
    torch.Tensor.register_hook = refuse  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = plain  # type: ignore[method-assign]
        torch.Tensor.register_hook = hook  # type: ignore[method-assign]
        # caches filled by the forward have tensors of the trace; hooks are removed together with their flags
        for module, before in attributes:
            for key in set(vars(module)) - set(before):
                del vars(module)[key]
            for key, (value, content) in before.items():
                vars(module)[key] = value
                if content is not None and key not in ("_parameters", "_buffers", "_modules"):
                    value.clear()
                    value.update(content)


aten = torch.ops.aten

EFFECTS = (set_grad_enabled, enter_autocast, exit_autocast)
"""Calls with effects on later operators."""


def clean_up(graph: Graph, outputs: Mapping[Any, tuple[Node | None, ...]]) -> dict[Any, tuple[Node | None, ...]]:
    """Clean up in place; returns the outputs of module calls, as nodes of the cleaned graph."""
    replaced: dict[Node, Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in (aten.lift_fresh_copy.default, aten.lift_fresh.default):
            _replace(node, node.args[0], replaced)
        elif node.target is aten.detach_.default:
            node.target = aten.detach.default
        elif _in_place(node):
            _out_of_place(graph, node)
        elif _takes_default_dtype(node):
            node.kwargs = {**node.kwargs, "dtype": node.meta["val"].dtype}
    outputs_now = {name: tuple(n and _replacement(n, replaced) for n in nodes) for name, nodes in outputs.items()}
    kept = {n for nodes in outputs_now.values() for n in nodes}
    for node in reversed(list(graph.nodes)):
        dead = node.op in ("call_function", "get_attr") and not node.users and node not in kept
        if dead and node.target not in EFFECTS and not mutates(node):
            graph.erase_node(node)
    return outputs_now


def _takes_default_dtype(node: Node) -> bool:
    """Whether it makes a tensor of torch's default dtype, which may be another one when the graph runs."""
    made, schema = node.meta.get("val"), schema_or_none(node.target)
    if schema is None or not isinstance(made, torch.Tensor) or node.all_input_nodes or node.kwargs.get("dtype"):
        return False
    return {"dtype", "device"} <= {argument.name for argument in schema.arguments}


def _in_place(node: Node) -> bool:
    return mutates(node) and node.target not in STATISTICS


def _out_of_place(graph: Graph, node: Node) -> None:
    """Replace `y = x.relu_()` by `y = x.relu()` and later reads of x by y, if x's memory has no other live name."""
    target = node.args[0]
    if not isinstance(target, Node) or target.op == "placeholder" or is_view(target):
        return
    order = {n: i for i, n in enumerate(graph.nodes)}
    if any(is_view(user) and _last_use(user, order) > order[node] for user in target.users if user is not node):
        return
    functional = _functional(node.target)
    if functional is None:
        return
    node.target = functional
    for user in list(target.users):
        if order[user] > order[node]:
            user.replace_input_with(target, node)


def _functional(target: Any) -> Any:
    """aten.relu_.default -> aten.relu.default."""
    name = schema_of(target).name.split("::")[1]
    if not name.endswith("_") or name.endswith("__"):
        return None
    packet = getattr(aten, name[:-1], None)
    overload = overload_name(target)
    return getattr(packet, overload, None) if packet is not None and overload in packet.overloads() else None


def _last_use(node: Node, order: Mapping[Node, int]) -> int:
    ends = [_last_use(user, order) if is_view(user) else order[user] for user in node.users]
    return max(ends, default=order[node])


def _replace(node: Node, other: Any, replaced: dict[Node, Node]) -> None:
    """Replace all reads of `node` by `other`."""
    node.replace_all_uses_with(other)
    replaced[node] = other


def _replacement(node: Node, replaced: Mapping[Node, Node]) -> Node:
    seen = set()
    while node in replaced and node not in seen:
        seen.add(node)
        node = replaced[node]
    return node
