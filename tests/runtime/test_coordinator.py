"""The coordinator behind real connections: a worker that fails while a thread still answers it never takes from, or
hands in for, its successor.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from drumline.comm import remote_calls
from drumline.comm.remote_calls import CallClient, CallerGone, CallServer, Values
from drumline.core.errors import GaveUp
from drumline.runtime.asynchronous.coordinator import Coordinator, HandedIn, Superseded
from drumline.runtime.asynchronous.worker_buffers import mean
from drumline.schedules import update_rule

SECONDS = 20.0


class Serving:
    """A coordinator, and the calls of its workers."""

    def __init__(self, sync: str, workers: int, steps: int, **options: Any) -> None:
        self.coordinator = Coordinator(update_rule(sync, workers, steps, **options), workers)
        self.waiting = threading.Semaphore(0)
        """Released when a thread begins to wait for a task."""
        self.callers: list[Caller] = []
        self.calls = CallServer(self._answer, local=True, most_bytes=0, on_lost=self.coordinator.lose)
        check = self.coordinator._wait_as

        def wait(worker: int, epoch: int) -> None:
            self.waiting.release()
            check(worker, epoch)

        self.coordinator._wait_as = wait  # type: ignore[method-assign]

    def _answer(self, caller: int, name: str, values: Values, tensors: list[torch.Tensor]) -> tuple[Values, tuple[()]]:
        c = self.coordinator
        if name == "join":
            return {"epoch": c.join(caller)}, ()
        if name == "next":
            given = c.next_task(caller, values["epoch"])
            return {"step": None if given.task is None else given.task.step, "number": given.number}, ()
        gradient = HandedIn([], 1.0, 1.0, 2, 1, versions=(c.rule.version,), number=values["number"])
        counts = c.hand_in(caller, gradient)
        while c._updates:
            c.gradients_of(c._updates.popleft())
            c.mark_applied()
        return {"counts": counts}, ()


class Caller:
    """A worker's connection."""

    def __init__(self, serving: Serving, worker: int) -> None:
        self._client = CallClient(serving.calls.address, worker)
        serving.callers.append(self)
        self._epoch = self._client.call("join")[0]["epoch"]

    def next(self) -> Values:
        """Ask for a task."""
        return self._client.call("next", {"epoch": self._epoch})[0]

    def hand_in(self, number: int) -> bool:
        """Hand a gradient in."""
        counts: bool = self._client.call("hand_in", {"number": number})[0]["counts"]
        return counts

    def die(self) -> None:
        """End the connection as the kernel does when the process is killed."""
        self._client._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection."""
        self._client.close()


@contextmanager
def serving(sync: str, workers: int, steps: int, **options: Any) -> Iterator[Serving]:
    """A server that is closed at the end."""
    server = Serving(sync, workers, steps, **options)
    try:
        yield server
    finally:
        server.coordinator.stop()
        server.calls.close()
        for caller in server.callers:
            caller.close()


def in_thread(call: Callable[[], Any]) -> Callable[[], Any]:
    """Begin a call; its result, or its error, once it is there."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as e:
            results.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(SECONDS)
        assert results, "no answer"
        return results[0]

    return result


@pytest.mark.parametrize(("sync", "ahead"), [("server", 1), ("stale", 3)])
def test_the_successor_of_a_worker_that_waited_gets_the_task(sync: str, ahead: int) -> None:
    for _ in range(10):
        with serving(sync, 2, 8, stale=ahead - 1) as s:
            a, b = Caller(s, 0), Caller(s, 1)
            late = b.next()["number"]
            for _ in range(ahead):
                assert a.hand_in(a.next()["number"])
            old = in_thread(a.next)
            assert s.waiting.acquire(timeout=SECONDS)
            a.die()
            successor = Caller(s, 0)
            new = in_thread(successor.next)
            assert s.waiting.acquire(timeout=SECONDS)
            assert b.hand_in(late)
            assert new()["step"] == ahead and isinstance(old(), CallerGone)
            assert s.coordinator.rule.counts.lost == 0
            assert successor.hand_in(new()["number"])


def test_a_gradient_on_an_old_connection_is_not_taken_for_the_successors_task() -> None:
    coordinator = Coordinator(update_rule("server", 2, 3), 2)
    first = coordinator.next_task(0, coordinator.join(0))
    second = coordinator.next_task(0, coordinator.join(0))
    assert first.task == second.task and first.number != second.number
    with pytest.raises(Superseded):
        coordinator.hand_in(0, HandedIn([], 1.0, 1.0, 2, 1, versions=(0,), number=first.number))
    assert coordinator.rule.running == {0: second.task}
    assert coordinator.hand_in(0, HandedIn([], 1.0, 1.0, 2, 1, versions=(0,), number=second.number))
    assert coordinator.take_void() == (first.number,) and coordinator.take_void() == ()


def test_an_old_connection_gets_no_task_before_the_successor_asks() -> None:
    coordinator = Coordinator(update_rule("async", 1, 3), 1)
    old = coordinator.join(0)
    new = coordinator.join(0)
    with pytest.raises(Superseded):
        coordinator.next_task(0, old)
    assert coordinator.next_task(0, new).task is not None


def test_a_connection_that_sends_no_token_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_calls, "_HELLO_SECONDS", 0.05)
    server = CallServer(lambda *_: ({}, ()), local=True, most_bytes=0)
    place = server.address.partition("#")[0].removeprefix("unix:")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.settimeout(SECONDS)
        silent.connect(place)
        assert silent.recv(1) == b""
    server.close()


def test_a_message_that_is_too_large_is_a_named_error() -> None:
    answers = lambda *_: ({}, [torch.zeros(5)])  # noqa: E731  # short
    server = CallServer(answers, local=True, most_bytes=8)
    client = CallClient(server.address, 0)
    with pytest.raises(GaveUp, match=r"the call 'push' has 12 bytes of tensors\n.*at most 8"):
        client.call("push", tensors=[torch.zeros(3)])
    assert len(client.call("push", tensors=[torch.zeros(2)], most_bytes=20)[1]) == 1
    with pytest.raises(GaveUp, match=r"the answer to 'pull' is too large\n.*20 bytes of tensors, and at most 19"):
        client.call("pull", most_bytes=19)
    client.close()
    server.close()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.complex64, torch.float64])
def test_tensors_of_all_kinds_travel(dtype: torch.dtype) -> None:
    server = CallServer(lambda caller, name, values, tensors: ({}, tensors), local=True, most_bytes=1 << 10)
    client = CallClient(server.address, 0)
    sent = torch.arange(5).to(dtype)
    assert torch.equal(client.call("echo", tensors=[sent], most_bytes=1 << 10)[1][0], sent)
    client.close()
    server.close()


def test_buffers_of_workers_are_averaged_and_counters_are_not() -> None:
    parts = [{"mean": torch.tensor([1.0, 2.0]), "count": torch.tensor([3])}, {"mean": torch.tensor([3.0, 2.0])}]
    assert {k: v.tolist() for k, v in mean(parts).items()} == {"mean": [2.0, 2.0], "count": [3]}


def test_the_buffers_of_a_lost_worker_count_until_another_hands_in() -> None:
    coordinator = Coordinator(update_rule("async", 2, 9), 2)
    epochs = [coordinator.join(w) for w in (0, 1)]
    for worker in (0, 1):
        given = coordinator.next_task(worker, epochs[worker])
        buffers = {"mean": torch.tensor([float(worker)])}
        gradient = HandedIn([], 1.0, 1.0, 2, 1, versions=(worker,), number=given.number, buffers=buffers)
        assert coordinator.hand_in(worker, gradient)
        coordinator.mark_applied()
    coordinator.lose(1)
    assert coordinator.mean_buffers()["mean"].item() == 0.5, "its last gradient may not be applied yet"
    given = coordinator.next_task(0, epochs[0])
    assert coordinator.hand_in(0, HandedIn([], 1.0, 1.0, 2, 1, versions=(2,), number=given.number))
    assert coordinator.mean_buffers()["mean"].item() == 0.0
