"""Pipeline schedules: closed forms against action-by-action times, activation bytes, skips."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.core.errors import InputError
from drumline.costs.pipeline_clock import PipelineTimes, bubble, idle_seconds, pipeline_seconds, time_pipeline
from drumline.costs.pipeline_memory import peak_activation_bytes
from drumline.schedules import ASYNCHRONOUS, ORDERS, Action, Pipeline, one_f_one_b, pipeline_order, prove_pipeline

RANKS, MICROS = st.integers(1, 8), st.integers(1, 32)
SECONDS = st.floats(0.01, 10)
calm = settings(deadline=None, max_examples=60)  # other work on the machine is no failure
MADE = [(name, virtual) for name, order in ORDERS.items() for virtual in order.virtual or (1, 2, 3, 4)]


def played(name: str, p: int, m: int, v: int, f: float, b: float, w: float) -> PipelineTimes:
    """Timed action by action, with equal stages."""
    order = pipeline_order(name, p, m, v)
    return time_pipeline(order, forward=f / v, backward=(b if order.splits_backward else b + w) / v, weight=w / v)


@pytest.mark.parametrize(("name", "virtual"), [x for x in MADE if x != ("zero-bubble", 2) and x[0] not in ASYNCHRONOUS])
@calm
@given(p=RANKS, m=MICROS, f=SECONDS, b=SECONDS, w=SECONDS)
def test_the_closed_form_equals_the_clock(
    name: str, virtual: int, p: int, m: int, f: float, b: float, w: float
) -> None:
    replay = played(name, p, m, virtual, f, b, w)
    assert pipeline_seconds(name, p, m, virtual, f, b, w) == pytest.approx(replay.seconds, rel=1e-9)
    assert bubble(name, p, m, virtual, f, b, w) == pytest.approx(replay.bubble, rel=1e-9, abs=1e-9)
    assert all(replay.busy(rank) == pytest.approx(m * (f + b + w)) for rank in range(p))


@calm
@given(p=RANKS, m=MICROS)
def test_the_v_schedule_is_optimal(p: int, m: int) -> None:
    """The V schedule has no closed form; these are its known properties, with actions of one unit."""
    actions = played("zero-bubble", p, m, 2, 2, 2, 2).seconds
    least = max(6 * m + p - 1, 4 * p + m)
    if m > p:
        assert actions == least
    assert least <= actions < least + 2 * p
    assert m <= p or idle_seconds("zero-bubble", p, m, 2, 1, 1, 1) == pytest.approx((p - 1) / 2)


@calm
@given(p=RANKS, f=SECONDS, b=SECONDS, w=SECONDS)
def test_the_bubble_of_the_v_does_not_grow_with_the_micro_batches(p: int, f: float, b: float, w: float) -> None:
    """The schedule is made for equal times; with others it loses something, but only once."""
    idle = [idle_seconds("zero-bubble", p, m, 2, f, b, w) for m in (2 * p, 4 * p, 8 * p)]
    assert idle == pytest.approx([idle[0]] * 3, abs=1e-6)


def test_the_numbers_of_four_ranks_and_eight_micro_batches() -> None:
    """Forward 1, backward 1 + 1: the numbers of docs/pipelines.md."""
    times = {(name, v): pipeline_seconds(name, 4, 8, v, 1, 1, 1) for name, v in MADE}
    assert times["naive", 1] == 96
    assert times["gpipe", 1] == times["1f1b", 1] == times["interleaved", 1] == 33
    assert [times["interleaved", v] for v in (2, 3, 4)] == [28.5, 27, 26.25]
    assert times["zero-bubble", 1] == 27
    assert times["zero-bubble", 2] == pytest.approx(25.5)
    assert times["naive", 1] > times["gpipe", 1] >= times["1f1b", 1] > times["interleaved", 2] > times["zero-bubble", 1]
    assert times["pipedream", 1] == times["pipedream-2bw", 1] == 24
    in_flight = {(name, v): max(prove_pipeline(pipeline_order(name, 4, 8, v)).activations) / v for name, v in MADE}
    assert (
        in_flight["gpipe", 1]
        == 8
        > in_flight["interleaved", 2]
        == 5.5
        > in_flight["1f1b", 1]
        == 4
        > in_flight["naive", 1]
        == 1
    )
    assert in_flight["zero-bubble", 1] == in_flight["zero-bubble", 2] == in_flight["1f1b", 1]


def test_work_without_time() -> None:
    assert bubble("gpipe", 4, 8, 1, 0, 0, 0) == 0
    assert bubble("1f1b", 4, 8, 1, 1, 1, 1) == pytest.approx(3 / 11)


def test_unknown_schedules_are_refused() -> None:
    with pytest.raises(InputError, match="gpipe with 2 stages per rank"):
        bubble("gpipe", 4, 8, 2, 1, 1, 1)
    with pytest.raises(InputError, match="unknown pipeline schedule 'gpip'"):
        idle_seconds("gpip", 4, 8, 1, 1, 1, 1)


def test_activation_bytes() -> None:
    assert peak_activation_bytes(one_f_one_b(3, 8), (10, 20, 30)) == (30, 40, 30)
    h1 = pipeline_order("zero-bubble", 3, 8)
    assert peak_activation_bytes(h1, (10, 20, 30)) == (30, 60, 90)  # all of it until W
    assert peak_activation_bytes(h1, (10, 20, 30), (4, 8, 12)) == (30, 48, 54)  # the last one: 30 + 2 x 12
    assert peak_activation_bytes(h1, (10, 10, 10), (15, 15, 15)) == (
        35,
        40,
        45,
    )  # gradients are kept too: it may become more
    with pytest.raises(InputError, match=r"kept bytes of 2 stages\n.*each of 3"):
        peak_activation_bytes(h1, (1, 1, 1), (1, 1))


@calm
@given(name=st.sampled_from(MADE), p=RANKS, m=MICROS)
def test_equal_bytes_times_activations_in_flight(name: tuple[str, int], p: int, m: int) -> None:
    order = pipeline_order(name[0], p, m, name[1])
    assert peak_activation_bytes(order, (2.0,) * order.stages) == tuple(
        2.0 * n for n in prove_pipeline(order).activations
    )


@calm
@given(name=st.sampled_from(MADE), p=RANKS, m=st.integers(1, 12), data=st.data())
def test_free_skips_do_not_delay_the_chain(name: tuple[str, int], p: int, m: int, data: st.DataObject) -> None:
    order = pipeline_order(name[0], p, m, name[1])
    pairs = [(s, t) for s in range(order.stages) for t in range(s + 2, order.stages)]
    chosen = data.draw(st.lists(st.sampled_from(pairs), unique=True, max_size=5)) if pairs else []
    plain = time_pipeline(order, forward=1, backward=1, weight=1)
    assert (
        time_pipeline(order, forward=1, backward=1, weight=1, skips=dict.fromkeys(chosen, 0.0)).actions == plain.actions
    )
    slow = time_pipeline(order, forward=1, backward=1, weight=1, transfer=0.25, skips=dict.fromkeys(chosen, 0.5))
    homes = order.homes()
    far = sum(homes[s] != homes[t] for s, t in chosen)
    near = sum(homes[s] != homes[s + 1] for s in range(order.stages - 1))
    assert len(slow.transfers) == 2 * m * (
        far + near
    )  # each value once, straight to who wants it, and its gradient back
    assert slow.seconds >= plain.seconds


def test_a_skip_is_sent_directly() -> None:
    times = time_pipeline(one_f_one_b(3, 1), forward=1, backward=1, transfer=(1, 2), skips={(0, 2): 5.0})
    assert [(str(h.action), h.src, h.dst, h.stage, h.start, h.end) for h in times.transfers] == [
        ("F0", 0, 1, 1, 1, 2),
        ("F0", 0, 2, 2, 1, 6),
        ("F0", 1, 2, 2, 3, 5),
        ("B0", 2, 1, 1, 8, 10),
        ("B0", 2, 0, 0, 8, 13),
        ("B0", 1, 0, 0, 11, 12),
    ]
    assert times.seconds == 14  # the skip is what the end waits for
    with pytest.raises(InputError, match="a skip from stage 0 to stage 1 of 3"):
        time_pipeline(one_f_one_b(3, 1), forward=1, backward=1, skips={(0, 1): 1.0})
    with pytest.raises(InputError, match=r"skip times -1.0\n.*not negative"):
        time_pipeline(one_f_one_b(3, 1), forward=1, backward=1, skips={(0, 2): -1.0})


def test_boundaries_may_differ() -> None:
    assert time_pipeline(one_f_one_b(3, 1), forward=1, backward=1, transfer=(1, 2)).seconds == 6 + 2 * 3
    with pytest.raises(InputError, match=r"3 transfer times for 2 boundaries\n.*one per boundary"):
        time_pipeline(one_f_one_b(3, 1), forward=1, backward=1, transfer=(1, 2, 3))


def test_slower_transfers_never_make_it_faster() -> None:
    for name, virtual in MADE:
        order = pipeline_order(name, 4, 8, virtual)
        ends = [time_pipeline(order, forward=1, backward=1, weight=1, transfer=t).seconds for t in (0, 0.1, 0.5, 2)]
        assert ends == sorted(ends) and ends[0] < ends[-1]


def test_slow_messages_cost_gpipe_least() -> None:
    """Its ranks wait for the first message of a direction; with alternating passes they wait for each."""
    ends = [
        time_pipeline(pipeline_order(n, 4, 8), forward=1, backward=2, transfer=0.5).seconds for n in ("gpipe", "1f1b")
    ]
    assert ends == [36, 41]


def test_a_deadlock_is_refused() -> None:
    stuck = Pipeline("by hand", 1, 1, ((Action("B", 0, 0), Action("F", 0, 0)),))
    with pytest.raises(InputError, match=r"by hand deadlocks on rank 0\n.*prove_pipeline"):
        time_pipeline(stuck, forward=1, backward=1)
