"""Update rules, played over thousands of random schedules without processes: bounds, counts, and no deadlock.

A schedule is a random order of what can happen to a rule: a worker asks, reads newer weights, hands in, fails, comes
(back). Every property is checked after every event, against a plain list of what was handed out.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.schedules.update_rules import BatchRule, GradientTask, StepRule, UpdateRule, WeightUpdate, update_rule

SCHEDULES_PER_EXAMPLE = 20
"""Random orders of events for each drawn rule: drawing a rule takes longer than playing one."""
EXAMPLES = 520
_PLAYED: Counter[str] = Counter()


@dataclass
class Play:
    """One random schedule of a rule, and what became of every task."""

    rule: UpdateRule
    chance: random.Random
    most_workers: int
    faults: float
    """Chance of a loss or a join at every event."""
    handed_out: int = 0
    versions: dict[int, int] = field(default_factory=dict)
    """The weights that each worker computes on."""
    updates: list[WeightUpdate] = field(default_factory=list)

    def run(self) -> None:
        """Play until all is done and every worker has handed in."""
        budget = 400 * (self.rule.steps + 1) * (self.most_workers + 1)
        while not self.rule.done:
            budget -= 1
            assert budget, "a schedule that makes no progress"
            self._event()
        for worker in list(self.rule.running):  # late gradients: nothing may be applied after the end
            assert not self._hand_in(worker)
        counts = self.rule.counts
        assert self.handed_out == counts.applied + counts.dropped + counts.lost
        assert counts.applied == sum(len(u.contributions) for u in self.updates)
        assert [u.number for u in self.updates] == list(range(self.rule.steps)), "versions count up by one"
        assert all(self.rule.next_task(w) is None for w in self.rule.workers)

    def _event(self) -> None:
        if self.chance.random() < self.faults:
            self._fault()
        idle = [w for w in self.rule.workers if w not in self.rule.running]
        self.chance.shuffle(idle)
        busy = list(self.rule.running)
        if idle and (not busy or self.chance.random() < 0.6):
            waiting = [w for w in idle if not self._ask(w)]
            # as long as one worker lives: if every worker waits, the run is done
            assert self.rule.done or self.rule.running or not waiting, f"workers {waiting} wait for nobody"
        elif busy:
            worker = self.chance.choice(busy)
            if self.chance.random() < 0.2:
                self.rule.read(worker, self.rule.version)
                self.versions[worker] = self.rule.version
            self._hand_in(worker)

    def _fault(self) -> None:
        living = list(self.rule.workers)
        if len(living) > 1 and self.chance.random() < 0.5:
            worker = self.chance.choice(living)
            self.rule.lose(worker)
            self.versions.pop(worker, None)
        else:
            self.rule.join(self.chance.randrange(self.most_workers))

    def _ask(self, worker: int) -> GradientTask | None:
        reserved = self.rule.reserve(worker, 0)
        task = self.rule.next_task(worker)
        if task is not None:
            self.handed_out += 1
            if isinstance(self.rule, BatchRule) and reserved and task.step not in reserved:
                assert task.step < reserved[0], "only a batch that was given back comes before what is reserved"
            self.rule.reserve(worker, self.chance.choice([0, 0, 1, 3]))
            self.versions[worker] = self.rule.version
            self.check_task(task)
        return task

    def _hand_in(self, worker: int) -> list[WeightUpdate]:
        before, version = self.rule.version, self.versions.pop(worker)
        task = self.rule.running[worker]
        made = self.rule.hand_in(worker)
        assert self.rule.version == before + len(made)
        for update in made:
            for c in update.contributions:
                assert c.staleness >= 0 and c.weight == self.rule.weight_of(c.staleness)
                if (c.worker, c.task) == (worker, task):
                    assert c.staleness == update.number - version
        self.updates += made
        self.check_updates(made)
        return made

    def check_task(self, task: GradientTask) -> None:
        """A task that was just handed out."""
        assert 0 <= task.step < self.rule.steps and 0 <= task.slice < task.slices
        if isinstance(self.rule, StepRule):
            # no worker runs further ahead of the last complete step than the bound
            assert self.rule.version <= task.step <= self.rule.version + self.bound

    def check_updates(self, made: list[WeightUpdate]) -> None:
        """Updates that were just made."""
        for update in made:
            if isinstance(self.rule, StepRule):
                assert update.step == update.number
                assert all(c.staleness <= self.bound for c in update.contributions)
                assert len(update.contributions) + update.missing == self.rule.slices
                assert update.missing <= self.rule.backup
            assert [c.task.slice for c in update.contributions] == sorted({c.task.slice for c in update.contributions})

    @property
    def bound(self) -> int:
        """The k of `stale:k`, as given to the rule."""
        assert isinstance(self.rule, StepRule)
        return self.rule.stale


@st.composite
def rules(draw: st.DrawFn, mode: str) -> tuple[dict[str, int], int]:
    """(arguments of a rule, a seed)."""
    workers = draw(st.integers(1, 6))
    steps = draw(st.integers(1, 8))
    first = draw(st.integers(0, steps - 1))
    arguments = {"workers": workers, "steps": steps, "first": first}
    if mode == "steps":
        arguments["stale"] = draw(st.integers(0, 5))
        arguments["backup"] = draw(st.integers(0, workers - 1)) if draw(st.booleans()) else 0
    return arguments, draw(st.integers(0, 2**32))


def plays(rule: type[UpdateRule], arguments: dict[str, int], seed: int) -> Iterator[Play]:
    """Random schedules of one rule: half of them without faults."""
    for i in range(SCHEDULES_PER_EXAMPLE):
        chance = random.Random(seed + i)
        made = rule(**arguments)  # type: ignore[arg-type]  # each rule takes what was drawn for it
        yield Play(made, chance, arguments["workers"] + 2, faults=0.15 if i % 2 else 0.0)
        _PLAYED[rule.__name__] += 1


def renumbered(play: Play, first: int) -> None:
    """A rule that continues a run numbers its updates from `first`."""
    play.updates[:0] = [WeightUpdate(n, n, ()) for n in range(first)]


@settings(max_examples=EXAMPLES, deadline=None)
@given(rules("steps"))
def test_steps_never_exceed_the_bound_and_count_every_slice(drawn: tuple[dict[str, int], int]) -> None:
    arguments, seed = drawn
    for play in plays(StepRule, arguments, seed):
        renumbered(play, arguments["first"])
        play.run()
        applied = Counter((c.task.step, c.task.slice) for u in play.updates for c in u.contributions)
        assert max(applied.values()) == 1, "a slice was applied twice"
        if not arguments["backup"]:
            steps, slices = range(arguments["first"], arguments["steps"]), range(arguments["workers"])
            assert set(applied) == {(t, s) for t in steps for s in slices}
            assert play.rule.counts.dropped == 0


@settings(max_examples=EXAMPLES, deadline=None)
@given(rules("batches"))
def test_every_batch_is_applied_exactly_once(drawn: tuple[dict[str, int], int]) -> None:
    arguments, seed = drawn
    for play in plays(BatchRule, arguments, seed):
        renumbered(play, arguments["first"])
        play.run()
        batches = [u.step for u in play.updates[arguments["first"] :]]
        assert sorted(batches) == list(range(arguments["first"], arguments["steps"]))
        assert play.rule.counts.dropped == 0


def test_ten_thousand_schedules_were_played() -> None:
    """Counted, not claimed; runs after the two above, in one process with them."""
    if not _PLAYED:
        pytest.skip("the schedules were played by another process")
    assert _PLAYED["StepRule"] >= 10_000 and _PLAYED["BatchRule"] >= 10_000, _PLAYED


class OneTooFar(Play):
    """A play whose rule runs one step further ahead than it says: the checks must notice."""

    @property
    def bound(self) -> int:
        """One less than the rule's own."""
        return super().bound - 1


def test_a_rule_that_exceeds_its_bound_is_caught() -> None:
    with pytest.raises(AssertionError):
        for seed in range(50):
            OneTooFar(StepRule(3, 6, stale=2), random.Random(seed), 4, faults=0.0).run()


def test_staleness_counts_updates_between_reading_and_applying() -> None:
    rule = BatchRule(2, 3, damping="inverse")
    assert rule.next_task(0) == GradientTask(0) and rule.next_task(1) == GradientTask(1)
    (first,) = rule.hand_in(1)
    (second,) = rule.hand_in(0)
    assert (first.step, first.contributions[0].staleness, first.contributions[0].weight) == (1, 0, 1.0)
    assert (second.step, second.contributions[0].staleness, second.contributions[0].weight) == (0, 1, 0.5)


def test_zero_staleness_waits_for_every_slice() -> None:
    rule = StepRule(2, 2)
    assert rule.next_task(0) == GradientTask(0, 0, 2) and rule.next_task(1) == GradientTask(0, 1, 2)
    assert rule.hand_in(0) == [] and rule.next_task(0) is None and rule.counts.waits == {0: 1}
    (update,) = rule.hand_in(1)
    assert [c.worker for c in update.contributions] == [0, 1] and rule.next_task(0) == GradientTask(1, 0, 2)


def test_backup_does_not_wait_for_the_slowest() -> None:
    rule = StepRule(3, 2, backup=1)
    for worker in range(3):
        rule.next_task(worker)
    assert rule.hand_in(0) == []
    (update,) = rule.hand_in(1)
    assert update.missing == 1 and rule.version == 1
    assert rule.hand_in(2) == [] and rule.counts.dropped == 1
    assert rule.next_task(2) == GradientTask(1, 2, 3), "a late worker goes on with the current step"


def test_the_slice_of_a_lost_worker_is_computed_by_another() -> None:
    rule = StepRule(2, 1)
    rule.next_task(0)
    rule.next_task(1)
    rule.lose(1)
    assert rule.hand_in(0) == [] and rule.next_task(0) == GradientTask(0, 1, 2)
    (update,) = rule.hand_in(0)
    assert rule.done and [c.worker for c in update.contributions] == [0, 0] and rule.counts.lost == 1


def test_batches_are_reserved_for_a_worker_that_loads_ahead_until_no_others_are_left() -> None:
    rule = BatchRule(2, 5)
    assert rule.next_task(0) == GradientTask(0) and rule.reserve(0, 2) == (1, 2)
    assert rule.next_task(1) == GradientTask(3) and rule.reserve(1, 2) == (4,)
    rule.hand_in(1)
    assert rule.next_task(1) == GradientTask(4) and rule.reserve(1, 2) == ()
    rule.hand_in(1)
    assert rule.next_task(1) == GradientTask(1), "the last batches do not wait for a slow worker"
    assert rule.reserve(0, 2) == (2,)
    rule.lose(0)
    rule.hand_in(1)
    assert rule.next_task(1) == GradientTask(0) and rule.reserve(1, 2) == (2,)
    assert StepRule(2, 5, first=1).reserve(1, 3) == (1, 2, 3) and StepRule(2, 5, first=3).reserve(1, 3) == (3, 4)
    assert BatchRule(2, 5, in_turns=True).reserve(0, 2) == (), "batches come in order"


@pytest.mark.parametrize(("mode", "kind"), [("async", BatchRule), ("hogwild", BatchRule), ("server", StepRule)])
def test_the_rule_of_each_word(mode: str, kind: type[UpdateRule]) -> None:
    assert type(update_rule(mode, 2, 3)) is kind
    assert update_rule("stale", 2, 3, stale=4).next_task(0) == GradientTask(0, 0, 2)
