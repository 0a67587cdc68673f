"""Work and depth of graphs: bounds, greedy schedules within them, reductions, pipelines."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.core.errors import InputError
from drumline.costs.pipeline_clock import pipeline_seconds
from drumline.schedules import pipeline_order
from drumline.theory.work_depth import TaskGraph, greedy, layers, pipeline_graph, reduction

DIAMOND = TaskGraph((1, 2, 3, 4), ((), (0,), (0,), (1, 2)))
calm = settings(deadline=None, max_examples=80)


@st.composite
def graphs(draw: st.DrawFn) -> TaskGraph:
    n = draw(st.integers(0, 25))
    times = draw(st.lists(st.integers(0, 9), min_size=n, max_size=n))
    needs = [tuple(draw(st.lists(st.integers(0, i - 1), max_size=3))) if i else () for i in range(n)]
    names = draw(st.permutations(range(n)))  # tasks need not come in the order in which they can run
    moved = sorted(range(n), key=lambda i: names[i])
    return TaskGraph(tuple(times[i] for i in moved), tuple(tuple(names[j] for j in needs[i]) for i in moved))


def test_a_diamond() -> None:
    assert (DIAMOND.work, DIAMOND.depth, DIAMOND.parallelism) == (10, 8, 1.25)
    assert DIAMOND.bounds(1) == (10, 18)
    assert DIAMOND.bounds(4) == (8, 10.5)
    assert greedy(DIAMOND, 1).seconds == 10
    assert greedy(DIAMOND, 2).seconds == 8
    assert greedy(DIAMOND, 2).starts == (0, 1, 1, 4)


@calm
@given(graph=graphs(), p=st.integers(1, 6))
def test_greedy_schedules_are_within_the_bounds(graph: TaskGraph, p: int) -> None:
    schedule = greedy(graph, p)
    least, most = graph.bounds(p)
    assert least - 1e-9 <= schedule.seconds <= most + 1e-9
    assert schedule.seconds <= (graph.work - graph.depth) / p + graph.depth + 1e-9  # what the bound says more exactly
    for task, needs in enumerate(graph.needs):
        assert all(schedule.ends[other] <= schedule.starts[task] for other in needs)
    for place in range(p):
        own = (t for t in range(len(graph.times)) if schedule.processors[t] == place)
        spans = sorted((schedule.starts[t], schedule.ends[t]) for t in own)
        assert all(a[1] <= b[0] for a, b in pairwise(spans))


@calm
@given(graph=graphs())
def test_one_processor_takes_the_work_and_many_the_depth(graph: TaskGraph) -> None:
    assert greedy(graph, 1).seconds == pytest.approx(graph.work)
    assert greedy(graph, max(1, len(graph.times))).seconds == pytest.approx(graph.depth)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 9, 1000])
def test_reductions(n: int) -> None:
    tree, chain = reduction(n), reduction(n, associative=False)
    assert tree.work == chain.work == n - 1
    assert tree.depth == math.ceil(math.log2(n))
    assert chain.depth == n - 1
    if n > 1:
        assert chain.parallelism == 1
        assert tree.parallelism == pytest.approx((n - 1) / math.ceil(math.log2(n)))


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "zero-bubble"])
def test_the_depth_of_a_pipeline_with_its_lanes_is_its_time(name: str) -> None:
    order = pipeline_order(name, 4, 8)
    split = order.splits_backward
    b, w = (1.5, 0.5) if split else (2.0, 0.0)
    graph = pipeline_graph(order, 1, b, w)
    assert graph.depth == pytest.approx(pipeline_seconds(name, 4, 8, 1, 1, 1.5, 0.5))
    assert graph.work == 4 * 8 * 3
    free = pipeline_graph(order, 1, b, w, lanes=False)
    assert free.depth == pytest.approx(4 * (1 + b) + w)  # one micro-batch down and back
    assert free.parallelism > graph.parallelism


def test_layers_are_a_chain() -> None:
    assert layers([1, 2, 3]).depth == layers([1, 2, 3]).work == 6


def test_invalid_graphs_are_refused() -> None:
    with pytest.raises(InputError, match=r"task \d depends on itself(.|\n)*no cycle"):
        TaskGraph((1, 1), ((1,), (0,)))
    with pytest.raises(InputError, match=r"task 0 needs task 3\n.*tasks 0 to 1"):
        TaskGraph((1, 1), ((3,), ()))
    with pytest.raises(InputError, match=r"task 1 takes -1\n.*not negative"):
        TaskGraph((1, -1), ((), ()))
    with pytest.raises(InputError, match="2 times, but dependencies of 1"):
        TaskGraph((1, 1), ((),))
    with pytest.raises(InputError, match="0 processors"):
        greedy(DIAMOND, 0)
    with pytest.raises(InputError, match="reduction of 0 values"):
        reduction(0)
