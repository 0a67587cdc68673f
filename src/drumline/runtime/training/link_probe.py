"""Times the links between hosts one by one, to find the rank whose messages are slow.

A slow link delays a collective on every rank, so the times of collectives do not show whose link it is. Here the
first rank of each host sends messages to its two neighbours on a ring of hosts, and they answer with a byte. A
neighbour of a slow host has one slow link, the slow host has two: the faster of its two links is a host's speed. Two
hosts have one link: then only the direction distinguishes them, and the sender is named. On one host there is no link
to time.

A probe takes as long as some messages of the training. It runs when messages are a good part of a step, and again when
they have become slower, or rarely enough to cost next to nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from ...comm.gloo_fallbacks import backend_of
from ...comm.hosts import Hosts, host_digest, hosts
from ...comm.torch_transport import TorchTransport
from ...comm.transport import Transport

SHARE = 0.2
"""Share of a step spent in messages below which a probe is not worth its time."""
SLOW_LINK = 1 / 0.75
"""A link is slow if it takes longer than the others by this factor."""
_PAYLOAD = 1 << 19
"""Bytes of a message: more than links carry at once before they slow down to their rate (token buckets)."""
_REPEATS = 3
"""Messages per link and direction."""
_CONFIRMATIONS = 5
"""How often a slow link is timed again: on hosts with more processes than cores, messages wait for a core."""
_BUDGET = 0.01
"""The share of the training that probes may take, if nothing has changed."""
_TAG = 0x6C70
"""Tag of the messages."""
_CHAIN = 8
"""Up to that many hosts, links are timed one after the other, so that they do not disturb each other."""

Link = tuple[int, int]
"""Sender and receiver."""
Samples = dict[Link, list[float]]
"""Seconds of the messages over each link."""


class LinkProbe:
    """Finds a rank with slow links. All ranks call it together and decide alike: from times that all of them have."""

    def __init__(self, group: dist.ProcessGroup | None, ranks: int) -> None:
        self._group, self._ranks = group, ranks
        # NCCL would make a communicator for each pair of ranks
        self._possible = ranks > 1 and backend_of(group) != "nccl"
        self._transport: Transport | None = None
        self._hosts: Hosts | None = None
        self._last_transfer: float | None = None
        """Seconds in messages per step when the links were timed."""
        self._since = self._cost = 0.0
        """Seconds of training since then, and seconds that it took."""
        self._result: tuple[int, float] | None = None

    def slow_rank(self, transfer: float, step: float, *, steps: int) -> tuple[int, float] | None:
        """The rank with slow links and their factor, given the transfer time of a step and its length; None if even."""
        self._since += steps * step
        if transfer < SHARE * step or not self._has_links():
            self._result = None
            return None
        if self._is_due(transfer):
            start = time.perf_counter()
            self._result = self._measure()
            self._last_transfer, self._since = transfer, 0.0
            self._cost = self._agreed(time.perf_counter() - start)
        elif self._last_transfer is not None and transfer < self._last_transfer / SLOW_LINK:
            self._result = None  # it has recovered
            self._last_transfer = transfer
        return self._result

    def _is_due(self, transfer: float) -> bool:
        last = self._last_transfer
        return last is None or transfer > SLOW_LINK * last or self._since * _BUDGET > self._cost

    def _agreed(self, seconds: float) -> float:
        value = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self._group)
        return float(value)

    def _has_links(self) -> bool:
        """Whether there are links that can be timed: ranks on several hosts."""
        if self._possible and self._hosts is None:
            mine = torch.frombuffer(bytearray(host_digest()), dtype=torch.uint8)
            rows = [torch.empty_like(mine) for _ in range(self._ranks)]
            dist.all_gather(rows, mine, group=self._group)
            self._hosts = hosts([bytes(row.tolist()) for row in rows])
            self._possible = len(self._hosts) > 1
        return self._possible

    def _measure(self) -> tuple[int, float] | None:
        """Time the links. Unless they are clearly even, several times: a busy host looks like a slow link."""
        assert self._hosts is not None
        self._transport = self._transport or TorchTransport(self._group)
        links = ring_links([ranks[0] for ranks in self._hosts])
        samples: Samples = {}
        for _ in range(_CONFIRMATIONS + 1):
            for link, seconds in self._timed(links).items():
                samples.setdefault(link, []).extend(seconds)
            if all(slow_link(samples, at)[1] <= SLOW_LINK for at in (0.25, 0.5)):
                return None
        rank, factor = slow_link(samples)
        return (rank, factor) if factor > SLOW_LINK else None

    def _timed(self, links: Sequence[Link]) -> Samples:
        """Seconds of some messages over each link, in both directions, on every rank."""
        assert self._transport is not None
        directed = [pair for a, b in links for pair in ((a, b), (b, a))]
        mine = torch.zeros(len(directed), _REPEATS, dtype=torch.float64)
        for i, (sender, receiver) in enumerate(directed):
            if self._transport.rank == sender:
                mine[i] = torch.tensor(send_times(self._transport, receiver), dtype=torch.float64)
            elif self._transport.rank == receiver:
                answer(self._transport, sender)
        dist.all_reduce(mine, group=self._group)
        return dict(zip(directed, mine.tolist(), strict=True))


def send_times(transport: Transport, peer: int) -> list[float]:
    """Seconds until a message has arrived at a peer that runs `answer`, for some messages."""
    payload, byte = torch.zeros(_PAYLOAD, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
    seconds: list[float] = []
    for _ in range(_REPEATS + 1):
        start = time.perf_counter()
        transport.send(payload, peer, _TAG).wait()
        transport.receive(byte, peer, _TAG).wait()
        seconds.append(time.perf_counter() - start)
    return seconds[1:]  # the first one waits for the peer, and profits from the pause before it


def answer(transport: Transport, peer: int) -> None:
    """Receive what `send_times` sends, and answer each message with a byte."""
    payload, byte = torch.zeros(_PAYLOAD, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
    for _ in range(_REPEATS + 1):
        transport.receive(payload, peer, _TAG).wait()
        transport.send(byte, peer, _TAG).wait()


def ring_links(ring: Sequence[int]) -> list[Link]:
    """The links of a ring, in the order in which they are timed: a rank times its links one after the other."""
    n = len(ring)
    links = [(ring[i], ring[(i + 1) % n]) for i in range(n if n > 2 else n - 1)]
    return links if n <= _CHAIN else [*links[::2], *links[1::2]]


def slow_link(samples: Mapping[Link, Sequence[float]], quantile: float = 0.25) -> tuple[int, float]:
    """The rank whose links are slowest, and its time relative to the median of the other ranks'.

    From seconds by (sender, receiver), for both directions of every link. A rank is as slow as the slower of its two
    directions, and a direction as fast as the faster of its links. Of the messages over a link the lower quartile
    counts: some wait for a busy host, and some profit from a pause before them.
    """
    times = {link: sorted(seconds)[int(quantile * len(seconds))] for link, seconds in samples.items()}
    ranks = sorted({rank for link in times for rank in link})

    def sending(r: int) -> float:
        return min(seconds for (a, _), seconds in times.items() if a == r)

    def receiving(r: int) -> float:
        return min(seconds for (_, b), seconds in times.items() if b == r)

    # what one of two sends slowly, the other receives slowly
    speed = {r: sending(r) if len(ranks) == 2 else max(sending(r), receiving(r)) for r in ranks}
    slowest = max(ranks, key=lambda r: speed[r])
    return slowest, speed[slowest] / statistics.median(speed[r] for r in ranks if r != slowest)
