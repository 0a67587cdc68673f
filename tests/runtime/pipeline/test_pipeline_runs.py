"""Pipelines on ranks compared with plain autograd: every order, models of all shapes, messages and memory."""

from __future__ import annotations

from typing import Any

import pipeline_functions as on
import pytest
import torch

from drumline.core.errors import PlanError
from drumline.schedules.pipeline import one_f_one_b, pipeline_order, prove_pipeline

TOLERANCE = 1e-12
MODELS = ["mlp", "skip", "two", "twice", "frozen", "lm", "conv"]


def check(results: list[dict[str, Any]], steps: int = 1) -> None:
    """Every parameter is somewhere, and has the serial gradient; the last rank has the serial losses."""
    serial = results[0]["serial"]
    assert [r["losses"] for r in results if r["losses"]] == [[pytest.approx(pair, rel=TOLERANCE) for pair in serial]]
    for r in results:
        assert max(r["gradients"].values(), default=0.0) < TOLERANCE, r["gradients"]
        assert r["buffers"] < TOLERANCE
        assert sorted(r["last"]) == sorted(r["stages"] * steps)


@pytest.mark.parametrize(
    ("name", "order"),
    [
        (name, order) if name in ("lm", "two") or order == "vee" else pytest.param(name, order, marks=pytest.mark.slow)
        for name in MODELS
        for order in on.ORDERS
    ],
)
def test_two_ranks(world: Any, name: str, order: str) -> None:
    check(world(2).run(on.train, name, on.ORDERS[order](2, 4), [3, 3, 3, 3]))


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize(
    ("order", "virtual"),
    [
        ("naive", 1),
        ("gpipe", 1),
        ("1f1b", 1),
        ("interleaved", 2),
        ("interleaved", 3),
        ("zero-bubble", 1),
        ("zero-bubble", 2),
    ],
)
def test_orders_of_plans(world: Any, order: str, virtual: int, ranks: int) -> None:
    """A run keeps as many forwards as the checker computes for the order."""
    made = pipeline_order(order, ranks, 5, virtual)
    results = world(ranks).run(on.train, "lm", made, [2, 3, 2, 1, 2])
    check(results)
    assert tuple(r["peak"] for r in results) == prove_pipeline(made).activations


@pytest.mark.parametrize("order", ["1f1b", "vee", "weights last"])
@pytest.mark.parametrize("name", ["skip", "lm", "two"])
def test_four_ranks_ragged(world: Any, name: str, order: str) -> None:
    check(world(4).run(on.train, name, on.ORDERS[order](4, 5), [3, 2, 3, 1, 2]))


@pytest.mark.parametrize("order", ["1f1b", "rounds"])
def test_only_the_first_stage_reads(world: Any, order: str) -> None:
    check(world(2).run(on.train, "lm", on.ORDERS[order](2, 3), [3, 2, 3], "first"))


def test_several_steps(world: Any) -> None:
    check(world(2).run(on.train, "lm", on.separate_weights(2, 3), [2, 2, 1], "all", 3), steps=3)


def test_one_rank_is_the_general_case(world: Any) -> None:
    for order in (on.vee(1, 3), on.rounds(1, 3), one_f_one_b(1, 3)):
        results = world(1).run(on.train, "lm", order, [3, 2, 3])
        check(results)
        assert results[0]["bytes"] == 0


def test_more_ranks_than_micro_batches(world: Any) -> None:
    check(world(4).run(on.train, "skip", one_f_one_b(4, 1), [3]))


def test_tied_gradients_are_summed(world: Any) -> None:
    first, last = world(2).run(on.train, "lm", one_f_one_b(2, 2), [3, 3])
    assert first["shared"] == last["shared"] == ["embed.weight"]
    # without the sum both were wrong
    assert min(first["changed"]["embed.weight"], last["changed"]["embed.weight"]) > 1e-3


def test_values_are_sent_once_and_directly(world: Any) -> None:
    """The skip is read by two later stages of the other rank: one message there, two gradients back."""
    m, value = 2, 3 * 6 * 8
    first, last = world(2).run(on.train, "skip", on.rounds(2, m), [3] * m)
    crossings = on.even_cut(on.captured("skip", 3), 4)
    homes = on.rounds(2, m).homes()
    there = back = 0
    for stage in crossings.stages[:-1]:
        for port in stage.outputs:
            others = [t for t in port.readers if homes[t] != homes[stage.index]]
            there += len({homes[t] for t in others})
            back += len(others) if port.grad else 0
    assert first["bytes"] + last["bytes"] == m * value * (there + back)


def test_peak_of_waiting_forwards(world: Any) -> None:
    """GPipe keeps all, 1F1B one for each later stage, naive one; W keeps what B would free."""
    peaks = {n: [r["peak"] for r in world(2).run(on.train, "mlp", on.ORDERS[n](2, 4), [2] * 4)] for n in on.ORDERS}
    assert peaks == {
        "gpipe": [4, 4],
        "naive": [1, 1],
        "1f1b": [2, 1],
        "separate_weights": [3, 2],
        "weights last": [4, 4],
        "rounds": [8, 8],
        "vee": [8, 8],
    }


def test_random_numbers_depend_on_stage_and_micro_batch(world: Any) -> None:
    orders = [on.gpipe(2, 3), on.backwards(2, 3), on.separate_weights(2, 3)]
    for result in world(2).run(on.chance, orders, 3, "micro"):
        for other in result[1:]:
            assert all(torch.allclose(result[0][n], other[n], rtol=1e-12, atol=1e-13) for n in result[0])
    unseeded = world(2).run(on.chance, orders[:2], 3, "nothing")[0]
    assert any(not torch.allclose(unseeded[0][n], unseeded[1][n]) for n in unseeded[0])


def test_evaluation(world: Any) -> None:
    for order in (one_f_one_b(2, 3), on.vee(2, 3)):
        results = world(2).run(on.evaluate, "frozen", order, [3, 1, 2])
        assert [r["losses"] for r in results if r["losses"]] == [
            [pytest.approx(pair, rel=TOLERANCE) for pair in results[0]["serial"]]
        ]


def test_hooks_see_every_action(world: Any) -> None:
    first, last = world(2).run(on.record, on.separate_weights(2, 2), 2)
    assert first == [
        "+F0",
        "seed 0 0",
        "-F0",
        "+F1",
        "seed 0 1",
        "-F1",
        "+B0",
        "-B0",
        "+B1",
        "-B1",
        "+W0",
        "-W0",
        "+W1",
        "-W1",
        "last 0",
    ]
    assert last[:5] == ["+F0", "seed 1 0", "-F0", "+B0", "-B0"] and last[-1] == "last 1"


@pytest.mark.parametrize("order", ["1f1b", "weights last"])
def test_no_memory_is_left_after_a_step(world: Any, order: str) -> None:
    assert world(2).run(on.leftovers, on.ORDERS[order](2, 3), 3) == [0, 0]


def test_failing_rank_does_not_block_the_others(world: Any) -> None:
    waiting, broken = world(2).run(on.fails, one_f_one_b(2, 2), 2)
    assert broken == "ValueError: this stage is broken"
    assert "did not receive grad 0 0 0 1 from rank 1 to rank 0" in waiting and "see what rank 1 says" in waiting


def test_two_pipelines_at_once(world: Any) -> None:
    for r in world(4).run(on.side_by_side, one_f_one_b(2, 3), 3):
        assert r["error"] < TOLERANCE
        assert r["seen"] in (["shared", "value"], ["grad", "shared"])


@pytest.mark.parametrize("order", ["1f1b", "weights last", "vee"])
def test_stages_split_over_ranks(world: Any, order: str) -> None:
    """Messages inside a stage and between stages, also with separate weight backwards."""
    for errors in world(4).run(on.split_over, on.ORDERS[order](2, 3), 3):
        assert len(errors) > 10 and max(errors.values()) < TOLERANCE, errors


def test_on_our_own_process_group(world: Any) -> None:
    check(world(2, "shm").run(on.train, "lm", on.separate_weights(2, 3), [3, 2, 3]))


def test_wrong_orders_are_refused(world: Any) -> None:
    with pytest.raises(PlanError, match="for 2 ranks and 2 micro-batches"):
        world(2).run(on.train, "mlp", one_f_one_b(3, 2), [2, 2])


def test_other_shapes_are_refused(world: Any) -> None:
    with pytest.raises(
        PlanError, match=r"0 of micro-batch 0 is torch.float64 \[3, 6\], and was captured as .* \[2, 6\]"
    ):
        world(1).run(on.other_shapes, one_f_one_b(1, 1))
