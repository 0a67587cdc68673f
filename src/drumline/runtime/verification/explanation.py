"""Explains why a plan diverges where the job itself depends on how a batch is cut."""

from __future__ import annotations

from typing import Any

import torch

from ...core.errors import DrumlineError
from ...core.job import Job
from ...datasets.sources import load_data
from ...datasets.stream import RankMicroBatch, Stream
from ...torchkit.pytree import tree_flatten
from ...tracing.fake import call_model
from ..numerics.precision import to_device
from ..state.weights import seeded_model


def explain(job: Job) -> str:
    """Why the loss of a batch is not that of its parts, on one device; empty if it is.

    The first batch and its parts go through the model in evaluation mode, in which samples do not affect each other.
    """
    if job.sample_weight is not None:
        return ""
    try:
        return _explained(job)
    except (DrumlineError, RuntimeError):  # a part may be too small for the model: then this says nothing
        return ""


@torch.no_grad()
def _explained(job: Job) -> str:
    model = seeded_model(job, torch.float64).eval()
    stream = Stream(job, load_data(job))
    samples = stream.samples(0)
    n = len(samples)

    first_time, again = (stream.cut(samples, 0).micros[0] for _ in range(2))
    if not _equal((first_time.input, first_time.target), (again.input, again.target)):
        return (
            "the data are not reproducible: the first batch is another one when it is loaded again. Draw random "
            "numbers where samples are made, from torch, numpy.random or random, which are seeded for every sample: "
            "not in collate, and not from a generator of your own"
        )

    def loss_of(part: list[int]) -> float | None:
        micro: RankMicroBatch = stream.cut(part, 0).micros[0]
        value, target = (to_device(v, torch.device("cpu"), torch.float64) for v in (micro.input, micro.target))
        loss = job.loss(call_model(model, value), target)
        return None if isinstance(loss, tuple | list) else float(loss)

    whole = loss_of(samples)
    for k in dict.fromkeys((n // 2, 1, n // 3, n - 1)):
        if not 0 < k < n or whole is None:
            continue
        first, second = loss_of(samples[:k]), loss_of(samples[k:])
        assert first is not None
        assert second is not None
        mean = (k * first + (n - k) * second) / n
        if not abs(whole - mean) <= 1e-9 * max(1.0, abs(whole)):
            return _text(job, n, whole, mean, k)
    return ""


def _equal(a: Any, b: Any) -> bool:
    """Whether two batches are the same."""
    return all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) else x == y
        for x, y in zip(tree_flatten(a)[0], tree_flatten(b)[0], strict=True)
    )


def _text(job: Job, n: int, whole: float, mean: float, k: int) -> str:
    way = (
        "sample_weight=lambda input, target: (target['labels'] != -100).sum() in the job, with the targets that the "
        "model counts"
        if job.model_returns_loss
        else "return (sum, weight): cross_entropy(..., reduction='sum'), (target != -100).sum()"
    )
    return (
        f"the loss is no mean over samples: {whole:.6g} for the first {n}, but the parts of {k} and {n - k} give "
        f"{mean:.6g}. A mean over something else, such as targets that are not ignored (ignore_index), changes with "
        f"every cut of the batch: {way}"
    )
