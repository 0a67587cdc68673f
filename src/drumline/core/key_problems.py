"""All wrong keys of one file in one error: a person corrects them in one go instead of one per run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .errors import DrumlineError

MOST_LISTED = 20
"""Problems that one error lists; a damaged file may have thousands."""


@dataclass(frozen=True, slots=True)
class KeyProblem:
    """One key that is unknown, missing or has a value that is refused."""

    what: str
    """The sentence, if it is the only problem of the file."""
    key: str = ""
    """Dotted path of the key in the file."""
    rule: str = ""
    fix: str = ""
    missing: bool = False
    """Whether the key is required and not there."""


def key_error(
    problems: Iterable[KeyProblem],
    where: str,
    error: type[DrumlineError],
    line_of: Callable[[str], int | None] = lambda key: None,
) -> DrumlineError:
    """The error about one problem, or about all of them, with a line each."""
    listed = _without_consequences(list(problems))
    if len(listed) == 1:
        problem = listed[0]
        place = f"{where}: {problem.key}" if problem.key else where
        return error(problem.what, where=place, rule=problem.rule, fix=problem.fix)
    lines = [_line(p, line_of(p.key)) for p in listed[:MOST_LISTED]]
    lines += [f"and {len(listed) - MOST_LISTED} more"] if len(listed) > MOST_LISTED else []
    return error(f"{len(listed)} keys are wrong or missing", where=where, rule=("\n" + 9 * " ").join(lines))


def _line(problem: KeyProblem, number: int | None) -> str:
    table = problem.key.rpartition(".")[0]
    place = ", ".join(text for text in (f"line {number}" if number else "", f"[{table}]" if table else "") if text)
    says = "; ".join(text for text in (problem.what, problem.rule, problem.fix) if text)
    return f"{place}: {says}" if place else says


def _without_consequences(problems: list[KeyProblem]) -> list[KeyProblem]:
    """Without missing keys that are there, misspelt: the misspelt one says more. Unknown keys come first."""
    suggested = {(p.key.rpartition(".")[0], p.fix) for p in problems if not p.missing and p.fix}

    def is_misspelt(p: KeyProblem) -> bool:
        table, _, name = p.key.rpartition(".")
        return p.missing and any(table == t and repr(name) in fix for t, fix in suggested)

    return sorted((p for p in problems if not is_misspelt(p)), key=lambda p: p.missing)


def required_keys(kind: object, hints: Callable[[object], dict[str, object]], prefix: str = "") -> list[str]:
    """Dotted keys without a default in the file form of a dataclass, also those of the tables that it requires."""
    if not isinstance(kind, type) or not dataclasses.is_dataclass(kind):
        return []
    keys = []
    for f in dataclasses.fields(kind):
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            inner = required_keys(hints(kind).get(f.name), hints, f"{prefix}{f.name}.")
            keys += inner or [prefix + f.name]
    return keys
