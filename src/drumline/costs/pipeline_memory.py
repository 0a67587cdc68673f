"""Memory of each rank of a pipeline: the states of its stages, and the activations of micro-batches in flight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..core.errors import InputError
from ..models.op_shapes import ConvolutionShape, MatmulShape, shape_of
from ..models.profile import Layer, Profile
from ..plans import Plan
from ..schedules import Pipeline, prove_updates
from ..theory.roofline import STORED_BYTES
from .memory import ModelStates, PeakMemory, cast_bytes, wide_bytes
from .rank_model import tokens_of
from .stages import Stage, layer_shares, stage_profile


@dataclass(frozen=True, slots=True)
class LayerActivations:
    """Bytes of one layer for one micro-batch, in the plan's precision."""

    saved: float
    output: float
    working: float
    """Bytes that its backward needs beyond what was saved."""
    deferred: float
    """Gradients of its matmul outputs: kept until a backward for weights that comes later."""


def layer_activations(profile: Profile, plan: Plan, n: float) -> list[LayerActivations]:
    """By layer of the profile. Cast copies of weights are made, and kept, for every micro-batch.

    Of a recomputed layer only its output is kept; the rest exists during its backward.
    """
    scale = STORED_BYTES[plan.precision] / profile.activation_bytes
    whole = replace(plan, recompute="none")
    wide, cast = wide_bytes(profile, whole, n), cast_bytes(profile, whole)
    # the residual stream of a transformer is a sum that begins with rows of a table: autocast leaves it in fp32
    passed = profile.parameter_bytes / profile.activation_bytes if tokens_of(profile) else scale
    layers = []
    for i, x in enumerate(profile.layers):
        # both lists are running sums along the model, over the repeats before and of this one
        extra = _growth(wide, i) / x.repeats + _growth(cast, i) / x.repeats
        back = wide[2 * i + 1] - wide[2 * i]
        saved, output = scale * x.saved.at(n) + extra, passed * x.output.at(n)
        working = scale * x.local_backward.at(n) + back
        if plan.recompute != "none" and x.composite:
            saved, working = output, saved + working
        layers.append(LayerActivations(saved, output, working, scale * _matmul_outputs(x, n, profile.activation_bytes)))
    return layers


def _matmul_outputs(layer: Layer, n: float, width: int) -> float:
    """Bytes of the outputs of a layer's matmuls and convolutions."""
    shapes = [(shape_of(op), op) for op in layer.ops if op.phase == "forward"]
    rows = sum(s.rows * s.outputs * width * op.count for s, op in shapes if isinstance(s, MatmulShape))
    return n * rows + sum(op.output.at(n) * op.count for s, op in shapes if isinstance(s, ConvolutionShape))


def _growth(sums: Sequence[float], i: int) -> float:
    return sums[2 * i] - (sums[2 * i - 2] if i else 0.0)


def peak_activation_bytes(
    pipeline: Pipeline, saved: Sequence[float], kept: Sequence[float] | None = None
) -> tuple[float, ...]:
    """By rank: the most bytes of activations at once.

    `saved` is what the forward of one micro-batch leaves in each stage for its backward. Where the backward is split,
    `kept` is what of it, and of gradients, exists from B until W: inputs of layers with weights and the gradients of
    their outputs; by default, all that was saved.
    """
    levels = activation_levels(pipeline, saved, saved if kept is None else kept)
    return tuple(max((0.0, *of_rank)) for of_rank in levels)


def activation_levels(pipeline: Pipeline, saved: Sequence[float], kept: Sequence[float]) -> list[list[float]]:
    """By rank: the bytes of activations after each of its actions."""
    for word, given in (("saved", saved), ("kept", kept)):
        if len(given) != pipeline.stages:
            raise InputError(f"{word} bytes of {len(given)} stages", rule=f"one number for each of {pipeline.stages}")
    until_w = pipeline.splits_backward
    ranks = []
    for lane in pipeline.lanes:
        now, levels = 0.0, []
        for action in lane:
            s = action.stage
            change = {"F": saved[s], "B": (kept[s] if until_w else 0.0) - saved[s], "W": -kept[s], "U": 0.0}
            now += change[action.kind]
            levels.append(now)
        ranks.append(levels)
    return ranks


def memory_by_rank(
    profile: Profile, plan: Plan, n: float, order: Pipeline, stages: Sequence[Stage], homes: Mapping[int, int]
) -> list[PeakMemory]:
    """The memory of every rank of the pipeline; `homes` are the ranks of the stages."""
    activations = peak_activation_bytes(order, *_saved_and_kept(profile, stages))
    own = [[s for i, s in enumerate(stages) if homes[i] == r] for r in range(len(order.lanes))]
    ranks = [_rank(profile, plan, n, some, size) for some, size in zip(own, activations, strict=True)]
    return _with_versions(ranks, order) if order.has_updates else ranks


def memory_during_actions(
    profile: Profile, plan: Plan, n: float, order: Pipeline, stages: Sequence[Stage], homes: Mapping[int, int]
) -> list[tuple[list[float], float]]:
    """By rank: bytes during each of its actions, and during the update. Their maximum is that of `memory_by_rank`.

    A backward needs as much beyond saved activations as that of the rank's most demanding stage.
    """
    levels = activation_levels(order, *_saved_and_kept(profile, stages))
    peaks = memory_by_rank(profile, plan, n, order, stages, homes)
    ranks = []
    for r, (lane, of_rank, peak) in enumerate(zip(order.lanes, levels, peaks, strict=True)):
        own = [s for i, s in enumerate(stages) if homes[i] == r]
        working, update = max((_working(s) for s in own), default=0.0), _update_bytes(profile, plan, own)
        during = [
            max(before, after) + (working if action.kind in "BW" else 0.0)
            for action, before, after in zip(lane, [0.0, *of_rank], of_rank, strict=False)
        ]
        fixed = peak.total - peak.activations + profile.input.at(n) * plan.micro
        ranks.append(([fixed + x for x in during], fixed + update))
    return ranks


def _saved_and_kept(profile: Profile, stages: Sequence[Stage]) -> tuple[list[float], list[float]]:
    saved = [_saved(stages, i, profile) for i in range(len(stages))]
    # a split backward keeps the graph, and the gradients it begins with, until its second half; the first stage has no
    # input that needs a gradient
    return saved, [s + (sum(x.deferred for x in stages[i]) if i else 0.0) for i, s in enumerate(saved)]


def _with_versions(ranks: Sequence[PeakMemory], order: Pipeline) -> list[PeakMemory]:
    """Add what batches in flight need: older weights until their backwards, and where an update waits for the norm of
    all stages, the gradients of the next batch next to its own. Both are as large as the gradients."""
    return [
        replace(
            m,
            parameters=m.parameters + (versions - 1) * m.gradients,
            gradients=m.gradients * (2 if order.joint_updates else 1),
        )
        for m, versions in zip(ranks, prove_updates(order).versions, strict=True)
    ]


def _saved(stages: Sequence[Stage], i: int, profile: Profile) -> float:
    """Bytes that a forward leaves in a stage: what its layers save, and its input.

    A trace counts a layer's output with the layer. At the end of a stage it is sent and freed; the next stage has it.
    """
    own = sum(x.saved for x in stages[i])
    if profile.origin != "traced":
        return own
    received = stages[i - 1][-1].output if i else 0.0
    sent = stages[i][-1].output if i < len(stages) - 1 else 0.0
    return max(0.0, own - sent) + received


def _rank(profile: Profile, plan: Plan, n: float, own: Sequence[Stage], activations: float) -> PeakMemory:
    layers = [x for s in own for x in s]
    parameters, trained = _numbers(profile, own)
    buffers = profile.buffers * sum(x.share for x in layers) / sum(x.repeats for x in profile.layers)
    states = ModelStates.of(profile, plan, parameters, trained, buffers)
    working = max((_working(stage) for stage in own), default=0.0)
    peak = max(activations + working, _update_bytes(profile, plan, own))
    return PeakMemory(
        states.parameters,
        states.gradients,
        states.optimizer,
        profile.input.at(n) * plan.micro + peak,
        max((x.output for x in layers), default=0.0),
    )


def _numbers(profile: Profile, own: Sequence[Stage]) -> tuple[int, int]:
    """Parameters of a rank, and those of them that are trained."""
    part = stage_profile(profile, layer_shares(own))
    here = {x.layer for s in own for x in s}
    tied = 0 if _counts_tied_table(profile, here) else max((profile.layers[i].tied for i in here), default=0)
    return part.parameters + tied, part.trained + tied


def _update_bytes(profile: Profile, plan: Plan, own: Sequence[Stage]) -> float:
    """Temporaries of the update, of the largest piece that is updated at once."""
    _, trained = _numbers(profile, own)
    largest = max((profile.layers[x.layer].largest for s in own for x in s), default=0)
    return 2.0 * min(largest, trained / plan.shards) * profile.parameter_bytes


def _working(stage: Stage) -> float:
    """The most that a backward adds to saved activations: the layers behind the current one have freed theirs."""
    most = behind = 0.0
    for x in reversed(stage):
        most = max(most, x.working - behind)
        behind += x.saved
    return most


def _counts_tied_table(profile: Profile, here: set[int]) -> bool:
    """Whether a rank has the layer that counts a tied table: the first that is as large."""
    tied = max((x.tied for x in profile.layers), default=0)
    owner = next((i for i, x in enumerate(profile.layers) if tied and x.largest >= tied), None)
    return owner in here
