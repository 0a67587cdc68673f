"""When to restart, when to give up, when to continue with fewer ranks: decisions without processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drumline.comm.fault_injection import InjectedError, inject
from drumline.core.errors import InputError, RankFailed
from drumline.launchers.hang_watch import HangWatch
from drumline.loop.restarts import FaultOptions, RestartLoop
from drumline.plans import Plan
from drumline.runtime.training.checkpoint_policy import CheckpointPolicy

DONE = [{"preempted": False}]
Result = RankFailed | list[dict[str, Any]] | Callable[[], list[dict[str, Any]]]


def failed(kind: str = "signal", rank: int = 1, what: str = "") -> RankFailed:
    return RankFailed(what or f"rank {rank} was ended by signal SIGKILL", rank=rank, kind=kind)


class Script:
    """Attempts that end as written: after a number of steps, with a failure or a result."""

    def __init__(self, folder: Path, *ends: tuple[int, Result], plan: str = "dp=4", **options: Any) -> None:
        self.ends, self.plans, self.resumed, self.notes, self.steps = list(ends), [], [], [], 0
        self.before: list[int] = []
        self.loop = RestartLoop(
            self.attempt,
            Plan.parse(plan),
            CheckpointPolicy(str(folder), 1),
            FaultOptions(**options),
            steps=12,
            watch=HangWatch(),
            steps_done=lambda: self.steps,
            notify=self.notes.append,
        )

    def attempt(self, plan: Plan, saves: CheckpointPolicy, number: int) -> list[Any]:
        assert number == len(self.plans)
        self.plans.append(str(plan))
        self.resumed.append(saves.resume)
        self.before.append(saves.before)
        self.steps, end = self.ends.pop(0)
        if isinstance(end, RankFailed):
            raise end
        return end() if callable(end) else end


def test_a_killed_rank_restarts_the_run(tmp_path: Path) -> None:
    script = Script(tmp_path, (5, failed()), (9, failed(rank=0)), (12, DONE))
    assert script.loop.run() == DONE
    assert script.plans == ["dp=4"] * 3 and script.resumed == [None] * 3
    assert script.loop.faults == ["rank 1 was ended by signal SIGKILL", "rank 0 was ended by signal SIGKILL"]
    assert script.notes[0].endswith("restarting dp=4 from step 0, because there is no checkpoint")


def test_a_rank_that_fails_after_the_last_save_repeats_the_steps_before_it(tmp_path: Path) -> None:
    def saved(*steps: int) -> list[dict[str, Any]]:
        for step in steps:
            (tmp_path / f"step-{step:08d}").mkdir()
        raise failed()

    script = Script(tmp_path, (8, lambda: saved(8)), (12, lambda: saved(10, 12)), (12, DONE))
    assert script.loop.run() == DONE
    assert script.resumed == [None, str(tmp_path), str(tmp_path / "step-00000010")]


def test_a_run_with_a_single_checkpoint_after_its_last_step_starts_again(tmp_path: Path) -> None:
    def saved() -> list[dict[str, Any]]:
        (tmp_path / "step-00000012").mkdir()
        raise failed()

    script = Script(tmp_path, (12, saved), (12, DONE))
    assert script.loop.run() == DONE and script.resumed == [None, None]
    assert script.notes[0].endswith("from step 0, because the only checkpoint is of the last step")


def test_it_resumes_from_its_own_checkpoints_only(tmp_path: Path) -> None:
    (tmp_path / "step-00000500").mkdir()  # of an earlier run in the same folder
    script = Script(tmp_path, (0, DONE))
    script.ends = [(3, failed()), (5, failed()), (9, DONE)]
    first = script.attempt

    def attempt(plan: Plan, saves: CheckpointPolicy, number: int) -> list[Any]:
        if number == 1:
            (tmp_path / "step-00000004").mkdir()
        return first(plan, saves, number)

    script.loop._attempt = attempt
    script.loop.run()
    assert script.resumed == [None, None, str(tmp_path / "step-00000004")]


@pytest.mark.parametrize("step", [5, 0])
def test_three_restarts_without_progress_are_enough(tmp_path: Path, step: int) -> None:
    """Also before the first step: the failure that is restarted from is not a restart."""
    script = Script(tmp_path, (step, failed()), *[(step, failed(rank=r)) for r in (0, 1, 2)])
    with pytest.raises(RankFailed) as caught:
        script.loop.run()
    assert caught.value.exit_code == 5 and caught.value.rank == 2
    assert caught.value.what.startswith("gave up after 3 restarts, 3 of them without a new step: rank 2 was")
    assert caught.value.rule == "at most 3 restarts without a new step"


def test_progress_resets_the_count(tmp_path: Path) -> None:
    ends = [(step, failed(rank=step % 3)) for step in (1, 1, 1, 2, 2, 2, 3, 3, 3)]
    script = Script(tmp_path, *ends, (4, DONE))
    assert script.loop.run() == DONE and len(script.loop.faults) == 9


@pytest.mark.parametrize("ends", [[(0, "first")], [(4, "same"), (4, "same")]])
def test_an_exception_that_comes_again_ends_the_run(tmp_path: Path, ends: list[tuple[int, str]]) -> None:
    script = Script(tmp_path, *[(n, failed("exception", what=text)) for n, text in ends])
    with pytest.raises(RankFailed, match=ends[0][1]):
        script.loop.run()
    assert not script.ends


def test_the_same_exception_of_another_rank_is_the_same(tmp_path: Path) -> None:
    """All ranks raise it, each time another one first."""
    ends = [(4, failed("exception", rank, f"rank {rank} failed: ValueError: bug")) for rank in (0, 1)]
    with pytest.raises(RankFailed, match="rank 1 failed"):
        Script(tmp_path, *ends).loop.run()


def raised(line: int, text: str) -> RankFailed:
    """An exception of the user's program, whose text differs each time."""
    trace = f'Traceback:\n  File "engine.py", line 7, in step\n  File "job.py", line {line}, in loss\n{text}'
    return RankFailed(f"rank 1 failed: {text}", rank=1, kind="exception", trace=trace)


def test_an_exception_is_the_same_by_its_type_and_line(tmp_path: Path) -> None:
    """Its text may name an address or a process."""
    same = [(4, raised(9, f"KeyError: <Sample at 0x7f{i}0>")) for i in range(2)]
    with pytest.raises(RankFailed, match="rank 1 failed: KeyError: <Sample at 0x7f10>"):
        Script(tmp_path, *same).loop.run()
    for other in (raised(10, "KeyError: 3"), raised(9, "IndexError: 3")):
        script = Script(tmp_path, (4, raised(9, "KeyError: 3")), (4, other), (9, DONE))
        assert script.loop.run() == DONE


def test_injected_exceptions_are_told_apart_by_attempt_and_step(tmp_path: Path) -> None:
    """They all come from one line."""
    with pytest.raises(InjectedError) as caught:
        inject("raise", 1, " in attempt 0, step 4")
    text = f"{type(caught.value).__name__}: {caught.value}"
    ends = [(4, raised(9, text.replace("attempt 0", f"attempt {attempt}"))) for attempt in (0, 1)]
    assert Script(tmp_path, *ends, (9, DONE)).loop.run() == DONE
    with pytest.raises(RankFailed):
        Script(tmp_path, ends[0], ends[0]).loop.run()


def test_the_step_of_an_exception_is_saved_before_it_can_come_again(tmp_path: Path) -> None:
    script = Script(tmp_path, (4, failed("exception")), (7, failed("memory")), (8, failed()), (12, DONE))
    assert script.loop.run() == DONE
    assert script.before == [0, 4, 7, 0]


def test_other_errors_and_no_restarts(tmp_path: Path) -> None:
    with pytest.raises(RankFailed):
        Script(tmp_path, (5, failed()), restarts=0).loop.run()

    def bad_input() -> list[Any]:
        raise InputError("a bad batch")

    script = Script(tmp_path, (5, bad_input))
    with pytest.raises(InputError):
        script.loop.run()


def test_fewer_ranks_when_one_does_not_come_back(tmp_path: Path) -> None:
    script = Script(tmp_path, (5, failed()), (5, failed()), (12, DONE), min_ranks=2)
    assert script.loop.run() == DONE
    assert script.plans == ["dp=4", "dp=4", "dp=3"]
    assert script.loop.faults[1] == "rank 1 was ended by signal SIGKILL; continued with dp=3"


def test_fewer_ranks_keep_the_rest_of_the_plan(tmp_path: Path) -> None:
    script = Script(tmp_path, (5, failed()), (5, failed()), (9, DONE), plan="dp=4,shard=2,zero=3,micro=2", min_ranks=1)
    script.loop.run()
    assert script.plans[-1] == "dp=2,shard=2,zero=3,micro=2"  # shard=2 does not divide dp=3


def test_not_below_the_least_number_of_ranks(tmp_path: Path) -> None:
    for plan, least in (("dp=4", 4), ("tp=2", 1)):
        script = Script(tmp_path, *[(5, failed())] * 4, plan=plan, min_ranks=least)
        with pytest.raises(RankFailed, match="gave up after 3 restarts"):
            script.loop.run()
        assert script.plans == [str(Plan.parse(plan))] * 4


def test_the_full_size_is_tried_again(tmp_path: Path) -> None:
    """The ranks are asked to stop by the file STOP, save, and start again in full number."""

    def until_asked() -> list[Any]:
        import time

        end = time.monotonic() + 10
        while not (tmp_path / "STOP").exists():
            assert time.monotonic() < end
            time.sleep(0.01)
        return [{"preempted": True}]

    script = Script(tmp_path, (5, failed()), (5, failed()), (9, until_asked), (12, DONE), min_ranks=1, regrow=0.1)
    assert script.loop.run() == DONE
    assert script.plans == ["dp=4", "dp=4", "dp=3", "dp=4"]
    assert not (tmp_path / "STOP").exists()
    assert "trying all 4 ranks again: dp=4" in script.notes


def test_a_second_hang_in_the_same_step_makes_the_watch_more_patient(tmp_path: Path) -> None:
    for ends, factor in (((5, 6, 7), 1), ((5, 5, 5), 4)):
        script = Script(tmp_path, *[(step, failed("hang")) for step in ends], (9, DONE))
        before = script.loop._watch.limit
        script.loop.run()
        assert script.loop._watch.limit == factor * before


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (FaultOptions(restarts=-1), "--restarts -1"),
        (FaultOptions(min_ranks=0), "--min-ranks 0"),
        (FaultOptions(hang_timeout="soon"), "--hang-timeout soon"),
        (FaultOptions(hang_timeout="0"), "--hang-timeout 0"),
        (FaultOptions(chaos="kil:1"), "--chaos kil:1"),
    ],
)
def test_bad_options(options: FaultOptions, text: str) -> None:
    with pytest.raises(InputError, match=text):
        options.check()
