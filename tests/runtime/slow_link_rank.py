"""A rank of test_slow_link.py: trains for 20 steps and prints what the comparison of ranks says."""

from __future__ import annotations

import json

import small_jobs
from torch import nn

from drumline.runtime.engine import initialize
from drumline.runtime.training.slowest_rank import EVERY, RankWatch


class Wide(nn.Module):
    """Half a million weights, so that gradients take longer to send than to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 700), nn.Linear(700, 700), nn.Linear(700, 4))

    def forward(self, x):  # type: ignore[no-untyped-def]
        return self.layers(x)


def main() -> None:
    engine = initialize(small_jobs.make("mlp", model=Wide), "dp=2")
    watch = RankWatch(engine)
    for i, batch in enumerate(engine.data(2 * EVERY)):
        engine.step(batch)
        compared = watch.compare(engine.record.steps[-EVERY:] if i % EVERY == EVERY - 1 else ())
    assert compared is not None
    print(json.dumps(compared.report()))


if __name__ == "__main__":
    main()
