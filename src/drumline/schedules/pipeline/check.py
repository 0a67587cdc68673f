"""Prove that a pipeline schedule is complete and cannot deadlock, and count its activations."""

from __future__ import annotations

from dataclasses import dataclass

from ...core.errors import VerificationError
from .order import Action, Kind, Pipeline
from .update_check import UpdateProof, prove_updates


@dataclass(frozen=True, slots=True)
class PipelineProof:
    """Proof that a pipeline schedule is complete and cannot deadlock, and its activations."""

    pipeline: str
    in_flight: tuple[int, ...]
    """By stage: most micro-batches between F and B at once."""
    activations: tuple[int, ...]
    """By rank: most activations of its stages at once, one for each stage and micro-batch.

    From F until B, and with a split backward until W. Between B and W only the inputs of layers with weights and the
    gradients of their outputs are left.
    `costs.pipeline_memory.peak_activation_bytes` counts both in bytes.
    """
    updates: UpdateProof | None = None
    """Of a schedule that does not drain between batches: its weight versions and staleness."""

    def __str__(self) -> str:
        return f"proved: {self.pipeline}; activations in flight by stage: {', '.join(map(str, self.in_flight))}"


def prove_pipeline(pipeline: Pipeline) -> PipelineProof:
    """Prove that each stage runs each micro-batch once, each action after those it needs; else VerificationError.

    Receives block, sends do not. Values that skip stages need no proof: they arrive before the chain of stages does.
    """
    _complete(pipeline)
    _no_deadlock(pipeline)
    updates = prove_updates(pipeline) if pipeline.has_updates else None
    return PipelineProof(str(pipeline), _in_flight(pipeline), _activations(pipeline), updates)


def _complete(pipeline: Pipeline) -> None:
    """Every action exists once, and all actions of a stage are in one lane."""
    kinds: tuple[Kind, ...] = ("F", "B", "W") if pipeline.splits_backward else ("F", "B")
    homes, seen = pipeline.homes(), set[Action]()
    for rank, lane in enumerate(pipeline.lanes):
        for action in lane:
            name = f"{action} of stage {action.stage}"
            if not (0 <= action.stage < pipeline.stages and 0 <= action.micro < pipeline.micros):
                rule = f"{pipeline.stages} stages, {pipeline.micros} micro-batches"
                raise _broken(pipeline, f"there is no {name}", rank, rule)
            if action in seen:
                raise _broken(pipeline, f"{name} occurs twice", rank, "each once")
            if homes[action.stage] != rank:
                raise _broken(
                    pipeline, f"{name} is in another lane than its stage", rank, f"stage on rank {homes[action.stage]}"
                )
            seen.add(action)
    for stage in range(pipeline.stages):
        for micro in range(pipeline.micros):
            for kind in kinds:
                if Action(kind, stage, micro) not in seen:
                    raise _broken(
                        pipeline, f"{kind}{micro} of stage {stage} is missing", homes.get(stage, -1), "each once"
                    )


def _no_deadlock(pipeline: Pipeline) -> None:
    """Run everything that can run; what still waits then, waits forever."""
    done: set[Action] = set()
    place = [0] * len(pipeline.lanes)
    progress = True
    while progress:
        progress = False
        for rank, lane in enumerate(pipeline.lanes):
            while place[rank] < len(lane) and done.issuperset(pipeline.needs(lane[place[rank]])):
                done.add(lane[place[rank]])
                place[rank] += 1
                progress = True
    waiting = {r: lane[place[r]] for r, lane in enumerate(pipeline.lanes) if place[r] < len(lane)}
    if not waiting:
        return
    homes, seen, rank = pipeline.homes(), set[int](), min(waiting)
    # most ranks wait for others that wait: follow them until the cycle closes
    while rank not in seen:
        seen.add(rank)
        last, head = rank, waiting[rank]
        need = next(n for n in pipeline.needs(head) if n not in done)
        rank = homes[need.stage]
    raise _broken(
        pipeline,
        f"deadlock: {head} of stage {head.stage} waits for {need} of stage {need.stage}",
        last,
        f"what an action needs comes before it; rank {rank} is at {waiting[rank]} of stage {waiting[rank].stage}",
    )


def _in_flight(pipeline: Pipeline) -> tuple[int, ...]:
    """Micro-batches between F and B; depends on the order in a lane alone, not on times."""
    now, most = [0] * pipeline.stages, [0] * pipeline.stages
    for lane in pipeline.lanes:
        for action in lane:
            now[action.stage] += {"F": 1, "B": -1}.get(action.kind, 0)
            most[action.stage] = max(most[action.stage], now[action.stage])
    return tuple(most)


def _activations(pipeline: Pipeline) -> tuple[int, ...]:
    """As `_in_flight`, but over all stages of a rank, and until the last use of an activation."""
    last = "W" if pipeline.splits_backward else "B"
    most = []
    for lane in pipeline.lanes:
        now = [0]
        for action in lane:
            now.append(now[-1] + (action.kind == "F") - (action.kind == last))
        most.append(max(now))
    return tuple(most)


def _broken(pipeline: Pipeline, what: str, rank: int, rule: str) -> VerificationError:
    return VerificationError(what, where=f"{pipeline.name}: rank {rank}" if rank >= 0 else pipeline.name, rule=rule)
