"""Replays a symmetric collective by one rank of each kind, and equal rounds once.

**Ranks.** If neither the links nor the rounds change when all ranks are shifted by d (`Topology.period`), rank r and
rank r + d do the same at the same time: fair rates are unique, so they are as symmetric as the links. The first d ranks
stand for all; a message to rank r arrives at the one that stands for r, and uses the ports that stand for its own.

**Rounds.** While equal rounds follow each other, the replay is compared with itself whenever rank 0 enters a round. If
all ranks and messages are where they were some rounds before, the future repeats what happened since, and as many of
these repetitions as fit are left out: they add time and bytes, and nothing else.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ..core.timeline import Span, Timeline
from ..schedules.symmetric import SymmetricRounds
from ..theory.alpha_beta import Links, NodeTopology, Port, UniformTopology, as_topology, message_seconds
from .collective_replay import MOST_MESSAGES, NetworkReplay, too_many_messages
from .event_loop import EventLoop
from .network import FairNetwork, summarise_use

FEWEST_ROUNDS = 8
"""Equal rounds left from which it pays to look for a repetition."""
LOOK_BACK = 32
"""Rounds that a repetition may span."""
SAME_STATE = 1e-12
"""Difference of two times, over the time since the first, up to which they are equal: rounding."""

_Totals = dict[Port, tuple[float, float]]


def can_fold(rounds: Sequence[SymmetricRounds], p: int, message_bytes: int, links: Links) -> bool:
    """Whether the ranks of these rounds are alike on these links, and the messages have whole bytes."""
    topology = as_topology(links)
    period = topology.period(p)
    if period is None or p % period or any((message_bytes * one.share).denominator > 1 for one in rounds):
        return False
    swaps = isinstance(topology, UniformTopology | NodeTopology)  # any two groups of ranks may change places
    return all(one.keeps(period, p) and (swaps or not one.xor) for one in rounds)


def replay_folded(rounds: Sequence[SymmetricRounds], p: int, message_bytes: int, links: Links) -> NetworkReplay:
    """Replay rounds that `can_fold`. The timeline has the ranks that stand for all, and one span for what repeats."""
    period = as_topology(links).period(p)
    assert period is not None and can_fold(rounds, p, message_bytes, links)
    if len(rounds) * period > MOST_MESSAGES:
        raise too_many_messages(f"{len(rounds)} different rounds", p)
    return _FoldedReplay(rounds, period, message_bytes, links).run()


def price_rounds(rounds: Sequence[SymmetricRounds], p: int, message_bytes: int, links: Links) -> float:
    """The price of rounds that `can_fold`, as `theory.alpha_beta.schedule_seconds` adds them up."""
    topology = as_topology(links)
    period = topology.period(p)
    assert period is not None
    seconds = 0.0
    for one in rounds:
        m, load, start, slowest = float(message_bytes * one.share), Counter[Port](), 0.0, 0.0
        for src in range(period):
            dst = one.partner(src)
            slowest = max(slowest, message_seconds(m, topology.link(src, dst)))
            for port in topology.shared(src, dst):
                load[standing_for(port, period)] += 1
                start = max(start, topology.link(src, dst).alpha)
        transfers = max((n * m / topology.capacity(port) for port, n in load.items()), default=0.0)
        seconds += one.times * max(slowest, start + transfers if load else 0.0)
    return seconds


def standing_for(port: Port, period: int) -> Port:
    """The port of the first `period` ranks that does the same: ports are named by the lowest rank behind them."""
    return (port[0], port[1] % period, port[2])


@dataclass(slots=True)
class _Rank:
    """One rank that stands for others."""

    phase: int = 0
    """Index of its equal rounds."""
    round: int = 0
    """Among these."""
    missing: int = 2
    """Messages of the round, one sent and one received, that have not arrived."""
    sending: bool = False
    """Whether its message of this round has started."""
    since: float = 0.0
    """When that was."""
    flow: int = 0
    """Number of the flow of that message, past its start-up."""


@dataclass(slots=True)
class _State:
    """Everything that decides about the future, relative to the time and round of rank 0."""

    now: float
    round: int
    whole: tuple[tuple[int, int, int, bool, int], ...]
    """By rank: phase, rounds ahead, missing, sending, whether its message is under way."""
    real: tuple[float, ...]
    """By rank that sends: seconds since its start, bytes left over the bytes, and the rate."""
    totals: _Totals

    def repeats(self, other: _State) -> bool:
        """Whether the future is the same as after an earlier state."""
        near = SAME_STATE * max(self.now, 1e-30)
        return self.whole == other.whole and all(
            math.isclose(a, b, rel_tol=1e-9, abs_tol=near) for a, b in zip(self.real, other.real, strict=True)
        )


class _FoldedReplay:
    """The state of one replay."""

    def __init__(self, rounds: Sequence[SymmetricRounds], period: int, message_bytes: int, links: Links) -> None:
        self.rounds, self.period = rounds, period
        self.topology, self.loop = as_topology(links), EventLoop()
        self.network = FairNetwork(self.topology, self.loop)
        self.times = [one.times for one in rounds]
        self.sizes = [int(message_bytes * one.share) for one in rounds]
        self.ranks = [_Rank() for _ in range(period)]
        self.receivers = [[one.partner(r) for r in range(period)] for one in rounds]
        self.senders = [{dst % period: src for src, dst in enumerate(dsts)} for dsts in self.receivers]
        self.history: list[_State] = []
        self.spans: list[Span] = []
        self.left_out = 0.0
        """Seconds of the repetitions that were left out so far."""
        self.rounds_left_out = [0] * len(rounds)
        self.totals_left_out: _Totals = {}

    def run(self) -> NetworkReplay:
        """Run to the end."""
        for rank in range(self.period):
            self._start(rank)
        end = self.loop.run() + self.left_out
        assert all(rank.phase == len(self.rounds) for rank in self.ranks), "some ranks never finished"
        totals = {port: self._whole(port, total) for port, total in self.network.totals().items()}
        note = f"{self.period} ranks stand for all; equal rounds are drawn once"
        timeline = Timeline("predicted", tuple(self.spans), (note,))
        use = summarise_use(totals, self.topology, end)
        return NetworkReplay(timeline, end, (end,), use, self.period)

    def _whole(self, port: Port, total: tuple[float, float]) -> tuple[float, float]:
        size, busy = self.totals_left_out.get(port, (0.0, 0.0))
        return total[0] + size, total[1] + busy

    def _start(self, number: int) -> None:
        """Start the message of this rank and the one to it, if both of their ends are in the round."""
        phase = self.ranks[number].phase
        if phase == len(self.rounds):
            return
        for src in {number: None, self.senders[phase][number]: None}:
            rank, other = self.ranks[src], self.ranks[self.receivers[phase][src] % self.period]
            if not rank.sending and (rank.phase, rank.round) == (other.phase, other.round):
                rank.sending, rank.since, rank.flow = True, self.loop.now, 0
                alpha = self.topology.link(src, self.receivers[phase][src]).alpha
                self.loop.after(alpha, partial(self._transfer, src))

    def _transfer(self, src: int) -> None:
        rank = self.ranks[src]
        path = self.topology.path(src, self.receivers[rank.phase][src])
        ports = tuple(standing_for(port, self.period) for port in path)
        rank.flow = self.network.send(ports, self.sizes[rank.phase], partial(self._finish, src))

    def _finish(self, src: int) -> None:
        """A message has arrived: its ends may enter the next round."""
        rank = self.ranks[src]
        phase, dst = rank.phase, self.receivers[rank.phase][src]
        k = sum(self.times[:phase]) + sum(self.rounds_left_out[: phase + 1]) + rank.round
        span = (rank.since + self.left_out, self.loop.now + self.left_out, float(self.sizes[phase]))
        self.spans.append(Span(src, "link", f"round {k}: {src}->{dst}", *span))
        ends = (src, dst % self.period)
        for end in ends:
            self.ranks[end].missing -= 1
        for end in dict.fromkeys(ends):
            if not self.ranks[end].missing:
                self._enter(end)
        for end in ends:
            self._start(end)

    def _enter(self, number: int) -> None:
        """Enter the next round; rank 0 looks whether the replay repeats."""
        rank = self.ranks[number]
        rank.missing, rank.sending, rank.round = 2, False, rank.round + 1
        if rank.round == self.times[rank.phase]:
            rank.phase, rank.round = rank.phase + 1, 0
            if number == 0:
                self.history.clear()
        elif number == 0 and self.times[rank.phase] - rank.round >= FEWEST_ROUNDS:
            self._leave_out_repetitions()

    def _leave_out_repetitions(self) -> None:
        now = self._state()
        before = next((state for state in reversed(self.history) if now.repeats(state)), None)
        self.history = [*self.history, now][-LOOK_BACK:]
        if before is None:
            return
        phase, span = self.ranks[0].phase, now.round - before.round
        ahead = max(rank.round for rank in self.ranks)
        count = (self.times[phase] - 1 - ahead) // span
        if count < 1:
            return
        start, seconds = self.loop.now + self.left_out, count * (now.now - before.now)
        self.times[phase] -= count * span
        self.left_out += seconds
        self.rounds_left_out[phase] += count * span
        for port, (size, busy) in now.totals.items():
            size_before, busy_before = before.totals.get(port, (0.0, 0.0))
            old_size, old_busy = self.totals_left_out.get(port, (0.0, 0.0))
            more = (old_size + count * (size - size_before), old_busy + count * (busy - busy_before))
            self.totals_left_out[port] = more
        for src, dst in enumerate(self.receivers[phase]):
            name = f"{count * span} rounds: {src}->{dst}"
            self.spans.append(Span(src, "link", name, start, start + seconds, count * span * float(self.sizes[phase])))
        self.history.clear()

    def _state(self) -> _State:
        first, flows, now = self.ranks[0], self.network.under_way(), self.loop.now
        whole = tuple(
            (rank.phase, rank.round - first.round, rank.missing, rank.sending, rank.flow in flows)
            for rank in self.ranks
        )
        real: list[float] = []
        for rank in self.ranks:
            if rank.sending:
                left, rate = flows.get(rank.flow, (0.0, 0.0))
                real += [now - rank.since, left / rate if rate else 0.0, rate]
        return _State(now, first.round, whole, tuple(real), self.network.totals())
