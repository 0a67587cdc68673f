"""Captures the graphs of a job: the user's model and loss on fake tensors, once for each shape of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...core.job import Job, call_user_code
from ...partition.capture import CapturedGraph, capture, flatten
from ...partition.capture_conditions import CaptureConditions
from ...plans import Plan
from ...torchkit.fake_tensors import with_real_tensors
from ...torchkit.pytree import tree_flatten
from ...tracing.fake import call_model, fake_batch, fake_mode, fake_model, first_sample, move_model
from ..numerics.loss_weighting import weighted_sum
from ..numerics.precision import compute_precision, to_device
from ..numerics.recurrent import note_recurrent_layers
from .checks import suggest_replicas


@dataclass(frozen=True, eq=False)
class JobGraph:
    """The graph of one shape of a micro-batch."""

    captured: CapturedGraph
    shape: Any
    """Of the micro-batch: whether it trains, its samples, and the form of its input and target."""
    conditions: CaptureConditions
    own_weight: bool
    """Whether the job weights its loss."""
    names: tuple[str, ...]
    """Names of the results: the loss, and in evaluation the job's metrics too."""


class JobCapture:
    """The job's model on fake tensors, and graphs of it."""

    def __init__(self, job: Job, plan: Plan, device: torch.device, dtype: torch.dtype | None) -> None:
        self.job, self.plan, self.device, self.dtype = job, plan, device, dtype
        self.mode = fake_mode()
        self.template = self._template()
        """The user's module on fake tensors: this is captured."""
        self.template.train()

    @with_real_tensors()
    def capture_first(self, slices: int) -> JobGraph:
        """The graph of the first micro-batch, of a batch cut into `slices`."""
        n = -(-self.job.batch_size // (self.plan.micro * slices))
        value, target = fake_batch(self.mode, sample=first_sample(self.job), n=n)
        with self.mode:
            value, target = (to_device(v, self.device, self.dtype) for v in (value, target))
        return self.capture((value, target), n, training=True)

    def real_batch(self, slices: int) -> list[torch.Tensor]:
        """The tensors of that micro-batch with values: copies of the first sample."""
        n = -(-self.job.batch_size // (self.plan.micro * slices))
        batch = first_sample(self.job).batch(n)
        leaves, _ = flatten(tuple(to_device(v, self.device, self.dtype) for v in batch))
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    @with_real_tensors()
    def _template(self) -> nn.Module:
        model, _ = fake_model(self.job, self.mode)
        note_recurrent_layers(model)
        return move_model(model, self.mode, self.device, self.dtype)

    @with_real_tensors()
    def capture(self, batch: Any, samples: int, *, training: bool) -> JobGraph:
        """The graph of a micro-batch."""
        leaves, together = flatten(batch)
        own, names = [False], ["loss"]

        def run(model: nn.Module, given: list[Any]) -> Any:
            value, target = together(given)
            output = call_model(model, value)
            results: dict[str, Any] = {"loss": self.job.loss(output, target)}
            if not training and self.job.evaluate is not None:
                results.update(call_user_code(self.job.evaluate, "the job's evaluate()", output, target))
            names[:] = list(results)
            pairs = []
            for result in results.values():
                total, weight, own[0] = weighted_sum(self.job, result, value, target, samples)
                pairs += [total, weight.to(total.device)]
            return pairs

        conditions = self._conditions(training)
        with compute_precision(self.plan.precision, self.device), suggest_replicas(self.plan):
            captured = capture(self.template, run, leaves, self.mode)
        return JobGraph(captured, _shape(batch, samples, training), conditions, own[0], tuple(names))

    @with_real_tensors()
    def would_capture(self, graph: JobGraph, batch: Any, samples: int, *, training: bool) -> bool:
        """Whether capturing this micro-batch would give this graph again."""
        if _shape(batch, samples, training) != graph.shape:
            return False
        return self._conditions(training).capture_the_same(graph.conditions, graph.captured.graph)

    def _conditions(self, training: bool) -> CaptureConditions:
        self.template.train(training)
        return CaptureConditions(self.template)


def _shape(batch: Any, samples: int, training: bool) -> Any:
    leaves, structure = tree_flatten(batch)
    forms = [
        (tuple(v.shape), v.stride(), v.dtype, v.device, v.requires_grad) if isinstance(v, torch.Tensor) else repr(v)
        for v in leaves
    ]
    return training, samples, structure, forms
