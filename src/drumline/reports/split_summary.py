"""How a plan split a model: which operators and parameters stayed whole, where stages begin, the pipeline bubble."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import ConfigDict

MAX_NAMES = 3
"""Names in a line; the others are counted."""
MAX_REASONS = 2
"""Reasons in a line."""
_AXES = {"rows": "tile rows", "columns": "tile columns"}


@dataclass(frozen=True, slots=True)
class SplitSummary:
    """How a plan split a model."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    gathered: dict[str, dict[str, tuple[str, ...]]] = field(default_factory=dict)
    """Axis -> operator -> the modules in which it got gathered tensors, because it has no rule for parts."""
    left: dict[str, str] = field(default_factory=dict)
    """Parameter -> why tensor parallelism keeps it whole on every rank."""
    stages: tuple[str, ...] = ()
    """The modules at which pipeline stages begin, without the first stage."""
    bubble: dict[str, float] = field(default_factory=dict)
    """The share of a pipeline's time in which ranks wait: `measured`, `predicted`, and `order`: with the measured stage
    times, if messages took no time."""

    def lines(self) -> list[str]:
        """A few lines for the user: counts, and the first names."""
        return [*self._gathered_lines(), *self._whole_lines()]

    def bubble_line(self) -> str:
        """Predicted and measured bubble, or nothing."""
        if "measured" not in self.bubble:
            return ""
        shares = {k: f"{100 * v:.1f}%" for k, v in self.bubble.items()}
        order = f"; {shares['order']} if messages took no time" if "order" in shares else ""
        return f"bubble: predicted {shares.get('predicted', 'nothing')}, measured {shares['measured']}{order}"

    def _gathered_lines(self) -> Iterator[str]:
        for axis, operators in self.gathered.items():
            if operators:
                names = [f"{short(name)} ({_first(list(dict.fromkeys(at)))})" for name, at in operators.items()]
                yield f"{_AXES.get(axis, axis)} gathers tensors for {_first(names, '; ')}"

    def _whole_lines(self) -> Iterator[str]:
        if not self.left:
            return
        by_reason: dict[str, list[str]] = {}
        for name, why in self.left.items():
            by_reason.setdefault(why, []).append(name)
        parts = [f"{_first(names)} ({why})" for why, names in by_reason.items()]
        rest = sum(len(names) for names in list(by_reason.values())[MAX_REASONS:])
        more = f"; {rest} more" if rest else ""
        count = f"{len(self.left)} parameter{'s' if len(self.left) > 1 else ''}"
        yield f"tp keeps {count} whole: {'; '.join(parts[:MAX_REASONS])}{more}"


def short(operator: str) -> str:
    """`aten.flatten.using_ints` is `flatten`; a function of our own keeps its name."""
    if operator.startswith("aten."):
        return operator.split(".")[1]
    return operator.split(" ")[1] if " " in operator else operator


def _first(names: Sequence[str], between: str = ", ") -> str:
    named = [name or "the model" for name in names[:MAX_NAMES]]
    more = f"{between}{len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f"{between.join(named)}{more}"


def split_summary(
    gathered: Mapping[str, Mapping[str, Sequence[str]]], left: Mapping[str, str], stages: Sequence[str]
) -> SplitSummary:
    """From the engine's report; axes that split everything are omitted."""
    axes = {axis: {name: tuple(at) for name, at in ops.items()} for axis, ops in gathered.items() if ops}
    return SplitSummary(axes, dict(left), tuple(stages))
