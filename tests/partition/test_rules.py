"""Every rule matches its operator: outputs and gradients, for every split of every input, on 2 and 3 ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from rule_cases import FAMILIES, run_family
from rule_contract import Axis, Case, captured_of, gathers, placeholders, seeds_of, shard
from rule_functions import drop
from world import World

from drumline.partition.sharding import redistribution
from drumline.partition.sharding.layout import Split, even_split
from drumline.partition.sharding_pass import RULES, ShardingPass

Worlds = Callable[[int], World]
CASES = [case for family in FAMILIES.values() for case in family]


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
def test_splits_match_the_whole(world: Worlds, family: str, n: int) -> None:
    for rank, wrong in enumerate(world(n).run(run_family, family, timeout=240)):
        assert not wrong, f"rank {rank} of {n}:\n" + "\n".join(wrong)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_only_listed_splits_gather(case: Case) -> None:
    captured, _, batch = captured_of(case)
    expected = set(case.gathers.split())
    for name, splits in seeds_of(case, 2):
        if " " not in name:
            must = bool({name, name.split("/")[0]} & expected)
            done = shard(captured, batch, splits, Axis("tp", 2, 0))
            assert gathers(done) == must, f"{name}: {done.gathered}"


def test_an_operator_without_a_rule_is_gathered_and_named() -> None:
    case = Case("gelu", lambda a: torch.nn.functional.gelu(a) * 2, ((4, 4),))
    captured, _, batch = captured_of(case)
    node = placeholders(captured, batch)["a"]
    rules = {k: r for k, r in RULES.items() if k != "pointwise"}
    done = ShardingPass(captured.graph, Axis("tp", 2, 0), captured.mode, {node: even_split(0, 4, 2)}, rules=rules)
    done.run()
    assert list(done.gathered) == ["aten.gelu.default"]


def test_a_value_is_redistributed_once_for_all_readers() -> None:
    case = Case("often", lambda a, b: (a.flip(0) + a.cumsum(0)) @ b + a.cummax(0).values, ((4, 4), (4, 4)))
    captured, _, batch = captured_of(case)
    done = shard(captured, batch, {"a": even_split(0, 4, 2)}, Axis("tp", 2, 0))
    assert sum(n.target is redistribution.gather for n in done.new.nodes) == 1


def test_a_column_and_its_row_need_one_all_reduce_each_way() -> None:
    two = next(c for c in CASES if c.name == "two layers")
    captured, _, batch = captured_of(two)
    done = shard(captured, batch, {"b": even_split(0, 6, 2), "c": even_split(1, 6, 2)}, Axis("tp", 2, 1))
    used = [
        n.target
        for n in done.new.nodes
        if n.target
        in (
            redistribution.enter_split_work,
            redistribution.reduce_partial,
            redistribution.gather,
            redistribution.take_part,
        )
    ]
    assert used == [redistribution.enter_split_work, redistribution.reduce_partial]


@pytest.mark.parametrize("split", [None, Split(0, ((0, 32, 64),))])
def test_dropout_is_the_same_for_the_same_numbers_and_keeps_the_generators_in_step(
    world: Worlds, split: Split | None
) -> None:
    (one, after), (other, later) = world(2).run(drop, split)
    assert torch.equal(one, other) and torch.equal(after, later)
    assert 8 < int((one == 0).sum()) < 56
    halves = one.chunk(2)
    assert not torch.equal(halves[0], halves[1])
