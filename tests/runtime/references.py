"""One-device reference results for the cells of the parity matrix: computed once, then read by every world.

The reference depends on the plan only by micro-batches, dtype and fp16 loss scale, and where a pipeline does not drain,
by its stages. The results are in a folder that lives
as long as one run of the matrix, so that none is older than the code.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import torch
from cells import Cell

from drumline.runtime.engine import Engine
from drumline.runtime.verification.activations import ActivationRecorder
from drumline.runtime.verification.one_device import run_one_device
from drumline.runtime.verification.tolerances import VerificationRun

_KNOWN: dict[tuple[object, ...], VerificationRun] = {}


def reference(engine: Engine, cell: Cell, steps: int, folder: str = "", *, exact: bool = False) -> VerificationRun:
    """The result of one device for a cell: cached on this rank, read from the folder, or computed.

    `exact`: in float64, whatever the cell computes in.
    """
    scale = engine.scaler.scale if engine.scaler and not exact else 1.0
    delayed = cell.plan if engine.plan.keeps_batches_in_flight else ""  # its updates depend on the stages
    key = (cell.job, engine.plan.micro, "float64" if exact else cell.computed, steps, scale, delayed)
    if key not in _KNOWN:
        path = Path(folder) / f"{hashlib.sha256(repr(key).encode()).hexdigest()[:24]}.pt" if folder else None
        cached = _read(path) if path is not None and path.exists() else None
        _KNOWN[key] = cached or run_one_device(engine, steps, exact=exact)
        if path is not None and cached is None:
            _write(path, _KNOWN[key])
    return _KNOWN[key]


def _read(path: Path) -> VerificationRun:
    saved = torch.load(path, weights_only=True)
    recorder = ActivationRecorder()
    recorder.gradients, recorder.largest = saved["gradients"], saved["largest"]
    return VerificationRun(saved["losses"], saved["parameters"], recorder)


def _write(path: Path, run: VerificationRun) -> None:
    """Write what is compared of a run; under a temporary name first, because another world may read it."""
    recorder = run.activations
    temporary = path.with_suffix(f".{os.getpid()}")
    parameters = {k: p.detach() for k, p in run.parameters.items()}
    saved = {
        "losses": run.losses,
        "parameters": parameters,
        "gradients": recorder.gradients,
        "largest": recorder.largest,
    }
    torch.save(saved, temporary)
    temporary.rename(path)
