"""Injected faults: their notation, and when they occur."""

from __future__ import annotations

import math

import pytest

from drumline.comm import fault_injection
from drumline.comm.fault_injection import Fault, FaultInjector, RandomFaults, check_faults, parse_faults
from drumline.comm.rank_status import RankStatus
from drumline.core.errors import InputError


def test_notation() -> None:
    assert parse_faults("kill:1@5") == [Fault("kill", 1, 5)]
    assert parse_faults(" raise/backward , stop:3@2x4,exit:0/end!") == [
        Fault("raise", place="backward"),
        Fault("stop", 3, 2, attempts=4),
        Fault("exit", place="end", attempts=math.inf),
    ]
    assert parse_faults("random:30, random:2.5#7") == [RandomFaults(30), RandomFaults(2.5, 7)]
    assert parse_faults("") == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kil:1", "Did you mean 'kill'?"),
        ("kill:1/forwards", "Did you mean 'forward'?"),
        ("kill:x", "KIND"),
        ("random:0", "above 0"),
        ("kill:1@5;rm", "KIND"),
        ("kill:" + "9" * 40, "KIND"),
    ],
)
def test_bad_notation(text: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_faults(text)
    assert words in str(caught.value), str(caught.value)


def injected(text: str, monkeypatch: pytest.MonkeyPatch, *, rank: int = 1, attempt: int = 0) -> list[tuple[str, int]]:
    """(kind, step) of the faults in a run of four steps with a save after the second."""
    seen: list[tuple[str, int]] = []
    step = -1
    monkeypatch.setattr(fault_injection, "inject", lambda kind, *_: seen.append((kind, step)))
    status = RankStatus()
    FaultInjector(parse_faults(text), rank=rank, ranks=4, attempt=attempt).follow(status)
    for step in range(4):
        status.phase("data")
        status.step(step)
        for phase in ("forward", "backward"):
            status.phase(phase)
        status.collective_started("all_reduce")
        status.collective_ended()
        if step == 1:
            status.place("saving")
            status.place("training")
    status.place("ending")
    return seen


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("kill:1@2", [2]),
        ("kill:1/start", [-1]),
        ("kill:1@1/collective", [1]),
        ("kill:1@2/save", [1]),
        ("kill:1/end", [3]),
        ("kill:1@3/data", [3]),
        ("kill:0@2", []),
        ("slow:1@1,slow:1@2", [1, 2]),
    ],
)
def test_when_they_occur(text: str, steps: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert [step for _, step in injected(text, monkeypatch)] == steps


def test_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, attempts in (("kill:1@2", 1), ("kill:1@2x3", 3), ("kill:1@2!", 5)):
        assert [len(injected(text, monkeypatch, attempt=n)) for n in range(5)] == [1] * attempts + [0] * (5 - attempts)


def test_random_faults_reach_one_rank_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = {r: injected("random:0.000001#3", monkeypatch, rank=r) for r in range(4)}
    assert sum(map(len, faults.values())) >= 1
    steps = [step for seen in faults.values() for _, step in seen]
    assert len(steps) == len(set(steps))


def test_memory_runs_out() -> None:
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        fault_injection.inject("memory", 0)


def test_without_a_place_a_fault_comes_where_the_work_of_a_step_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a parameter server that is the update: it has no forward."""
    seen: list[str] = []
    monkeypatch.setattr(fault_injection, "inject", lambda kind, *_: seen.append(kind))
    for phases in (("data", "forward", "backward", "optimizer"), ("optimizer",)):
        injector = FaultInjector(parse_faults("kill:2@1"), rank=2, ranks=3, attempt=0)
        for step in range(3):
            injector._on_change("step", str(step))
            for phase in phases:
                injector._on_change("phase", phase)
    assert seen == ["kill", "kill"]


@pytest.mark.parametrize(
    ("text", "rule"), [("kill:2", "ranks 0 to 1"), ("raise:1@5", "5 steps, 0 to 4"), ("slow:7@0/end", "2 processes")]
)
def test_faults_that_a_run_cannot_have_are_refused(text: str, rule: str) -> None:
    with pytest.raises(InputError, match=rule):
        check_faults(text, processes=2, steps=5)
    check_faults("kill:1@4,random:10,stop:0@9/end", processes=2, steps=5)
