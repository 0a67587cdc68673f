"""Prove the updates of a pipeline schedule that does not drain: which weights a batch meets, and how many are stored.

A forward uses the newest weights of its stage, and its backward must use the same; so a version is stored until the
last backward that needs it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...core.errors import VerificationError
from .order import Action, Pipeline


@dataclass(frozen=True, slots=True)
class UpdateProof:
    """Weight versions and staleness of every stage."""

    versions: tuple[int, ...]
    """By stage: most versions of its weights at once, the newest one included."""
    staleness: tuple[tuple[int, ...], ...]
    """By stage and batch: updates between the weights of the gradient and the weights that it is applied to."""


def prove_updates(pipeline: Pipeline) -> UpdateProof:
    """Prove that every stage applies every batch once, in order, complete, and computed on one version of its weights.

    The schedule is complete and free of deadlocks (`prove_pipeline`); one stage has one lane.
    """
    ends = [a.micro for a in pipeline.lanes[0] if a.kind == "U"]
    versions, staleness = [], []
    for stage, lane in enumerate(pipeline.lanes):
        own = [a.micro for a in lane if a.kind == "U"]
        if own != ends or own != sorted(own):
            raise _broken(pipeline, f"updates {own} of stage {stage}", "every stage applies the same batches, in order")
        most, stale = _play(pipeline, stage, lane)
        versions.append(most)
        staleness.append(stale)
    if not ends or ends[-1] != pipeline.micros - 1:
        raise _broken(pipeline, f"updates up to {ends[-1:]}", f"all {pipeline.micros} micro-batches are applied")
    return UpdateProof(tuple(versions), tuple(staleness))


def _play(pipeline: Pipeline, stage: int, lane: tuple[Action, ...]) -> tuple[int, tuple[int, ...]]:
    """Run one lane with numbers for weights: the most versions at once, and the staleness of every update."""
    newest, first, most = 0, 0, 1
    in_flight: dict[int, int] = {}
    used: dict[int, int] = {}
    staleness = []
    for action in lane:
        if action.kind == "F":
            in_flight[action.micro] = newest
        elif action.kind == "B":
            used[action.micro] = in_flight.pop(action.micro)
        elif action.kind == "U":
            batch = range(first, action.micro + 1)
            if any(i not in used for i in batch):
                raise _broken(pipeline, f"{action} of stage {stage} before its backwards", "a gradient is complete")
            if len({used[i] for i in batch}) > 1:
                raise _broken(pipeline, f"{action} of stage {stage} mixes weights", "a batch has one version of them")
            staleness.append(newest - used[action.micro])
            newest, first = newest + 1, action.micro + 1
            most = max(most, len({*in_flight.values(), newest}))
    return most, tuple(staleness)


def _broken(pipeline: Pipeline, what: str, rule: str) -> VerificationError:
    return VerificationError(what, where=pipeline.name, rule=rule)
