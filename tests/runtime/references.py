"""What one device comes to, for the cells of the parity matrix: computed once, and read by every world after that.

One device does the same whatever the plan, but for the micro-batches, the type and fp16's scale. The outcomes lie in a
folder that lives as long as one run of the matrix, so that none is older than the code.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import torch
from cells import Cell

from drumline.runtime.engine import Engine
from drumline.runtime.verification.judge import Outcome
from drumline.runtime.verification.verify import run_one_device
from drumline.runtime.verification.witness import Witness

_KNOWN: dict[tuple[object, ...], Outcome] = {}


def reference(engine: Engine, cell: Cell, steps: int, folder: str = "", *, exact: bool = False) -> Outcome:
    """The outcome of one device for a cell: known to this rank, found in the folder, or computed.

    `exact`: in float64, whatever the cell computes in.
    """
    scale = engine.scaler.scale if engine.scaler and not exact else 1.0
    key = (cell.job, engine.plan.micro, "float64" if exact else cell.computed, steps, scale)
    if key not in _KNOWN:
        path = Path(folder) / f"{hashlib.sha256(repr(key).encode()).hexdigest()[:24]}.pt" if folder else None
        found = _read(path) if path is not None and path.exists() else None
        _KNOWN[key] = found or run_one_device(engine, steps, exact=exact)
        if path is not None and found is None:
            _write(path, _KNOWN[key])
    return _KNOWN[key]


def _read(path: Path) -> Outcome:
    held = torch.load(path, weights_only=True)
    witness = Witness()
    witness.gradients, witness.largest = held["gradients"], held["largest"]
    return Outcome(held["losses"], held["parameters"], witness)


def _write(path: Path, outcome: Outcome) -> None:
    """What is compared of an outcome; by another name first, because another world may look for it."""
    witness = outcome.witness
    made = path.with_suffix(f".{os.getpid()}")
    parameters = {k: p.detach() for k, p in outcome.parameters.items()}
    held = {
        "losses": outcome.losses,
        "parameters": parameters,
        "gradients": witness.gradients,
        "largest": witness.largest,
    }
    torch.save(held, made)
    made.rename(path)
