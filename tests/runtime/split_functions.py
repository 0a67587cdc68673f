"""Functions that the tests of split models run on ranks: dropout masks, evaluation, own loops."""

from __future__ import annotations

from typing import Any

import small_jobs
import torch
import torch.distributed as dist
from torch import nn

from drumline.runtime.engine import initialize
from drumline.runtime.parallel.model_parallel import ModelParallel

DOUBLE = torch.float64


class Masks(nn.Module):
    """Outputs two dropout masks: of a tensor that every tp rank has, and of one that is split."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 64), nn.Linear(64, 8)
        self.same, self.own, self.head = nn.Dropout(0.5), nn.Dropout(0.5), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x * self.same(torch.ones_like(x)))
        y = torch.tanh(self.up(x))
        return self.head(x + self.down(y * self.own(torch.ones_like(y))))


def masks(plan: str) -> dict[str, list[torch.Tensor]]:
    """On every rank: the masks of two steps, module by module."""
    engine = initialize(small_jobs.make("mlp", model=Masks), plan)
    result: dict[str, list[torch.Tensor]] = {"same": [], "own": []}

    def seen(micro: int, output: Any, t: torch.Tensor) -> None:
        if output.module in result:
            result[output.module].append((t.detach() > 0).clone())

    engine.strategy.watch_outputs(seen)
    for batch in engine.data(2):
        engine.step(batch)
    return result


def whole_on_every_rank(name: str, plan: str) -> float:
    """On every rank: train with dropout; the largest difference between copies of parameters that several ranks have."""
    engine = initialize(small_jobs.make(name), plan)
    assert isinstance(engine.strategy, ModelParallel)
    for batch in engine.data(3):
        engine.step(batch)
    worst = 0.0
    for key, p in sorted(engine.model.named_parameters()):
        if key in engine.strategy.partitioner.splits:
            continue
        copies = [torch.empty_like(p) for _ in range(engine.ranks)]
        dist.all_gather(copies, p.detach().contiguous())
        worst = max(worst, *(float((c - p.detach()).abs().max()) for c in copies))
    return worst


def _accuracy(output: Any, target: torch.Tensor) -> dict[str, Any]:
    output = output["logits"] if isinstance(output, dict) else output
    right = (output.argmax(1 if output.dim() == 4 else -1) == target).double()
    return {"accuracy": right.mean(), "right": (right.sum(), torch.tensor(float(right.numel())))}


def evaluated(cases: list[tuple[str, str]]) -> list[dict[str, float]]:
    """On every rank: train two steps, evaluate, and train one more, which evaluation must not have changed."""
    results = []
    for name, plan in cases:
        engine = initialize(small_jobs.make(name, evaluate=_accuracy), plan, dtype=DOUBLE)
        for batch in engine.data(2):
            engine.step(batch)
        metrics = engine.evaluate()
        results.append({**metrics, "next": engine.step(next(engine.data(1)))})
    return results


def own_loop(cases: list[tuple[str, str]]) -> list[list[float]]:
    """On every rank: losses of steps on batches of the caller's own loader; replicas have slices of them."""
    results = []
    for name, plan in cases:
        engine = initialize(small_jobs.make(name), plan, dtype=DOUBLE)
        losses = []
        for step in range(3):
            samples = [engine.stream.dataset[(8 * step + i) % small_jobs.SAMPLES] for i in range(8)]
            mine = samples[engine.data_index :: engine.data_ranks]
            x, y = (torch.stack([torch.as_tensor(s[k]) for s in mine]) for k in (0, 1))
            losses.append(engine.step((x, y)))
            losses.append(engine.grad_norm)
        results.append(losses)
    return results
