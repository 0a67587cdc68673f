"""Memory of a rank of a pipeline: its stages' states, and the activations of the micro-batches on their way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..models.profile import Layer, Profile
from ..models.shapes import Convolution, Product, shape_of
from ..plans import Plan
from ..schedules import Pipeline
from ..theory.roofline import BYTES_PER_VALUE
from .autocast import cast_bytes, wide_bytes
from .memory import Memory
from .pipeline import peak_bytes
from .stages import Stage, profile_of
from .tensor import tokens_of


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of one layer for one micro-batch, in the plan's precision."""

    saved: float
    output: float
    working: float
    deferred: float
    """Gradients of what its products give: kept until a backward for weights that comes later."""


def kept_by_cells(profile: Profile, plan: Plan, n: float) -> list[Held]:
    """By layer of the profile. Cast copies of weights are made anew, and kept, for every micro-batch.

    Of a layer that is computed again only its result is kept; all else is there in its backward.
    """
    scale = BYTES_PER_VALUE[plan.precision] / profile.activation_bytes
    whole = replace(plan, recompute="none")
    wide, cast = wide_bytes(profile, whole, n), cast_bytes(profile, whole)
    # what passes from block to block of a transformer is a sum that begins with a table's rows: autocast leaves it wide
    passed = profile.parameter_bytes / profile.activation_bytes if tokens_of(profile) else scale
    found = []
    for i, x in enumerate(profile.layers):
        # both lists are sums along the model, of the repeats before and of this one
        extra = _grown(wide, i) / x.repeats + _grown(cast, i) / x.repeats
        back = wide[2 * i + 1] - wide[2 * i]
        saved, handed = scale * x.saved.at(n) + extra, passed * x.output.at(n)
        working = scale * x.local_backward.at(n) + back
        if plan.recompute != "none" and x.composite:
            saved, working = handed, saved + working
        found.append(Held(saved, handed, working, scale * _products(x, n, profile.activation_bytes)))
    return found


def _products(layer: Layer, n: float, width: int) -> float:
    """Bytes that the products of a layer give."""
    shapes = [(shape_of(op), op) for op in layer.ops if op.phase == "forward"]
    rows = sum(s.rows * s.outputs * width * op.count for s, op in shapes if isinstance(s, Product))
    return n * rows + sum(op.output.at(n) * op.count for s, op in shapes if isinstance(s, Convolution))


def _grown(sums: Sequence[float], i: int) -> float:
    return sums[2 * i] - (sums[2 * i - 2] if i else 0.0)


def memory_by_rank(
    profile: Profile, plan: Plan, n: float, order: Pipeline, stages: Sequence[Stage], homes: Mapping[int, int]
) -> list[Memory]:
    """Of every rank of the pipeline; `homes` are the ranks of the stages."""
    saved = [_saved(stages, i, profile) for i in range(len(stages))]
    # a split backward keeps the graph until its second half, and the gradients that this one begins with; the first
    # stage has no input to find a gradient for
    kept = [s + (sum(c.deferred for c in stages[i]) if i else 0.0) for i, s in enumerate(saved)]
    held = peak_bytes(order, saved, kept)
    mine = [[s for i, s in enumerate(stages) if homes[i] == r] for r in range(len(order.lanes))]
    return [_rank(profile, plan, n, own, bytes_) for own, bytes_ in zip(mine, held, strict=True)]


def _saved(stages: Sequence[Stage], i: int, profile: Profile) -> float:
    """What a forward leaves in a stage: what its layers keep, and what it was given.

    A trace counts a layer's result with the layer. At the end of a stage it is sent and gone; the next one has it.
    """
    own = sum(c.saved for c in stages[i])
    if profile.origin != "traced":
        return own
    given = stages[i - 1][-1].output if i else 0.0
    handed = stages[i][-1].output if i < len(stages) - 1 else 0.0
    return max(0.0, own - handed) + given


def _rank(profile: Profile, plan: Plan, n: float, mine: Sequence[Stage], held: float) -> Memory:
    width = profile.parameter_bytes
    part = profile_of(profile, mine)
    cells = [c for s in mine for c in s]
    here = {c.layer for c in cells}
    tied = max((profile.layers[i].tied for i in here), default=0)
    tied = 0 if _counts_it(profile, here) else tied
    trained = part.trained + tied
    inputs = profile.input.at(n) * plan.micro
    buffers = profile.buffers * sum(c.share for c in cells) / sum(x.repeats for x in profile.layers)
    parameters = (part.parameters + tied) * width + buffers
    working = max((_working(stage) for stage in mine), default=0.0)
    most = max(
        held + working,
        2.0 * min(max((profile.layers[i].largest for i in here), default=0), trained / plan.shards) * width,
    )
    return Memory(
        parameters,
        trained * width,
        trained * profile.state_per_parameter / plan.shards,
        inputs + most,
        max((c.output for c in cells), default=0.0),
    )


def _working(stage: Stage) -> float:
    """The most that a backward adds to what is held: the layers behind the one that it is at have let go of theirs."""
    most = behind = 0.0
    for c in reversed(stage):
        most = max(most, c.working - behind)
        behind += c.saved
    return most


def _counts_it(profile: Profile, here: set[int]) -> bool:
    """Whether a rank has the layer that counts a tied table: the first that is as large."""
    tied = max((x.tied for x in profile.layers), default=0)
    owner = next((i for i, x in enumerate(profile.layers) if tied and x.largest >= tied), None)
    return owner in here
