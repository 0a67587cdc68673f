"""Fitted constants by device type, as they ship and as `validate --fit` writes them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field

from ...core import files
from ...core.errors import InputError, nearest
from .constants import MEMORY_CONSTANTS, OLD_NAMES, PRIOR, TIME_CONSTANTS, Constants
from .host_waits import Positive, WaitConstants

SHIPPED = Path(__file__).parents[2] / "clusters" / "catalogue" / "profiles" / "fitted.toml"
REFERENCE_MATMUL = 0.87
"""Fraction of peak of the best published matmul that the shared `matmul` constant refers to."""


@dataclass(frozen=True, slots=True)
class DeviceConstants:
    """Constants of one device type that differ from the shared ones."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    origin: str
    rows: Annotated[int, Field(ge=0)] = 0
    """Published runs of this type in the fit."""
    constants: dict[str, Positive] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FittedConstants:
    """Shared constants, and those of each device type."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    shared: dict[str, Positive]
    device: dict[str, DeviceConstants]
    origin: str = ""
    error: Positive = 0.5
    """90% of published times are predicted to within this relative error, each with its source left out."""
    waits: WaitConstants | None = None
    """Waits of hosts that stand still for their messages, which no plan of the engine has."""
    waits_origin: str = ""

    def of(self, chip: str, best: float) -> dict[str, float]:
        """Constants of a chip; an unseen chip gets the shared ones, scaled to its best published matmul."""
        device = self.device.get(chip)
        values = {**PRIOR, **self.shared}
        values["matmul"] = values["matmul"] * best / REFERENCE_MATMUL
        return {**values, **(device.constants if device else {})}

    def constants(self, chip: str, best: float) -> Constants:
        """The same as `Constants`."""
        return Constants(**self.of(chip, best))

    def save(self, path: str | Path, command: str) -> None:
        """Write TOML, with the command that made it."""
        comment = (
            f"Constants of the fitted cost model, by device type. Written by: {command}\nRun it again to refit them."
        )
        files.write_toml(path, self, comment=comment)


def load_constants(path: str | Path = SHIPPED) -> FittedConstants:
    """Constants from a file, or those that ship."""
    return _shipped() if path == SHIPPED else _read(path)


@functools.cache
def _shipped() -> FittedConstants:
    return _read(SHIPPED)


def _read(path: str | Path) -> FittedConstants:
    fitted = files.from_plain(FittedConstants, files.read_toml(path), str(path))
    devices = {
        name: replace(device, constants=_current(device.constants, f"{path}: device.{name}.constants"))
        for name, device in fitted.device.items()
    }
    return replace(fitted, shared=_current(fitted.shared, f"{path}: shared"), device=devices)


def _current(constants: Mapping[str, float], where: str) -> dict[str, float]:
    """Constants by their current names; unknown names are refused."""
    current = {OLD_NAMES.get(name, name): value for name, value in constants.items()}
    for name in constants:
        if OLD_NAMES.get(name, name) not in PRIOR:
            fix = nearest(name, (*TIME_CONSTANTS, *MEMORY_CONSTANTS))
            raise InputError(f"unknown constant {name!r}", where=where, fix=fix)
    return current
