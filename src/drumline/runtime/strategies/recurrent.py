"""Recurrent layers stay where a strategy has put them.

On a GPU torch lays the weights of a recurrent layer one after the other, for cuDNN, whenever it finds other tensors in
their places than before. A strategy that updates or gathers weights in memory of its own would go on to fill their old
places, and the layer would compute with what it had in the first step. Here cuDNN copies them for each call instead.
"""

from __future__ import annotations

from torch import nn

from ...tracing.warned import let_weights_lie_apart


def keep_in_place(model: nn.Module) -> None:
    """Let no recurrent layer move its weights."""
    found = [m for m in model.modules() if isinstance(m, nn.RNNBase)]
    for module in found:
        module.flatten_parameters = stay  # type: ignore[method-assign]  # of this layer alone
    if found:  # what torch advises against it is what must not be
        let_weights_lie_apart()


def stay() -> None:
    """Instead of `flatten_parameters`."""
