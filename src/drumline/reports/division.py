"""What a run says of a plan that splits the model: what could not be split, where stages begin, how ranks waited."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import ConfigDict

FEW = 3
"""Names that a line shows; the others are counted."""
REASONS = 2
"""Reasons that a line shows."""
_AXES = {"rows": "tile rows", "columns": "tile columns"}


@dataclass(frozen=True, slots=True)
class Division:
    """How a plan divided a model."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    gathered: dict[str, dict[str, tuple[str, ...]]] = field(default_factory=dict)
    """Axis -> operator -> the modules in which it got whole tensors, because it cannot work on parts."""
    left: dict[str, str] = field(default_factory=dict)
    """Parameter -> why tensor parallelism leaves it whole on every rank."""
    stages: tuple[str, ...] = ()
    """The modules at which the stages of a pipeline begin, but for the first."""
    bubble: dict[str, float] = field(default_factory=dict)
    """The share of a pipeline's time in which ranks wait: `measured`; `predicted`; and `order`, what this order has
    with stages as slow as those that were measured, and messages that take no time."""

    def lines(self) -> list[str]:
        """What a person should know, in a few lines: counts, and the first names."""
        return [*self._gathered(), *self._left()]

    def bubble_line(self) -> str:
        """The bubbles beside each other, or nothing."""
        if "measured" not in self.bubble:
            return ""
        shares = {k: f"{100 * v:.1f}%" for k, v in self.bubble.items()}
        alone = f"; of the order alone {shares['order']}" if "order" in shares else ""
        return f"bubble: predicted {shares.get('predicted', 'nothing')}, measured {shares['measured']}{alone}"

    def _gathered(self) -> Iterator[str]:
        for axis, operators in self.gathered.items():
            if operators:
                said = [f"{short(name)} ({_some(list(dict.fromkeys(at)))})" for name, at in operators.items()]
                yield f"{_AXES.get(axis, axis)} makes whole for {_some(said, '; ')}"

    def _left(self) -> Iterator[str]:
        if not self.left:
            return
        found: dict[str, list[str]] = {}
        for name, why in self.left.items():
            found.setdefault(why, []).append(name)
        said = [f"{_some(names)} ({why})" for why, names in found.items()]
        rest = sum(len(names) for names in list(found.values())[REASONS:])
        more = f"; {rest} more" if rest else ""
        count = f"{len(self.left)} parameter{'s' if len(self.left) > 1 else ''}"
        yield f"tp leaves {count} whole: {'; '.join(said[:REASONS])}{more}"


def short(operator: str) -> str:
    """`aten.flatten.using_ints` is `flatten`; a function of our own keeps its name."""
    if operator.startswith("aten."):
        return operator.split(".")[1]
    return operator.split(" ")[1] if " " in operator else operator


def _some(names: Sequence[str], between: str = ", ") -> str:
    named = [name or "the model" for name in names[:FEW]]
    more = f"{between}{len(names) - FEW} more" if len(names) > FEW else ""
    return f"{between.join(named)}{more}"


def division_of(
    gathered: Mapping[str, Mapping[str, Sequence[str]]], left: Mapping[str, str], stages: Sequence[str]
) -> Division:
    """From what the engine found; axes for which everything was split are left out."""
    kept = {axis: {name: tuple(at) for name, at in found.items()} for axis, found in gathered.items() if found}
    return Division(kept, dict(left), tuple(stages))
