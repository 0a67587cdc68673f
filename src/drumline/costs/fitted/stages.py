"""How layers are dealt to the stages of a pipeline, and what a stage holds: evenly, or with the ends lighter."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .inputs import Array, Layouts, Models


@dataclass(frozen=True, slots=True)
class Stages:
    """Layers of the first, of the fullest inner, and of the last stage."""

    first: Array
    inner: Array
    last: Array
    weights_per_rank: Array
    """Parameters of the rank that holds the most."""
    first_weights: Array
    inner_weights: Array
    last_weights: Array


def stages(models: Models, layouts: Layouts) -> Stages:
    """Where layers do not divide evenly, both ends get one less than the others: they hold the embedding."""
    layers, pp = models.layers, layouts.pp
    even = layers % pp == 0
    ends = ~even & ((layers + 2.0) % pp == 0)
    inner = np.where(even, layers / pp, np.where(ends, (layers + 2.0) / pp, np.ceil(layers / pp)))
    rest = np.maximum(1.0, np.floor((layers - inner * (pp - 2.0)) / 2.0))
    end = np.where(even, inner, np.where(ends, inner - 1.0, rest))
    end = np.where(pp == 1, layers, np.where((pp == 2) & ~even, inner, end))
    tables = models.table_weights / layouts.tp
    experts = models.experts * models.inner_weights / layouts.ep
    one = (models.layer_weights - models.experts * models.inner_weights + experts) / layouts.tp
    alone = pp == 1
    first = end * one + np.where(alone, (2.0 - models.tied) * tables, tables)
    last = end * one + tables
    middle = np.where(pp > 2, inner * one, 0.0)
    most = np.maximum(np.maximum(first, last), middle)
    return Stages(end, np.where(pp > 2, inner, end), end, most, first, middle, last)
