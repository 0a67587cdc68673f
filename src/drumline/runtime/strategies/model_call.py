"""Runs the user's module and loss on one micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ...core.errors import JobError
from ...core.job import Job, call_user_code
from ...datasets.stream import RankMicroBatch
from ...tracing.fake import call_model
from ..numerics.batchnorm import SyncedBatchNorm
from ..numerics.loss_weighting import weighted_sum
from ..numerics.precision import compute_precision, to_device


@dataclass(frozen=True, slots=True, eq=False)
class ModelCall:
    """The model of one rank, as it is called."""

    job: Job
    model: nn.Module
    """The user's module."""
    module: nn.Module
    """The module to call: the model, or what wraps it."""
    norms: Sequence[SyncedBatchNorm]
    """The norms whose statistics span ranks."""
    precision: str
    device: torch.device
    dtype: torch.dtype | None

    def loss_of(self, micro: RankMicroBatch) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """Sum and weight of the loss, and whether the job gave the weight."""
        self._begin(micro)
        value = to_device(micro.input, self.device, self.dtype)
        target = to_device(micro.target, self.device, self.dtype)
        loss = self.job.loss(call_model(self.module, value), target)
        return weighted_sum(self.job, loss, value, target, micro.samples)

    def metrics_of(self, micro: RankMicroBatch) -> dict[str, torch.Tensor]:
        """(sum, weight) of the loss and of each of the job's metrics."""
        job = self.job
        self._begin(micro)
        value = to_device(micro.input, self.device, self.dtype)
        target = to_device(micro.target, self.device, self.dtype)
        with compute_precision(self.precision, self.device):
            output = call_model(self.module, value)
            results = {"loss": job.loss(output, target)}
            if job.evaluate is not None:
                results.update(call_user_code(job.evaluate, "the job's evaluate()", output, target))
        pairs = {}
        for name, result in results.items():
            if not isinstance(result, torch.Tensor | tuple | list | float | int):
                what = f"metric {name!r} is a {type(result).__name__}"
                raise JobError(what, rule="a metric is a mean, or (sum, weight)")
            if not isinstance(result, tuple | list):
                result = torch.as_tensor(result, dtype=torch.float64)
            total, weight, _ = weighted_sum(job, result, value, target, micro.samples)
            pairs[name] = torch.stack([total.double(), weight.double()]).to(self.device)
        return pairs

    def _begin(self, micro: RankMicroBatch) -> None:
        """Tell the norms whether this rank's slice of the micro-batch counts."""
        for norm in self.norms:
            norm.present = micro.samples > 0
