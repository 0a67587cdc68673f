"""Ranks of another launcher join one job: tasks, events, results and errors travel as JSON through the store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from drumline.clusters import Link
from drumline.core.errors import CorruptFile, GaveUp, InputError, LaunchedRankFailed, PlanError
from drumline.core.rank_info import RankInfo
from drumline.core.timeline import Span
from drumline.launchers.channel import StoreChannel
from drumline.launchers.choice import find_launcher
from drumline.launchers.early_signals import PreemptedEarly
from drumline.launchers.external_ranks import OWN, ExternalRanks, error_fields
from drumline.launchers.wire import decode, encode

RANKS = 3


def on_ranks(
    lead: Callable[[ExternalRanks], Any], task: Callable[..., Any], own: object = None
) -> tuple[Any, list[Any]]:
    """The outcome of the first rank and of the others, which are threads with one store."""
    store = dist.HashStore()
    outcomes: dict[int, Any] = {}

    def rank(r: int) -> None:
        ranks = ExternalRanks(RankInfo(r, RANKS, r, "torchrun"), "test", store)
        ranks.own = f"{own} of {r}"
        try:
            if r:
                outcomes[r] = ranks.follow({"task": task})
                return
            outcomes[r] = lead(ranks)
            ranks.finish({"result": outcomes[r]})
        except Exception as e:
            if not r:
                ranks.finish({"error": error_fields(e)})
            outcomes[r] = e
        finally:
            if not r:
                ranks._leave()

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(RANKS)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    return outcomes[0], [outcomes[r] for r in range(1, RANKS)]


def test_results_events_and_own_values() -> None:
    events: list[tuple[int, Any]] = []

    def task(emit: Any, value: Any, mine: str) -> Any:
        emit({"from": mine})
        return value, mine

    task.__name__ = "task"
    first, others = on_ranks(
        lambda ranks: ranks.run(
            task, Span(0, "data", "x", 0.5, float("inf")), OWN, on_event=lambda r, e: events.append((r, e))
        ),
        task,
        "job",
    )
    assert first == [(Span(0, "data", "x", 0.5, float("inf")), f"job of {r}") for r in range(RANKS)]
    assert others == [first, first]
    assert sorted((r, e["from"]) for r, e in events) == [(r, f"job of {r}") for r in range(RANKS)]


@pytest.mark.parametrize("failing", [0, 1])
def test_the_rank_that_failed_first_is_named_once(failing: int) -> None:
    def task(emit: Any, mine: str) -> None:
        if mine.endswith(str(failing)):
            raise ValueError("no data here")
        raise dist.DistNetworkError("Connection closed by peer")

    task.__name__ = "task"
    first, others = on_ranks(lambda ranks: ranks.run(task, OWN, on_event=None), task)
    assert isinstance(first, LaunchedRankFailed)
    assert first.what == f"rank {failing} failed: ValueError: no data here"
    assert "only it can start them again" in first.rule
    assert "in task" in str(first)
    assert [(type(e), e.what, e.silent) for e in others] == [(LaunchedRankFailed, first.what, True)] * 2
    assert not first.silent


def test_input_errors_keep_their_kind() -> None:
    def lead(ranks: ExternalRanks) -> None:
        ranks.check_size("the plan dp=4", 4)

    first, others = on_ranks(lead, lambda: None)
    assert isinstance(first, PlanError)
    assert first.what == "the plan dp=4 needs 4 ranks, but test started 3"
    assert all(isinstance(e, PlanError) and e.silent and str(e) == str(first) for e in others)


def test_a_task_that_is_not_known_is_refused() -> None:
    def other(emit: Any) -> None:
        return None

    first, _ = on_ranks(lambda ranks: ranks.run(other, on_event=None), other)
    assert isinstance(first, GaveUp)
    assert "KeyError: 'other'" in first.what


@pytest.mark.parametrize(
    "value",
    [
        None,
        [1, 2.5, "x", True],
        (1, (2, [3])),
        {"a": {1: (2,)}, "b": {}},
        {"$type": "os:system"},
        Path("/a b"),
        Link(1e-6, 2e9),
        {("a", 1): Span(1, "link", "y", 0.0, 1.0, 8.0)},
        float("-inf"),
    ],
)
def test_values_come_back_equal(value: Any) -> None:
    assert decode(encode(value)) == value


@pytest.mark.parametrize(
    "text",
    [
        '{"$type": "os:system", "$fields": {"command": "true"}}',
        '{"$type": "drumline.launchers.wire:json", "$fields": {}}',
        '{"$type": "drumline.launchers.external_ranks:ExternalRanks", "$fields": {}}',
        '{"$type": "drumline.core.timeline:files", "$fields": {}}',
        '{"$type": "drumline.core.timeline:Span", "$fields": {"rank": 0}}',
        '{"$type": 3, "$fields": {}}',
        '{"$tuple": 1}',
        "[",
        "\x00",
    ],
)
def test_only_values_of_this_package_are_built(text: str) -> None:
    with pytest.raises(CorruptFile, match="a message between ranks is damaged"):
        decode(text)


@pytest.mark.parametrize("value", [object(), {1, 2}, b"x", len])
def test_other_values_are_not_sent(value: object) -> None:
    with pytest.raises(InputError, match="cannot be sent to ranks of another launcher"):
        encode(value)


def test_long_texts() -> None:
    channel = StoreChannel(dist.HashStore())
    text = "".join(chr(32 + (i * i) % 90) for i in range(3_000_000))
    channel.put("long", text)
    assert channel.get("long") == text
    for i in range(5):
        channel.append("list", str(i))
    assert list(channel.unread("list")) == list("01234")
    assert list(channel.unread("list")) == []
    assert channel.wait("absent", seconds=0.05) == ""


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({}, None),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "torchrun"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"}, "torchrun"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}, "slurm"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_ID": "0"}, None),  # srun --pty bash
        ({"SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}, None),  # a batch script
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, "mpiexec"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "mpiexec"),
        ({"RANK": "1", "WORLD_SIZE": "2", "DRUMLINE_STORE": "/x"}, "local"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "RANK": "1", "WORLD_SIZE": "4"}, "torchrun"),
    ],
)
def test_the_launcher_is_found(variables: dict[str, str], name: str | None) -> None:
    launcher = find_launcher(variables)
    assert (launcher.name if launcher else None) == name


def test_ranks_that_call_different_verbs_are_told() -> None:
    """One rank plans alone, the others train: they would take its answer for their own."""
    store, outcomes = dist.HashStore(), []
    first = ExternalRanks(RankInfo(0, 2, 0, "torchrun"), "test", store)
    first.finish({"verb": "plan", "result": "an answer"})
    other = ExternalRanks(RankInfo(1, 2, 1, "torchrun"), "test", store)
    with pytest.raises(InputError, match="rank 1 called train, and rank 0 plan"):
        outcomes.append(other.follow({}, "train"))
    assert not outcomes


@pytest.mark.parametrize("asked", [0, 2])
def test_all_ranks_end_when_one_is_asked_to_stop_before_the_training(asked: int) -> None:
    store = dist.HashStore()
    ranks = [ExternalRanks(RankInfo(r, RANKS, r, "torchrun"), "test", store) for r in range(RANKS)]
    ranks[asked].preempted()
    for r in {0, 1, 2} - {asked}:
        with pytest.raises(PreemptedEarly) as ended:
            ranks[r].follow({}) if r else ranks[0].run(lambda emit: None, on_event=None)
        assert ended.value.code == 0
