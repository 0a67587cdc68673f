"""Random numbers on parts of one tensor: every part draws its own, and the common generator stays in step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor


@contextmanager
def forked(index: int, device: torch.device) -> Iterator[None]:
    """Inside, random numbers follow from the common generator's next number and from `index`.

    Ranks with the same seed have drawn one number each when it ends, whatever they drew inside.
    """
    seed = int(torch.randint(2**62, ()).item())
    host = torch.get_rng_state()
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    torch.default_generator.manual_seed((seed + 0x9E3779B97F4A7C15 * (index + 1)) % 2**63)
    if state is not None:
        torch.cuda.manual_seed((seed + 0x9E3779B97F4A7C15 * (index + 1)) % 2**63)
    try:
        yield
    finally:
        torch.set_rng_state(host)
        if state is not None:
            torch.cuda.set_rng_state(state, device)


def forked_dropout(x: torch.Tensor, operator: Any, p: float, index: int) -> torch.Tensor:
    """Dropout of this rank's part."""
    if isinstance(x, FakeTensor):
        return operator(x, p, True)  # type: ignore[no-any-return]  # torch's own
    with forked(index, x.device):
        return operator(x, p, True)  # type: ignore[no-any-return]  # torch's own
