"""The step recorder: phases and messages of the last steps, with their bytes, under every backend."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

import pytest
import recorder_functions as on_ranks
import torch
from world import World

from drumline.runtime.state.recorder import KEEP, StepRecorder

Worlds = Callable[..., World]
CPU = torch.device("cpu")


def test_phases_of_a_step() -> None:
    recorder = StepRecorder(3, CPU)
    with recorder.phase("data"):
        time.sleep(0.002)
    recorder.begin(7)
    for name in ("forward", "backward", "forward", "backward", "optimizer"):
        with recorder.phase(name):
            time.sleep(0.001)
    recorder.end()
    spans = recorder.spans(7)
    assert [s.name for s in spans] == ["data", "forward", "backward", "forward", "backward", "optimizer"]
    assert [s.lane for s in spans] == ["data"] + ["compute"] * 5 and {s.rank for s in spans} == {3}
    assert spans[0].start >= 0 and all(a.end <= b.start for a, b in pairwise(spans))
    clock = recorder.phase_seconds()
    assert clock["data"] >= 0.002 and clock["forward"] >= 0.002 and clock["optimizer"] >= 0.001
    assert recorder.timeline(7).notes == ("step 7",) and recorder.timeline().seconds >= 0.007


def test_loops_that_do_not_mark_the_end_of_a_step() -> None:
    recorder = StepRecorder(0, CPU)
    for _ in range(3):
        for name in ("forward", "backward", "forward", "backward", "optimizer"):
            with recorder.phase(name):
                pass
    assert [len(recorder.spans(i)) for i in range(3)] == [5, 5, 5] and recorder.steps == (0, 1)


def test_last_steps_are_kept() -> None:
    recorder = StepRecorder(0, CPU)
    for i in range(KEEP + 5):
        recorder.begin(i)
        with recorder.phase("forward"):
            pass
        recorder.end()
    assert recorder.steps == tuple(range(5, KEEP + 5))
    assert recorder.spans(4) == [] and len(recorder.spans(5)) == 1
    assert (
        recorder.timeline(4).spans == ()
        and recorder.phase_seconds(4) == {}
        and StepRecorder(0, CPU).phase_seconds() == {}
    )


def test_blocking_messages() -> None:
    recorder = StepRecorder(0, CPU)
    recorder.begin(0)
    with recorder.phase("backward"), recorder.message("all_reduce", torch.zeros(3, 4)):
        time.sleep(0.001)
    recorder.end()
    [message] = [s for s in recorder.spans() if s.lane == "communication"]
    assert message.name == "all_reduce" and message.bytes == 48 and message.end - message.start >= 0.001


@pytest.mark.alone
def test_own_time() -> None:
    """A message that lasts until its phase ends counts as waiting for others."""
    recorder = StepRecorder(0, CPU)
    recorder.begin(0)
    with recorder.phase("backward"):
        early = recorder.start_message("all_reduce", 8.0)
        early.end()
        time.sleep(0.02)
        last = recorder.start_message("all_reduce", 8.0)
        time.sleep(0.04)
        last.end()
    with recorder.phase("optimizer"):
        time.sleep(0.01)
    recorder.end()
    own = recorder.own_seconds()
    assert 0.02 <= own["backward"] < 0.035 and own["optimizer"] >= 0.01
    assert recorder.phase_seconds()["backward"] >= 0.06


def test_cuda_events_are_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those of dropped steps: recorded steps are unchanged."""

    class Event:
        made = 0

        def __init__(self, enable_timing: bool) -> None:
            Event.made += 1
            self.records = 0

        def record(self, stream: object) -> None:
            assert stream == "stream"
            self.records += 1

    asked: list[object] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: asked.append(device) or "stream")
    recorder = StepRecorder(0, torch.device("cuda"))
    for i in range(3 * KEEP):
        recorder.begin(i)
        for name in ("forward", "backward", "optimizer"):
            with recorder.phase(name):
                pass
        recorder.end()
    assert recorder.steps == tuple(range(2 * KEEP, 3 * KEEP))
    assert Event.made == 4 * KEEP
    assert len(asked) == 3 * KEEP, "the stream is looked up once per step"
    marks = [m for s in recorder._steps for m in [s.start, *(end for _, _, end in s.phases)]]
    assert len({id(m) for m in marks}) == len(marks) == 4 * KEEP


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_phases_on_a_gpu() -> None:
    """Phases on a GPU are those of its stream: the host finishes long before."""
    device = torch.device("cuda")
    recorder, x = StepRecorder(0, device), torch.randn(4096, 4096, device=device)
    x @ x
    for i in range(3):
        recorder.begin(i)
        with recorder.phase("forward"):
            for _ in range(20):
                x @ x
        with recorder.message("all_reduce", x):
            x.add(1)
        recorder.end()
    assert recorder.phase_seconds(2)["forward"] > 20 * 2 * 4096**3 / 1e15  # no GPU multiplies faster
    forward, message = recorder.spans(2)
    assert forward.end <= message.start + 1e-6 and message.bytes == x.nbytes


@pytest.mark.parametrize(
    ("backend", "plan"),
    [
        ("gloo", "dp=2"),
        ("gloo", "dp=2,micro=2"),
        ("gloo", "dp=2,zero=3"),
        ("gloo", "dp=2,zero=1"),
        ("gloo", "dp=2,zero=2"),
        ("shm", "dp=2"),
        ("shm", "dp=2,zero=3"),
        ("shm", "dp=2,zero=1"),
        ("shm", "dp=2,zero=2"),
    ],
)
def test_messages_of_a_step(world: Worlds, backend: str, plan: str) -> None:
    """The recorded bytes are those that the strategy must send."""
    for result in world(2, backend).run(on_ranks.messages, plan):
        parameters = result["parameters"]
        sent = {
            name: sum(m for n, m in result["messages"] if n.startswith(name))
            for name in ("all_reduce", "all_gather", "reduce_scatter")
        }
        if "zero" not in plan:
            assert parameters <= sent["all_reduce"] <= parameters + 4096 and not sent["all_gather"]
        else:
            assert parameters <= sent["reduce_scatter"] <= 1.3 * parameters + 4096
            gathers = 2 if plan.endswith("zero=3") else 1  # units that are resharded after forward are gathered twice
            assert parameters <= sent["all_gather"] <= 1.3 * gathers * parameters + 4096
        assert result["phases"] >= {"data", "forward", "backward", "optimizer"}
        assert result["steps"] == (0, 1, 2)
        assert result["inside"], "messages are within their step"


def test_nothing_is_recorded_outside_steps(world: Worlds) -> None:
    assert world(2, "shm").run(on_ranks.outside) == [(True, True)] * 2


def test_slow_rank(world: Worlds) -> None:
    """A slow rank shows in its own time, though all ranks take the same time for a step."""
    for backend in ("shm", "gloo"):
        fast, slow = world(2, backend).run(on_ranks.one_is_slow, "dp=2")
        assert slow["own"] > on_ranks.SLOW > fast["own"], backend
        assert fast["all"] > on_ranks.SLOW / 2  # it may start the step later; it waits for the rest
