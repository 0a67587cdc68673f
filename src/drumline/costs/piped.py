"""The pipeline of one plan as a value: its order, its stages, and how long each takes for one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

from ..schedules import Pipeline
from .clock import finish
from .lanes import Played, play
from .stages import Stage


@dataclass(frozen=True, slots=True)
class Piped:
    """A pipeline of one plan: its order, its stages, and what they take."""

    order: Pipeline
    stages: tuple[Stage, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    transfer: tuple[float, ...]
    homes: dict[int, int]
    """Stage -> its rank."""

    @property
    def seconds(self) -> float:
        """Until the last action ends."""
        return finish(self.order, self.homes, self.forward, self.backward, self.weight, self.transfer)

    def busy(self, rank: int) -> float:
        """Seconds in which a rank computes or waits for its layers' messages, all micro-batches."""
        mine = [i for i, home in self.homes.items() if home == rank]
        return self.order.micros * sum(self.forward[i] + self.backward[i] + self.weight[i] for i in mine)

    @property
    def bubble(self) -> float:
        """The share of the time until the last action ends in which ranks do not compute."""
        whole = len(self.order.lanes) * self.seconds
        return 1 - sum(map(self.busy, range(len(self.order.lanes)))) / whole if whole else 0.0

    def play(self) -> Played:
        """The order, action by action."""
        return play(
            self.order, forward=self.forward, backward=self.backward, weight=self.weight, transfer=self.transfer
        )

    def sent_by(self, rank: int) -> float:
        """Seconds of what a rank hands on in one micro-batch, forward and backward."""
        ways = [(i, i + 1) for i in range(len(self.stages) - 1)] + [(i + 1, i) for i in range(len(self.stages) - 1)]
        apart = [(a, b) for a, b in ways if self.homes[a] == rank != self.homes[b]]
        return sum(self.transfer[min(a, b)] for a, b in apart)

    def of_rank(self, rank: int) -> list[Stage]:
        """The stages that a rank has."""
        return [s for i, s in enumerate(self.stages) if self.homes[i] == rank]
