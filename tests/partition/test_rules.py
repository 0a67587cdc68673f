"""Every rule gives what the operator gives: outputs and gradients, for every split of every input, on 2 and 3 ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from rule_cases import FAMILIES, run_family
from rule_contract import Axis, Case, captured_of, gathers, placeholders, seeds_of, spread
from rule_functions import drop
from world import World

from drumline.partition import moves
from drumline.partition.layout import Split, evenly
from drumline.partition.spread import RULES, Pass

Worlds = Callable[[int], World]
CASES = [case for family in FAMILIES.values() for case in family]


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
def test_splits_give_what_the_whole_gives(world: Worlds, family: str, n: int) -> None:
    for rank, wrong in enumerate(world(n).run(run_family, family, timeout=240)):
        assert not wrong, f"rank {rank} of {n}:\n" + "\n".join(wrong)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_gathers_where_it_must_and_nowhere_else(case: Case) -> None:
    captured, _, batch = captured_of(case)
    expected = set(case.gathers.split())
    for name, splits in seeds_of(case, 2):
        if " " not in name:
            must = bool({name, name.split("/")[0]} & expected)
            done = spread(captured, batch, splits, Axis("tp", 2, 0))
            assert gathers(done) == must, f"{name}: {done.gathered}"


def test_an_operator_without_a_rule_is_right_and_named() -> None:
    case = Case("gelu", lambda a: torch.nn.functional.gelu(a) * 2, ((4, 4),))
    captured, _, batch = captured_of(case)
    node = placeholders(captured, batch)["a"]
    rules = {k: r for k, r in RULES.items() if k != "pointwise"}
    done = Pass(captured.graph, Axis("tp", 2, 0), captured.mode, {node: evenly(0, 4, 2)}, rules=rules)
    done.run()
    assert list(done.gathered) == ["aten.gelu.default"]


def test_what_several_operators_want_is_moved_once() -> None:
    case = Case("often", lambda a, b: (a.flip(0) + a.cumsum(0)) @ b + a.cummax(0).values, ((4, 4), (4, 4)))
    captured, _, batch = captured_of(case)
    done = spread(captured, batch, {"a": evenly(0, 4, 2)}, Axis("tp", 2, 0))
    assert sum(n.target is moves.gather for n in done.new.nodes) == 1


def test_a_column_and_its_row_need_one_sum_each_way() -> None:
    two = next(c for c in CASES if c.name == "two layers")
    captured, _, batch = captured_of(two)
    done = spread(captured, batch, {"b": evenly(0, 6, 2), "c": evenly(1, 6, 2)}, Axis("tp", 2, 1))
    used = [n.target for n in done.new.nodes if n.target in (moves.enter, moves.reduce, moves.gather, moves.take)]
    assert used == [moves.enter, moves.reduce]


@pytest.mark.parametrize("split", [None, Split(0, ((0, 32, 64),))])
def test_dropout_is_the_same_for_the_same_numbers_and_keeps_the_generators_in_step(
    world: Worlds, split: Split | None
) -> None:
    (one, after), (other, later) = world(2).run(drop, split)
    assert torch.equal(one, other) and torch.equal(after, later)
    assert 8 < int((one == 0).sum()) < 56
    halves = one.chunk(2)
    assert not torch.equal(halves[0], halves[1])
