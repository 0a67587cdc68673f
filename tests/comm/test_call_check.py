"""Wrong calls are reported on every rank, within a second, with both calls and both lines; never a wrong result."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from world import World

from drumline.clusters import Link
from drumline.comm import Communicator, TorchTransport, Transport, run_threads
from drumline.comm.call_check import CrossingDetector, ranks_text
from drumline.core.errors import DrumlineError, GaveUp, InputError

SECONDS = {2: 1.0, 3: 10.0, 4: 10.0}
"""By number of ranks: within a second if nothing else runs, otherwise long before the timeout of 20 s."""
TWO = pytest.param(2, marks=pytest.mark.alone)

Worlds = Callable[[int], World]
Case = Callable[[Communicator, bool], Any]
"""The calls of a rank; the second argument is whether it is the odd one, always the last rank."""


def shape(comm: Communicator, odd: bool) -> None:
    if odd:
        comm.all_reduce(torch.ones(5))
    else:
        comm.all_reduce(torch.ones(4))


def transposed(comm: Communicator, odd: bool) -> None:
    """As many elements, in another shape."""
    if odd:
        comm.all_gather(torch.ones(2, 3))
    else:
        comm.all_gather(torch.ones(3, 2))


def dtype(comm: Communicator, odd: bool) -> None:
    if odd:
        comm.all_reduce(torch.ones(4, dtype=torch.int32))
    else:
        comm.all_reduce(torch.ones(4))


def operator(comm: Communicator, odd: bool) -> None:
    if odd:
        comm.reduce(torch.ones(4), op="max")
    else:
        comm.reduce(torch.ones(4), op="min")


def root(comm: Communicator, odd: bool) -> None:
    if odd:
        comm.broadcast(torch.ones(4), root=1)
    else:
        comm.broadcast(torch.ones(4))


def algorithm(comm: Communicator, odd: bool) -> None:
    if odd:
        comm.all_reduce(torch.ones(4), algorithm="doubling")
    else:
        comm.all_reduce(torch.ones(4), algorithm="ring")


def segments(comm: Communicator, odd: bool) -> None:
    if odd:
        comm.broadcast(torch.ones(4), algorithm="chain", segments=2)
    else:
        comm.broadcast(torch.ones(4), algorithm="chain", segments=4)


def collective(comm: Communicator, odd: bool) -> None:
    if odd:
        comm.broadcast(torch.ones(4))
    else:
        comm.all_reduce(torch.ones(4))


def short_broadcast(comm: Communicator, odd: bool) -> None:
    """gloo would fill a part of the longer one without an error."""
    if odd:
        comm.broadcast(torch.ones(8), algorithm=native_or("binomial", comm))
    else:
        comm.broadcast(torch.ones(4), algorithm=native_or("binomial", comm))


def native_or(name: str, comm: Communicator) -> str:
    return "native" if comm.transport.native("broadcast") else name


def extra(comm: Communicator, odd: bool) -> None:
    """One rank makes an extra call; the next call is a different one."""
    comm.all_reduce(torch.ones(4))
    if odd:
        comm.all_reduce(torch.ones(4))
    comm.barrier()


def missing(comm: Communicator, odd: bool) -> None:
    """One rank omits a call; the next call is a different one."""
    if not odd:
        comm.all_reduce(torch.ones(4))
    comm.barrier()


def order(comm: Communicator, odd: bool) -> None:
    """Two equal calls, swapped."""
    a, b = torch.ones(4), torch.ones(4) * 100

    def first() -> None:
        comm.all_reduce(a)

    def second() -> None:
        comm.all_reduce(b)

    for one in (second, first) if odd else (first, second):
        one()


def rotated(comm: Communicator, odd: bool) -> None:
    """Three equal calls, one rank a call ahead: no two ranks ever swap places."""
    calls = [
        lambda: comm.barrier(),
        lambda: comm.barrier(),
        lambda: comm.barrier(),
    ]
    for one in [*calls[1:], calls[0]] if odd else calls:
        one()


def refused(comm: Communicator, odd: bool) -> None:
    """One rank's call is invalid: the others must not wait for it."""
    if odd:
        comm.all_reduce(torch.ones(4), op="summ")
    else:
        comm.all_reduce(torch.ones(4))


TEXTS: dict[Case, tuple[str, str, str]] = {
    shape: (r"all_reduce float32 \(4\) op=sum", r"all_reduce float32 \(5\) op=sum", r"\(4\) against \(5\)"),
    transposed: (r"all_gather float32 \(3,2\)", r"all_gather float32 \(2,3\)", r"\(2,3\) against \(3,2\)"),
    dtype: (r"all_reduce float32", r"all_reduce int32", "float32 against int32"),
    operator: (r"reduce \S+ \S+ op=min root=0", r"reduce \S+ \S+ op=max root=0", "op=max against op=min"),
    root: (r"broadcast \S+ \S+ root=0", r"broadcast \S+ \S+ root=1", "root=0 against root=1"),
    algorithm: ("all_reduce .*=ring", "all_reduce .*=doubling", "algorithm=doubling against algorithm=ring"),
    segments: ("broadcast .*segments=4", "broadcast .*segments=2", "segments=2 against segments=4"),
    collective: ("all_reduce", "broadcast", "try:"),
    short_broadcast: (r"broadcast \S+ \(4\)", r"broadcast \S+ \(8\)", r"\(4\) against \(8\)"),
    extra: ("barrier", "all_reduce", "call 2"),
    missing: ("all_reduce", "barrier", "call 1"),
}


def outcome(comm: Communicator, case: Case) -> tuple[str, str, float]:
    """(error type, its text, seconds); afterwards the ranks must still be usable."""
    odd = comm.rank == comm.size - 1
    start = time.monotonic()
    try:
        case(comm, odd)
    except DrumlineError as e:
        return type(e).__name__, str(e), time.monotonic() - start
    return "", "", 0.0


def over_gloo(case: Case) -> tuple[str, str, float]:
    comm = Communicator(TorchTransport(timeout=20))
    result = outcome(comm, case)
    assert comm.all_reduce(torch.ones(1)).item() == comm.size
    return result


def over_threads(case: Case, p: int) -> list[tuple[str, str, float]]:
    def body(transport: Transport) -> tuple[str, str, float]:
        comm = Communicator(transport)
        result = outcome(comm, case)
        assert comm.all_reduce(torch.ones(1)).item() == comm.size
        return result

    return run_threads(body, p)


def outcomes(kind: str, p: int, case: Case, world: Worlds) -> list[tuple[str, str, float]]:
    return over_threads(case, p) if kind == "threads" else world(p).run(over_gloo, case)


@pytest.mark.parametrize("p", [TWO, 3, 4])
@pytest.mark.parametrize("kind", ["threads", "gloo"])
@pytest.mark.parametrize("case", TEXTS, ids=lambda case: case.__name__)
def test_different_calls_are_reported_on_every_rank(case: Case, kind: str, p: int, world: Worlds) -> None:
    results = outcomes(kind, p, case, world)
    texts = {text for _, text, _ in results}
    assert {name for name, _, _ in results} == {"InputError"}
    assert len(texts) == 1, "ranks say different things"
    assert max(seconds for _, _, seconds in results) < SECONDS[p]
    text = texts.pop()
    most, odd, difference = TEXTS[case]
    line = r"[^\n]*, at \S+test_call_check.py:\d+\n"
    assert re.search(rf"{ranks_text(range(p - 1))}: {most}{line}", text), text
    assert re.search(rf"rank {p - 1}: {odd}{line}", text), text
    assert re.search(difference, text), text
    assert len(set(re.findall(r"test_call_check.py:\d+", text))) >= 2, "both lines must be reported"
    assert "in the same order" in text


@pytest.mark.parametrize("kind", ["threads", "gloo"])
@pytest.mark.parametrize("case", [order, rotated], ids=lambda case: case.__name__)
@pytest.mark.parametrize("p", [TWO, 4])
def test_crossed_calls_are_reported(case: Case, kind: str, p: int, world: Worlds) -> None:
    results = outcomes(kind, p, case, world)
    assert {name for name, _, _ in results} == {"InputError"}
    assert max(seconds for _, _, seconds in results) < SECONDS[p]
    text = results[0][1]
    assert text == results[-1][1]
    assert re.search(rf"ranks 0 and {p - 1} make their calls in a different order", text), text
    assert "results since call 1 are wrong" in text and "crossings=False" in text
    assert len(set(re.findall(r"test_call_check.py:\d+", text))) == 2, text


@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_a_call_refused_on_one_rank_is_reported_on_all(kind: str, world: Worlds) -> None:
    first, second, last = outcomes(kind, 3, refused, world)
    assert first[1] == second[1] and "rank 2: refused: unknown operator 'summ', at " in first[1]
    assert "ranks 0 and 1: all_reduce float32 (4)" in first[1]
    assert last[1].startswith("unknown operator 'summ'\n") and "test_call_check.py:" in last[1]
    assert max(seconds for _, _, seconds in (first, second, last)) < SECONDS[3]


def test_without_the_check_nothing_is_compared() -> None:
    """The reason for the check: some transports would confuse float32 and int32."""

    def body(transport: Transport) -> str:
        comm = Communicator(transport, check=False)
        return outcome(comm, order)[0]

    assert run_threads(body, 2) == ["", ""]


def test_crossings_can_be_allowed() -> None:
    def body(transport: Transport) -> str:
        return outcome(Communicator(transport, crossings=False), order)[0]

    assert run_threads(body, 2) == ["", ""]


def test_fixed_roles_are_no_crossing() -> None:
    """The usual program: one rank's call is on another line, always the same."""

    def body(transport: Transport) -> None:
        comm = Communicator(transport)
        for _ in range(5):
            if comm.rank == 0:
                comm.broadcast(torch.ones(2))
            else:
                comm.broadcast(torch.zeros(2))
        for turn in range(4):
            if comm.rank == turn % comm.size:
                comm.broadcast(torch.ones(2), root=comm.rank)
            else:
                comm.broadcast(torch.zeros(2), root=turn % comm.size)

    run_threads(body, 2)


def test_ranks_with_different_clusters_are_reported() -> None:
    """They might choose different algorithms."""

    def body(transport: Transport) -> str:
        comm = Communicator(transport, links=Link(1e-6, 1e9 * (1 + transport.rank)))
        return outcome(comm, lambda c, odd: c.all_reduce(torch.ones(4)))[1]

    first, second = run_threads(body, 2)
    assert first == second and "ranks made different calls" in first and "different clusters, links" in first


def ends_early() -> str:
    """Rank 1 has no call left: the other waits until the timeout, and reports the missing rank."""
    comm = Communicator(TorchTransport(dist.new_group(timeout=timedelta(seconds=20)), timeout=0.5))
    text = ""
    if comm.rank == 0:
        with pytest.raises(GaveUp) as caught:
            comm.all_reduce(torch.ones(4))
        text = str(caught.value)
    dist.barrier()
    return text


@pytest.mark.alone
def test_an_extra_call_at_the_end(world: Worlds) -> None:
    text, _ = world(2).run(ends_early)
    assert "rank 1 has not called it" in text and "all_reduce float32 (4)" in text and "test_call_check.py:" in text

    def body(transport: Transport) -> None:
        comm = Communicator(transport)
        if comm.rank == 0:
            comm.all_reduce(torch.ones(4))

    start = time.monotonic()
    with pytest.raises(GaveUp, match=r"rank 0 waits for the others, in all_reduce(.|\n)*rank 1 has ended"):
        run_threads(body, 2)
    assert time.monotonic() - start < 1


def test_crossings() -> None:
    x, y, z = 1, 2, 3
    seen = CrossingDetector(3)
    assert seen.add(7, (x, x, x), 1) is None
    assert seen.add(7, (x, y, x), 2) is None
    assert seen.add(8, (y, x, y), 3) is None  # of other calls
    assert seen.add(7, (y, x, y), 4) == (0, 1, 2)
    chain = CrossingDetector(2)
    assert [chain.add(7, pair, i + 1) for i, pair in enumerate([(x, y), (y, z), (z, x)])] == [None, None, (0, 1, 1)]
    short = CrossingDetector(2)
    short.add(7, (x, y), 1)
    for i in range(CrossingDetector.LATEST):
        short.add(7, (100 + i, 1000 + i), 2 + i)
    assert short.add(7, (y, x), 99) is None  # no longer remembered


def test_ranks_text() -> None:
    assert [ranks_text(r) for r in ([3], [0, 1], [0, 1, 2, 3], [0, 2, 5])] == [
        "rank 3",
        "ranks 0 and 1",
        "ranks 0 to 3",
        "ranks 0, 2 and 5",
    ]


def test_it_is_an_input_error() -> None:
    with pytest.raises(InputError):
        run_threads(lambda t: Communicator(t).all_reduce(torch.ones(1 + t.rank)), 2)
