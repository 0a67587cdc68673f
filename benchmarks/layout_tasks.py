"""Tasks of benchmarks/layouts.py, all layouts of four ranks for them, and which mesh axes cross the link."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from drumline.core.errors import PlanError
from drumline.costs import OperatorCostModel
from drumline.plans import Plan
from drumline.plans.combinations import refusal

RANKS, PER_HOST = 4, 2
ORDERS = (("1f1b", 1), ("zero-bubble", 1), ("interleaved", 2), ("zero-bubble", 2))


@dataclass(frozen=True)
class Task:
    """A model, a batch, and what was expected before anything was measured."""

    context: int
    width: int
    heads: int
    blocks: int
    samples: int
    expected: str

    def __str__(self) -> str:
        return f"a GPT of {self.blocks} blocks of {self.width}, {self.samples} samples of {self.context} tokens"

    def job(self) -> Any:
        """As users write it."""
        import torch
        from gpt_task import ADAMW, GPT, Size, Tokens, loss_of

        from drumline.core.job import Job

        return Job(
            model=partial(GPT, Size(self.context, self.width, self.heads, self.blocks)),
            loss=loss_of,
            optimizer=partial(torch.optim.AdamW, **ADAMW),
            data=partial(Tokens, self.samples, self.context),
            batch_size=self.samples,
        )


TASKS = {
    "wide": Task(128, 1024, 16, 2, 2, "tp inside, pp across: what is wide has more gradients than activations"),
    "long": Task(2048, 256, 8, 2, 2, "tp inside, dp across: what is long has more activations than gradients"),
    "small": Task(16, 32, 4, 2, 4, "nothing: it shows that all of this runs"),
}
SHOWN = ("wide", "long")


def layouts(samples: int) -> Iterator[Plan]:
    """Every product of axes with four ranks, every level of ZeRO, and the orders and micro-batches of each."""
    for pp, dp, cp, tp in itertools.product((1, 2, 4), repeat=4):
        if pp * dp * cp * tp != RANKS or dp > samples:
            continue
        micros = [m for m in (1, 2, 4, 8) if m * dp <= samples]
        for zero, micro in itertools.product(range(4 if dp > 1 else 1), micros):
            for schedule, virtual in ORDERS if pp > 1 else ORDERS[:1]:
                plan = Plan(dp=dp, tp=tp, pp=pp, cp=cp, zero=zero, micro=micro, schedule=schedule, virtual=virtual)
                if not refusal(plan):
                    yield plan


def priced(samples: int, steps: OperatorCostModel) -> dict[str, float]:
    """Find the cheapest plan of every layout by the planner's price, including layouts that the planner skips.

    With data parallelism, these are two per layout: the cheapest without ZeRO and the cheapest with it.
    """
    cheapest: dict[tuple[object, ...], tuple[float, str]] = {}
    for plan in layouts(samples):
        try:
            price = steps.estimate(plan).step_seconds, str(plan)
        except PlanError:
            continue  # more stages than layers
        layout = plan.pp, plan.dp, plan.cp, plan.tp, plan.zero > 0
        cheapest[layout] = min(price, cheapest.get(layout, price))
    return {plan: seconds for seconds, plan in sorted(cheapest.values())}


def axes_of(plan: str) -> tuple[int, int, int, int]:
    """Count the ranks along each axis."""
    parsed = Plan.parse(plan)
    return parsed.pp, parsed.dp, parsed.cp, parsed.tp


def places(plan: str, interleaved: bool) -> dict[str, str]:
    """Map each axis to `inside` a host or `across` both; `interleaved`: ranks are numbered in turns over the hosts."""
    parsed = Plan.parse(plan)
    sides, stride = {}, 1
    for axis in ("tp", "cp", "dp", "pp"):
        ranks = getattr(parsed, axis)
        if ranks > 1:
            inside = stride % PER_HOST == 0 if interleaved else ranks * stride <= PER_HOST
            sides[axis] = "inside" if inside else "across"
        stride *= ranks
    return sides
