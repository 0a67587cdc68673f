"""Amounts that depend on the batch.

They are *affine* in the number n of samples that one rank runs at once: a fixed part (reading a weight, adding a
gradient) and a part per sample (the activations).
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import ConfigDict


@dataclass(frozen=True, slots=True)
class Affine:
    """`fixed + per_sample * n`."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    fixed: float = 0.0
    per_sample: float = 0.0

    def at(self, n: float) -> float:
        """The amount for n samples."""
        return self.fixed + self.per_sample * n

    def __add__(self, other: Affine) -> Affine:
        return Affine(self.fixed + other.fixed, self.per_sample + other.per_sample)

    def times(self, k: int) -> Affine:
        """The amount k times."""
        return Affine(self.fixed * k, self.per_sample * k)
