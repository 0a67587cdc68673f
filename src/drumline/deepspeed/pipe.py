"""`deepspeed.pipe`: importable, and refused by name: pipelines are cut from ordinary models here."""

from __future__ import annotations

from typing import Any

from ..core.errors import PlanError


def _refused(name: str) -> PlanError:
    return PlanError(
        f"deepspeed.pipe.{name}",
        rule="a pipeline is cut from an ordinary model, and interleaves many micro-batches, which a loop cannot do",
        fix="an nn.Sequential of the layers in a Job, `drumline plan` or pp=n in its plan, and engine.step(batch)",
    )


def PipelineModule(*args: Any, **options: Any) -> Any:
    """Refused, with the way out."""
    raise _refused("PipelineModule")


def LayerSpec(*args: Any, **options: Any) -> Any:
    """Refused, with the way out."""
    raise _refused("LayerSpec")


def TiedLayerSpec(*args: Any, **options: Any) -> Any:
    """Refused, with the way out."""
    raise _refused("TiedLayerSpec")
