"""The dynamic loss scale of fp16: the loss is multiplied by it, so that small gradients do not underflow.

When a gradient overflows, the scale is halved and the batch runs again; after `window` good steps it is doubled. Every
rank sees the same gradient norm, so all have the same scale.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...core.errors import GaveUp


@dataclass(slots=True)
class LossScale:
    """The factor on the loss before the backward."""

    scale: float = 2.0**16
    window: int = 1000
    """Good steps before the scale is doubled."""
    least: float = 2.0**-14
    good: int = 0
    """Good steps since the last change."""
    overflows: int = 0
    """Number of overflows in the whole run."""

    def on_overflow(self) -> None:
        """Halve it."""
        self.scale, self.good, self.overflows = self.scale / 2, 0, self.overflows + 1
        if self.scale < self.least:
            raise GaveUp(
                f"gradients overflow in fp16 even at a loss scale of {self.scale:g}",
                rule=f"the scale is halved at every overflow, down to {self.least:g}",
                fix="precision=bf16 or fp32, or a smaller learning rate: the model may have diverged",
            )

    def on_good_step(self) -> None:
        """Count a good step."""
        self.good += 1
        if self.good >= self.window:
            self.scale, self.good = min(self.scale * 2, 2.0**24), 0

    def state_dict(self) -> dict[str, float]:
        """For a checkpoint."""
        return {"scale": self.scale, "good": self.good, "overflows": self.overflows}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """From a checkpoint."""
        self.scale, self.good, self.overflows = float(state["scale"]), int(state["good"]), int(state["overflows"])
