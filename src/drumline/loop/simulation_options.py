"""Which options each target of a simulation takes; all others are refused."""

from __future__ import annotations

from collections.abc import Mapping

from ..core.errors import InputError

JOB, COLLECTIVE, PIPELINE = "a job or a zoo model", "a collective", "a pipeline order"
ALL_COLLECTIVES, ALL_PIPELINES = "a comparison of all-reduces", "a comparison of pipeline orders"
MOST_PASSES = 200_000
"""Forwards and backwards of a pipeline order: about five seconds."""
MOST_COMPARED_PASSES = 20_000
"""The same for each order, where all of them are compared."""

_OF_PLANS = {"plan", "cluster", "changes", "batch", "sequence", "devices", "corrections", "sweep", "scaling"}
_OF_RANKS = {"slow", "jitter", "slow_links", "seed", "mtbf", "restart", "days"}
_TAKES = {
    JOB: _OF_PLANS | _OF_RANKS,
    COLLECTIVE: {"cluster", "changes", "ranks", "size"},
    PIPELINE: {"ranks", "micro", "virtual"},
    ALL_COLLECTIVES: {"ranks"},
    ALL_PIPELINES: {"ranks", "micro"},
}
_NAMES = {"changes": "--set", "size": "--bytes", "slow_links": "--slow-link", "corrections": "--no-corrections"}


def target_kind(target: object) -> str:
    """Kind of the target of a simulation: a job, a collective or a pipeline."""
    from ..schedules import ALGORITHMS

    kind, _, _ = str(target).partition(":") if isinstance(target, str) else ("", "", "")
    return PIPELINE if kind == "pipeline" else COLLECTIVE if kind in ALGORITHMS else JOB


def refuse_other_options(target: object, kind: str, options: Mapping[str, object]) -> None:
    """Refuse arguments that were given and that this kind of target does not take.

    What is None or () was not given; corrections were if they are False.
    """
    given = (
        key for key, value in options.items() if (value is False if key == "corrections" else value not in (None, ()))
    )
    key = next((key for key in given if key not in _TAKES[kind]), None)
    if key is None:
        return
    name = _NAMES.get(key, f"--{key}")
    takers = [other for other in (JOB, COLLECTIVE, PIPELINE) if key in _TAKES[other]]
    fix = f"leave out {name}"
    if kind == JOB and key in ("ranks", "micro", "virtual"):
        fix += ": the keys of --plan say it"
    what = target if isinstance(target, str) else kind
    raise InputError(f"{name} for {what}", rule=f"it is for {' or '.join(takers)}", fix=fix)


def refuse_many_passes(target: str, ranks: int, micro: int, virtual: int = 1, *, most: int = MOST_PASSES) -> None:
    """Refuse a pipeline order that would take minutes and gigabytes."""
    passes = 2 * ranks * micro * virtual
    if passes > most:
        raise InputError(
            f"{target} with {passes:,} forwards and backwards",
            rule=f"at most {most:,}: 2 x ranks x micro-batches x stages of a rank",
            fix=f"--micro {most // (2 * ranks * virtual)}" if most >= 2 * ranks * virtual else "fewer --ranks",
        )
