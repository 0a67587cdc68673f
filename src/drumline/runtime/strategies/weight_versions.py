"""Versions of this rank's weights, for batches that are in flight while later updates are applied.

A forward runs on the newest weights. If a batch is in flight when the next update comes, the update is made on a copy,
and the old memory is kept for its backward. Autograd refers to weights in two ways: operators save views of the memory,
which stays as it was; and they save the parameters themselves, which show the old memory during that backward. A layer
that is recomputed in the backward reads the parameters, and so meets the old weights too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .flat_shard import FlatShard


class WeightVersions:
    """The newest weights of a strategy, and older ones as long as a micro-batch in flight needs them."""

    def __init__(self, strategy: FlatShard) -> None:
        self._strategy = strategy
        self.newest = 0
        """Updates so far, since no batch was in flight."""
        self.most = 1
        """The most versions at once, the newest one included."""
        self._used: dict[int, int] = {}
        """Micro-batch in flight -> the version of its forward."""
        self._older: dict[int, list[torch.Tensor]] = {}
        self._spare: list[list[torch.Tensor]] = []
        """Memory of versions that are not needed any more."""

    @contextmanager
    def used(self, micro: int) -> Iterator[None]:
        """Around the forward of a micro-batch, which runs on the newest weights: they are kept for its backward."""
        self._used[micro] = self.newest
        yield

    @contextmanager
    def shown(self, micro: int) -> Iterator[None]:
        """Around the backward of a micro-batch: the parameters are those of its forward; afterwards the newest."""
        version = self._used[micro]
        if version == self.newest:
            yield
        else:
            self._strategy.show_weights(self._older_weights(version))
            try:
                yield
            finally:
                self._strategy.show_weights(self._strategy.weights())
        del self._used[micro]
        if version in self._older and version not in self._used.values():
            self._spare.append(self._older.pop(version))

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Around an update: it is made on a copy if the present weights are needed again."""
        if self.newest in self._used.values():
            self._older[self.newest] = self._strategy.weights()
            self._strategy.move_weights(self._copy(self._older[self.newest]))
        yield
        self.newest += 1
        self.most = max(self.most, 1 + len(self._older))

    def older(self) -> list[torch.Tensor]:
        """The memory of all versions but the newest."""
        return [flat for weights in (*self._older.values(), *self._spare) for flat in weights]

    def restart(self) -> None:
        """Restart the count of updates: no batch is in flight."""
        assert not self._used and not self._older, "weights are kept for a batch in flight"
        self.newest = 0

    def _older_weights(self, version: int) -> list[torch.Tensor]:
        return self._older[version]

    @torch.no_grad()
    def _copy(self, weights: list[torch.Tensor]) -> list[torch.Tensor]:
        if not self._spare:
            return [flat.clone() for flat in weights]
        memory = self._spare.pop()
        for target, flat in zip(memory, weights, strict=True):
            target.copy_(flat)
        return memory
