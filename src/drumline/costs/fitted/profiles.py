"""Profiles of device types as they ship: the constants of the closed form, fitted on published runs."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field

from ...core import files
from ...core.errors import InputError, nearest
from .constants import MEMORY, NAMES, PRIOR, Constants

SHIPPED = Path(__file__).parents[2] / "clusters" / "catalogue" / "profiles" / "closed.toml"
REFERENCE = 0.87
"""Share of peak of the best published product to which `products` of the shared constants belongs."""
Share = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class Device:
    """The profile of one device type, where it differs from the shared one."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    origin: str
    rows: Annotated[int, Field(ge=0)] = 0
    """Published runs on this type that were fitted."""
    constants: dict[str, Share] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Profiles:
    """All profiles: what devices share, and what each type has of its own."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    shared: dict[str, Share]
    device: dict[str, Device]
    origin: str = ""
    error: Share = 0.5
    """Nine of ten published times were predicted to within this share, each without its source."""

    def of(self, chip: str, best: float) -> dict[str, float]:
        """The constants of a chip; one that was never seen has the shared ones, and its best published product."""
        seen = self.device.get(chip)
        values = {**PRIOR, **self.shared}
        values["products"] = values["products"] * best / REFERENCE
        return {**values, **(seen.constants if seen else {})}

    def constants(self, chip: str, best: float) -> Constants:
        """The same as a value."""
        return Constants(**self.of(chip, best))

    def save(self, path: str | Path, command: str) -> None:
        """Write the TOML form, with the command that made it."""
        comment = f"Profiles of the closed form, by device type. Written by: {command}\nRun it again to fit them anew."
        files.write_toml(path, self, comment=comment)


def load_profiles(path: str | Path = SHIPPED) -> Profiles:
    """The profiles in a file, or those that ship."""
    return _shipped() if path == SHIPPED else _read(path)


@functools.cache
def _shipped() -> Profiles:
    return _read(SHIPPED)


def _read(path: str | Path) -> Profiles:
    profiles = files.from_plain(Profiles, files.read_toml(path), str(path))
    _check(profiles.shared, f"{path}: shared")
    for name, device in profiles.device.items():
        _check(device.constants, f"{path}: device.{name}.constants")
    return profiles


def _check(constants: Mapping[str, float], where: str) -> None:
    for name in constants:
        if name not in PRIOR:
            raise InputError(f"unknown constant {name!r}", where=where, fix=nearest(name, (*NAMES, *MEMORY)))
