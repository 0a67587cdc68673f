"""`deepspeed.checkpointing`: recomputation of activations, by torch's own checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint

from ..core.errors import JobError


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Call the function, and call it again in the backward instead of storing its activations."""
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)


def configure(mpu_: Any = None, deepspeed_config: Any = None, **options: Any) -> None:
    """Accept DeepSpeed's defaults. Options that are on are refused: activations are not split or moved here."""
    on = [name for name, value in options.items() if value]
    if mpu_ is not None or on:
        raise JobError(
            f"checkpointing.configure({', '.join(on) or 'mpu_'}=...)",
            rule="checkpoint() recomputes, and stores its inputs where they are",
            fix="leave it out",
        )


def is_configured() -> bool:
    """Whether `checkpoint` may be called: always."""
    return True


def reset() -> None:
    """Nothing is kept between steps."""
