"""Messages by context, source and tag: order, wildcards, probes, truncation, synchronous sends, cancelled receives,
concurrent waits, and deadlock reports. On threads, and on gloo where processes matter."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from world import World

from drumline.comm import Communicator
from drumline.comm.messaging.endpoint import Endpoint
from drumline.comm.messaging.gloo_endpoint import GlooEndpoint
from drumline.comm.messaging.matching import MessageMatcher
from drumline.comm.messaging.messages import ANY
from drumline.comm.messaging.thread_endpoint import run_endpoints
from drumline.comm.messaging.transport import MatcherTransport
from drumline.core.errors import GaveUp, InputError

Fn = Callable[[MessageMatcher], Any]


def on_threads(fn: Fn, p: int) -> list[Any]:
    def body(endpoint: Endpoint) -> Any:
        matcher = MessageMatcher(endpoint)
        result = fn(matcher)
        matcher.close()
        return result

    return run_endpoints(body, p)


def on_gloo(fn: Fn) -> Any:
    matcher = MessageMatcher(GlooEndpoint())
    result = fn(matcher)
    matcher.close()
    return result


def view(text: bytes | bytearray) -> memoryview:
    return memoryview(text)


def take(m: MessageMatcher, src: int, tag: int, size: int = 100, context: int = 0) -> tuple[int, int, bytes]:
    into = bytearray(size)
    receive = m.receive(src, context, tag, view(into))
    m.wait(receive)
    return receive.source, receive.tag, bytes(into[: receive.nbytes])


def order_and_wildcards(m: MessageMatcher) -> None:
    nxt, before = (m.rank + 1) % m.size, (m.rank - 1) % m.size
    for i in range(3):
        m.wait(m.send(nxt, 0, i, view(b"tag%d" % i)))
        m.wait(m.send(nxt, 7, i, view(b"other context")))
    m.wait(m.send(nxt, 0, 9, view(b"first")))
    m.wait(m.send(nxt, 0, 9, view(b"second")))
    assert take(m, before, 2) == (before, 2, b"tag2")
    assert take(m, ANY, 9) == (before, 9, b"first")
    assert take(m, before, ANY) == (before, 0, b"tag0")
    assert take(m, ANY, ANY) == (before, 1, b"tag1")
    assert take(m, ANY, ANY) == (before, 9, b"second")
    assert [take(m, before, ANY, context=7)[1] for _ in range(3)] == [0, 1, 2]


def receives_posted_first(m: MessageMatcher) -> None:
    nxt, before = (m.rank + 1) % m.size, (m.rank - 1) % m.size
    buffers = [bytearray(8) for _ in range(4)]
    receives = [
        m.receive(src, 0, tag, view(b))
        for (src, tag), b in zip([(before, 5), (ANY, ANY), (before, 5), (ANY, 6)], buffers, strict=True)
    ]
    for tag, text in [(5, b"a"), (6, b"b"), (5, b"c"), (6, b"d")]:
        m.wait(m.send(nxt, 0, tag, view(text)))
    m.wait(*receives)
    assert [bytes(b[: r.nbytes]) for r, b in zip(receives, buffers, strict=True)] == [b"a", b"b", b"c", b"d"]


def sizes(m: MessageMatcher) -> None:
    nxt, before = (m.rank + 1) % m.size, (m.rank - 1) % m.size
    for size in (0, 1, 5000, 400_000):
        sent = bytearray(b"x" * size)
        sending = m.send(nxt, 0, 0, view(sent), copy=size < 100_000)
        if size < 100_000:
            assert sending.done
            sent[:] = b"y" * size
        assert take(m, before, 0, size + 3)[2] == b"x" * size
        m.wait(sending)
    m.wait(m.send(nxt, 0, 0, view(b"too long"), copy=True))
    short = bytearray(b"....")
    receive = m.receive(before, 0, 0, view(short))
    m.wait(receive)
    assert receive.truncated
    assert receive.nbytes == 8
    assert short == b"...."
    m.wait(m.send(nxt, 0, 1, view(b"any size"), copy=True))
    receive = m.receive(before, 0, 1, None)
    m.wait(receive)
    assert bytes(receive.into) == b"any size"


def probes_and_reserved_messages(m: MessageMatcher) -> None:
    nxt, before = (m.rank + 1) % m.size, (m.rank - 1) % m.size
    assert m.probe(ANY, 99, ANY) is None
    m.wait(m.send(nxt, 3, 4, view(b"one"), copy=True), m.send(nxt, 3, 4, view(b"two"), copy=True))
    probed = None
    while probed is None:
        probed = m.probe(before, 3, 4)
    assert (probed.src, probed.tag, probed.nbytes) == (before, 4, 3)
    taken = m.probe(ANY, 3, ANY, take=True)
    assert taken is probed
    assert take(m, ANY, ANY, context=3)[2] == b"two"
    receive = m.accept(taken, None)
    m.wait(receive)
    assert bytes(receive.into) == b"one"


def synchronous_sends_wait_for_a_match(m: MessageMatcher) -> None:
    nxt, before = (m.rank + 1) % m.size, (m.rank - 1) % m.size
    sending = m.send(nxt, 0, 0, view(b"sync"), sync=True)
    for _ in range(20):
        m.make_progress()
    assert not sending.done
    assert take(m, before, 0)[2] == b"sync"
    m.wait(sending)


def cancelled_receives_match_nothing(m: MessageMatcher) -> None:
    nxt, before = (m.rank + 1) % m.size, (m.rank - 1) % m.size
    into = bytearray(4)
    receive = m.receive(before, 0, 0, view(into))
    assert m.cancel(receive)
    assert receive.done
    assert receive.cancelled
    m.wait(m.send(nxt, 0, 0, view(b"abcd")))
    assert take(m, before, 0)[2] == b"abcd"
    assert into == b"\0\0\0\0"
    assert not m.cancel(receive)


def several_threads_wait(m: MessageMatcher) -> None:
    nxt, before = (m.rank + 1) % m.size, (m.rank - 1) % m.size
    failed: list[BaseException] = []

    def work(tag: int) -> None:
        try:
            for i in range(30):
                sending = m.send(nxt, tag, 0, view(b"%d" % i), copy=True)
                assert take(m, before, 0, context=tag)[2] == b"%d" % i
                m.wait(sending)
        except BaseException as e:
            failed.append(e)

    threads = [threading.Thread(target=work, args=(tag,)) for tag in (1, 2, 3)]
    for t in threads:
        t.start()
    work(0)
    for t in threads:
        t.join()
    assert not failed, failed


def collectives_run_over_messages(m: MessageMatcher) -> None:
    comm = Communicator(MatcherTransport(m, context=1 << 40))
    tensor = comm.all_reduce(torch.arange(1000.0) + m.rank)
    assert torch.equal(tensor, torch.arange(1000.0) * m.size + sum(range(m.size)))
    if m.size > 1:
        transport = MatcherTransport(m, context=1 << 41)
        pending = transport.send(torch.zeros(3 + m.rank), (m.rank + 1) % m.size, 0)
        before = (m.rank - 1) % m.size
        with pytest.raises(InputError, match=f"rank {before} sent {4 * (3 + before)} bytes, rank {m.rank} expects 40"):
            transport.receive(torch.zeros(10), before, 0).wait()
        pending.wait()


CHECKS = [
    order_and_wildcards,
    receives_posted_first,
    sizes,
    probes_and_reserved_messages,
    synchronous_sends_wait_for_a_match,
    cancelled_receives_match_nothing,
    several_threads_wait,
    collectives_run_over_messages,
]


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_threads(check: Fn, p: int) -> None:
    on_threads(check, p)


@pytest.mark.parametrize("p", [1, 3])
@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_gloo(check: Fn, p: int, world: Callable[[int], World]) -> None:
    world(p).run(on_gloo, check)


# -- deadlocks --------------------------------------------------------------------------------------------------------


def caught(fn: Fn, m: MessageMatcher) -> str:
    start = time.monotonic()
    with pytest.raises(GaveUp) as e:
        fn(m)
    assert time.monotonic() - start < 4.0
    return str(e.value)


def both_receive_first(m: MessageMatcher) -> str:
    other = 1 - m.rank
    return caught(lambda m: take(m, other, 5), m)


def ring_of_synchronous_sends(m: MessageMatcher) -> str:
    return caught(lambda m: m.wait(m.send((m.rank + 1) % m.size, 0, 0, view(b"x"), sync=True)), m)


def collective_against_receive(m: MessageMatcher) -> str:
    comm = Communicator(MatcherTransport(m, context=1 << 40))
    if m.rank == 0:
        return caught(lambda _: comm.all_reduce(torch.ones(3)), m)
    return caught(lambda m: take(m, 0, 0), m)


def waits_for_one_that_has_ended(m: MessageMatcher) -> str:
    return "" if m.rank == 1 else caught(lambda m: take(m, 1, 0), m)


def all_name(texts: list[str], *expected: str) -> None:
    for text in texts:
        for one in expected:
            assert one in text, text
    assert len(set(texts)) == 1, "every rank tells the same"


@pytest.mark.alone  # deadlock detection depends on timing
@pytest.mark.parametrize("where", ["threads", "gloo"])
def test_a_deadlock_is_reported_on_all_its_ranks(where: str, world: Callable[[int], World]) -> None:
    def run(fn: Fn, p: int) -> list[str]:
        return on_threads(fn, p) if where == "threads" else world(p).run(on_gloo, fn)

    all_name(
        run(both_receive_first, 2),
        "deadlock: ranks 0, 1 wait for messages that cannot arrive",
        "from rank 1, tag 5",
        "from rank 0, tag 5",
        "at test_matching.py:",
    )
    all_name(
        run(ring_of_synchronous_sends, 3),
        "deadlock: ranks 0, 1, 2 wait",
        "rank 0: wait to rank 1, tag 0, at test_matching.py:",
        "rank 2: wait to rank 0, tag 0",
    )
    all_name(run(collective_against_receive, 2), "rank 0: all_reduce", "rank 1: ", "from rank 0, tag 0")
    ended = run(waits_for_one_that_has_ended, 2)[0]
    assert "deadlock: rank 0 waits for messages that cannot arrive" in ended
    assert "rank 1: has ended" in ended


def a_rank_that_computes(m: MessageMatcher) -> None:
    if m.rank == 0:
        time.sleep(2.0)
        m.wait(m.send(1, 0, 0, view(b"late"), copy=True))
    elif m.rank == 1:
        assert take(m, 0, 0)[2] == b"late"
        m.wait(m.send(2, 0, 0, view(b"on"), copy=True))
    else:
        assert take(m, 1, 0)[2] == b"on"


def a_thread_that_computes(m: MessageMatcher) -> None:
    """The main thread waits for a late message from another thread of the other rank."""
    if m.rank == 0:
        later = threading.Thread(target=lambda: (time.sleep(1.8), m.wait(m.send(1, 0, 0, view(b"x"), copy=True))))
        later.start()
        m.detector.users.add(later.ident)  # as a thread that has sent before
        assert take(m, 1, 0)[2] == b"y"
        later.join()
    else:
        assert take(m, 0, 0)[2] == b"x"
        m.wait(m.send(0, 0, 0, view(b"y"), copy=True))


@pytest.mark.alone
def test_a_computing_rank_is_no_deadlock() -> None:
    on_threads(a_rank_that_computes, 3)
    on_threads(a_thread_that_computes, 2)


def after_a_deadlock(m: MessageMatcher) -> None:
    both_receive_first(m)
    m.wait(m.send(1 - m.rank, 0, 5, view(b"again"), copy=True))
    assert take(m, 1 - m.rank, 5)[2] == b"again"


@pytest.mark.alone
def test_ranks_continue_after_a_deadlock() -> None:
    on_threads(after_a_deadlock, 2)


def test_sending_after_close_is_an_error() -> None:
    def fn(endpoint: Endpoint) -> None:
        m = MessageMatcher(endpoint)
        m.close()
        m.close()
        with pytest.raises(GaveUp, match="nothing is sent or received after Finalize"):
            m.send(0, 0, 0, view(b""))

    run_endpoints(fn, 1)
