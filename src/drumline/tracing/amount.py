"""Which part of an amount belongs to the samples: told by a batch whose size is a prime that nothing else contains.

A tensor of a traced batch has as many values as the prime times something, or it has nothing to do with the batch. So
one trace gives every amount as a line over the number of samples. Amounts are complex numbers while they are added up:
the real part is fixed, the imaginary part is per sample.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..models.profile import Affine

PRIMES = (251, 257, 263, 269, 271, 277, 281, 283, 293, 307, 311, 313)


@dataclass(frozen=True, slots=True)
class Batch:
    """The batch that is traced."""

    prime: int
    times: int
    """Some models want batches that divide by 2, 4 or 8."""
    real: int
    """The job's batch size: where an amount grows with the square of the batch, it is exact at this size."""

    @property
    def size(self) -> int:
        """Samples that are traced."""
        return self.prime * self.times

    def amount(self, value: float, units: int) -> complex:
        """A value (operations, bytes) that belongs to `units` (values of a tensor, operations)."""
        power = 0
        while units and units % self.prime == 0:
            units, power = units // self.prime, power + 1
        if not power:
            return complex(value, 0.0)
        return complex(0.0, value / self.size**power * self.real ** (power - 1))

    def at_real(self, amount: complex) -> float:
        """The amount for the job's batch size."""
        return amount.real + amount.imag * self.real


def choose(dims: Iterable[int], real: int, times: int) -> Batch:
    """A prime that divides no dim of the model and of the data."""
    taken = {d for d in dims if d}
    prime = next((p for p in PRIMES if not any(d % p == 0 for d in taken)), PRIMES[-1])
    return Batch(prime, times, real)


def affine(amount: complex) -> Affine:
    """The line over the number of samples; what rounding or a release made negative is cut."""
    return Affine(max(0.0, amount.real), max(0.0, amount.imag))
