"""Layers and parameters of pipeline stages: evenly many, or fewer at both ends, which have the embedding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..plan_columns import Array
from .inputs import LayoutColumns, ModelColumns


@dataclass(frozen=True, slots=True)
class StageSizes:
    """Layers and parameters of the first, the fullest inner and the last stage."""

    first: Array
    inner: Array
    last: Array
    weights_per_rank: Array
    """Parameters of the fullest rank."""
    first_weights: Array
    inner_weights: Array
    last_weights: Array
    routed_weights: Array
    """Parameters of routed experts among those of the fullest rank."""
    routed_fraction: tuple[Array, Array, Array]
    """Fraction of routed experts among the parameters of the first, the inner and the last stage."""


def stage_sizes(models: ModelColumns, layouts: LayoutColumns) -> StageSizes:
    """Divide the layers. If they do not divide evenly, both ends get fewer than the inner stages."""
    layers, pp = models.layers, layouts.pp
    even = layers % pp == 0
    ends = ~even & ((layers + 2.0) % pp == 0)
    inner = np.where(even, layers / pp, np.where(ends, (layers + 2.0) / pp, np.ceil(layers / pp)))
    rest = np.maximum(1.0, np.floor((layers - inner * (pp - 2.0)) / 2.0))
    end = np.where(even, inner, np.where(ends, inner - 1.0, rest))
    end = np.where(pp == 1, layers, np.where((pp == 2) & ~even, inner, end))
    tables = models.embedding_weights / layouts.tp
    single = pp == 1
    stages = [_stage(models, layouts, n, place) for n, place in ((end, 0), (inner, 1), (end, 2))]
    (first, first_routed), (middle, middle_routed), (last, last_routed) = stages
    first = first + np.where(single, (2.0 - models.tied) * tables, tables)
    last = last + tables
    middle = np.where(pp > 2, middle, 0.0)
    most = np.maximum(np.maximum(first, last), middle)
    routed = np.where(most == middle, middle_routed, np.where(most == first, first_routed, last_routed))
    fractions = (
        first_routed / np.maximum(first, 1.0),
        middle_routed / np.maximum(middle, 1.0),
        last_routed / np.maximum(last, 1.0),
    )
    return StageSizes(end, np.where(pp > 2, inner, end), end, most, first, middle, last, routed, fractions)


def _stage(models: ModelColumns, layouts: LayoutColumns, layers: Array, place: int) -> tuple[Array, Array]:
    """(parameters, those of routed experts among them) of a stage: the first, the last inner one, or the last.

    Layers without experts come first.
    """
    block = (models.attention_weights + models.ffn_weights) / layouts.tp
    if not models.has_mixtures:
        return layers * block, np.zeros_like(layers)
    before = (0.0, models.layers - 2.0 * layers, models.layers - layers)[place]
    dense = np.clip(models.dense_layers - np.where(layouts.pp > 1, before, 0.0), 0.0, layers)
    mixtures = layers - dense
    routed = mixtures * models.mixture_weights / layouts.ep / layouts.tp
    return layers * block + mixtures * models.mixture_extra / layouts.tp + routed, routed
