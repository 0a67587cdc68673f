"""Fixed and per-sample parts of an amount, separated by a batch whose size is a prime that nothing else contains.

The number of values of a traced tensor is a multiple of the prime, or it does not depend on the batch. So one trace
gives every amount as a line over the number of samples. While amounts are added up they are complex numbers: the real
part is fixed, the imaginary part is per sample.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..models.profile import Affine

PRIMES = (251, 257, 263, 269, 271, 277, 281, 283, 293, 307, 311, 313)


@dataclass(frozen=True, slots=True)
class TracedBatch:
    """The batch of a trace."""

    prime: int
    multiple: int
    """A factor for models whose batch must be divisible by 2, 4 or 8."""
    job_size: int
    """The job's batch size. Amounts that grow with the square of the batch are exact at this size."""

    @property
    def size(self) -> int:
        """Samples in the traced batch."""
        return self.prime * self.multiple

    def amount(self, value: float, units: int) -> complex:
        """Fixed and per-sample part of a value (operations, bytes) with `units` values or operations."""
        power = 0
        while units and units % self.prime == 0:
            units, power = units // self.prime, power + 1
        if not power:
            return complex(value, 0.0)
        return complex(0.0, value / self.size**power * self.job_size ** (power - 1))

    def at_job_size(self, amount: complex) -> float:
        """The amount at the job's batch size."""
        return amount.real + amount.imag * self.job_size


def choose_batch(dims: Iterable[int], real: int, times: int) -> TracedBatch:
    """Choose a prime that divides no dim of the model or the data."""
    taken = {d for d in dims if d}
    prime = next((p for p in PRIMES if not any(d % p == 0 for d in taken)), PRIMES[-1])
    return TracedBatch(prime, times, real)


def affine(amount: complex) -> Affine:
    """The line over the number of samples. Negative parts, left by rounding or releases, are cut to 0."""
    return Affine(max(0.0, amount.real), max(0.0, amount.imag))
