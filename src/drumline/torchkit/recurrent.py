"""Recurrent layers: oneDNN's kernels on a CPU, and cuDNN's warning about weights that are not contiguous.

Written for torch 2.13. Missing public API: `torch.backends.mkldnn.flags` changes other settings too and is not safe
in threads; the warning has no switch; a layer does not list the names of its weights.
"""

from __future__ import annotations

import warnings

from torch import nn
from torch._C import _get_mkldnn_enabled as onednn_enabled
from torch._C import _set_mkldnn_enabled as set_onednn_enabled

__all__ = ["onednn_enabled", "set_onednn_enabled", "silence_rnn_contiguity_warning", "weight_names"]


def silence_rnn_contiguity_warning() -> None:
    """Ignore cuDNN's warning that it copies the weights of a recurrent layer on each call.

    That is unavoidable for bf16 layers and for weights whose memory a strategy owns.
    """
    warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk of memory")


def weight_names(layer: nn.RNNBase) -> list[str]:
    """The attributes of a recurrent layer's weights, in the order of its kernel's arguments."""
    return layer._flat_weights_names
