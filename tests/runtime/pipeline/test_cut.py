"""Cutting a graph into stages: parameters, inputs and outputs of each, and what cannot be cut."""

from __future__ import annotations

from typing import Any

import pipeline_functions as on
import pytest
import torch
from torch import nn

from drumline.core.errors import PlanError
from drumline.partition.capture import CapturedGraph
from drumline.partition.stage import BatchInput, StagedGraph, StageInput, port_of
from drumline.partition.stage_cutting import cut_into_stages, graph_operators

TOGGLE = torch._C._set_grad_enabled


def at(graph: CapturedGraph, *names: str) -> StagedGraph:
    """Cut before the operators whose nodes have these names."""
    nodes = [n.name for n in graph_operators(graph.graph)]
    return cut_into_stages(graph.graph, [nodes.index(name) for name in names])


def targets(made: StagedGraph, stage: int) -> list[str]:
    """The operators of a stage."""
    graph = made.stages[stage].graph
    assert graph is not None
    return [getattr(n.target, "__name__", str(n.target)) for n in graph.nodes if n.op == "call_function"]


class Plain(nn.Module):
    """One weight, and whatever the test does with it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))


def graph_of(run: Any, *leaves: torch.Tensor, model: nn.Module | None = None) -> CapturedGraph:
    return on.graph_of(model or Plain(), lambda m, given: run(m, *given), list(leaves))


def test_stages_cover_all_operators_and_parameters() -> None:
    graph = on.captured("lm", 3)
    made = on.even_cut(graph, 4)
    names = {n for s in made.stages for n in s.params}
    assert names == set(graph.placeholders("parameter"))
    assert made.shared == {"embed.weight": (0, 3)}
    assert made.names([3, 0])[0] == "embed.weight" and made.names([0, 3]).count("embed.weight") == 1


def test_values_go_directly_to_each_reader() -> None:
    made = on.even_cut(on.captured("skip", 3), 4)
    wanted = [p.readers for p in made.stages[0].outputs]
    assert (2, 3) in wanted or (1, 2, 3) in wanted
    reads = [s for s in made.stages[3].inputs if isinstance(s, StageInput)]
    assert {s.stage for s in reads} == {0, 2}
    # what stage 1 gives is no copy of what it got
    assert all(p.readers == (2,) for p in made.stages[1].outputs)


def test_batch_inputs_are_read_where_needed() -> None:
    made = on.even_cut(on.captured("lm", 3), 3)
    assert {name: p.readers for name, p in made.batch_inputs.items()} == {"0": (0,), "1": (2,)}
    assert made.batch_inputs["1"].dtype == torch.int64 and BatchInput("1") in made.stages[2].inputs


def test_values_independent_of_the_batch_are_recomputed() -> None:
    """The mask of the language model is made in the first stage and read in all: it is never sent."""
    made = on.even_cut(on.captured("lm", 3), 3)
    assert all("triu.default" in targets(made, t) for t in (0, 1, 2))
    assert all(p.shape != (5, 5) for s in made.stages for p in s.outputs)


def test_parameter_views_are_recomputed_but_random_values_are_not() -> None:
    def run(m: Any, x: torch.Tensor) -> Any:
        turned, noise = m.weight.t(), torch.rand(4)
        return (((x @ turned).tanh() + noise) @ turned * noise).sum(), x.sum()

    made = at(graph_of(run, torch.randn(2, 4)), "matmul_1")
    assert [targets(made, t).count("t.default") for t in (0, 1)] == [1, 1]
    assert [targets(made, t).count("rand.default") for t in (0, 1)] == [1, 0]
    assert made.shared == {"weight": (0, 1)}


def test_parts_of_a_tuple_stay_with_it() -> None:
    def run(m: Any, x: torch.Tensor) -> Any:
        value, where = (x @ m.weight).max(-1)
        return (value * where).sum(), x.sum()

    graph = graph_of(run, torch.randn(2, 4))
    made = at(graph, next(n.name for n in graph_operators(graph.graph) if n.name.startswith("getitem")))
    assert [p.dtype for p in made.stages[0].outputs] == [torch.float32, torch.int64]
    assert [p.grad for p in made.stages[0].outputs] == [True, False]


@pytest.mark.parametrize("name", ["mul", "exp", "add"])
def test_regions_without_gradients_are_closed_in_every_stage(name: str) -> None:
    def run(m: Any, x: torch.Tensor) -> Any:
        y = x @ m.weight
        with torch.no_grad():
            z = (y * 2).exp()
        return (y + z).sum(), x.sum()

    made = at(graph_of(run, torch.randn(2, 4)), name)
    for stage in made.stages:
        assert stage.graph is not None
        modes = [n.args[0] for n in stage.graph.nodes if n.target is TOGGLE]
        assert modes in ([], [False, True])
    given = [p.grad for p in made.stages[0].outputs]
    assert given == {"mul": [True], "exp": [True, False], "add": [True, False]}[name]


def test_grad_mode_is_restored_when_a_stage_fails() -> None:
    def run(m: Any, x: torch.Tensor) -> Any:
        with torch.no_grad():
            y = x @ m.weight
        return (y @ m.weight).sum(), x.sum()

    graph = graph_of(run, torch.randn(2, 4))
    module = cut_into_stages(graph.graph, []).bind([0], Plain(), graph.constants).stages[0].module
    assert module is not None
    with pytest.raises(RuntimeError):
        module(torch.randn(2, 5))
    assert torch.is_grad_enabled()


def test_port_keeps_the_memory_layout() -> None:
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    port = port_of(x)
    room = port.receive_buffer(torch.device("cpu"))
    room.copy_(port.pack(x))
    back = port.unpack(room)
    assert torch.equal(back, x) and back.stride() == x.stride() and room.is_contiguous()
    spread = torch.randn(3, 1).expand(3, 4)
    assert torch.equal(port_of(spread).unpack(port_of(spread).pack(spread)), spread)


def test_boundaries_out_of_order_are_refused() -> None:
    graph = on.captured("mlp", 3)
    n = len(graph_operators(graph.graph))
    for wrong in ([0], [4, 4], [5, 3], [n]):
        with pytest.raises(PlanError, match=f"0 < first < second < ... < {n} operators"):
            cut_into_stages(graph.graph, wrong)


def test_written_buffer_is_used_in_one_stage() -> None:
    class Moving(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))

    def run(m: Any, x: torch.Tensor) -> Any:
        y = (x - m.mean) @ m.weight
        m.mean.mul_(0.5)
        return y.tanh().sum(), x.sum()

    graph = graph_of(run, torch.randn(2, 4), model=Moving())
    assert at(graph, "tanh").stages[0].buffers == ("mean",)
    with pytest.raises(PlanError, match=r"mul_ writes into \w+, which stages \[0, 1\] have"):
        at(graph, "mul_")


def test_python_number_from_the_batch_is_refused() -> None:
    graph = on.captured("mlp", 3)
    # as a graph that asks for a number would have it
    first = graph_operators(graph.graph)[0]
    number = first.meta["val"]
    first.meta["val"] = 3.0
    try:
        with pytest.raises(PlanError, match="tensors are sent between stages, numbers are not"):
            cut_into_stages(graph.graph, [1])
    finally:
        first.meta["val"] = number
