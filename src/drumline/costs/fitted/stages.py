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
    experts = models.experts * models.ffn_weights / layouts.ep
    one = (models.layer_weights - models.experts * models.ffn_weights + experts) / layouts.tp
    single = pp == 1
    first = end * one + np.where(single, (2.0 - models.tied) * tables, tables)
    last = end * one + tables
    middle = np.where(pp > 2, inner * one, 0.0)
    most = np.maximum(np.maximum(first, last), middle)
    return StageSizes(end, np.where(pp > 2, inner, end), end, most, first, middle, last)
