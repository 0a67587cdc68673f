"""What torch warns of although nobody can do anything about it."""

from __future__ import annotations

import warnings


def let_weights_lie_apart() -> None:
    """Say nothing of recurrent layers whose weights cuDNN copies for each call.

    So it is with bf16 layers always, and with weights in memory that a strategy has laid out.
    """
    warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk of memory")
