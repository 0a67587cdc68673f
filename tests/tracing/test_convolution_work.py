"""Operations of a convolution's backward: as many as its forward for each gradient, with any number of groups."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from drumline.core.job import Job
from drumline.tracing import trace


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(8, 8, 3, padding=1),
        nn.Conv2d(8, 16, 3, 2, 1, groups=4),
        nn.Conv2d(8, 8, 5, groups=8),
        nn.ConvTranspose2d(8, 8, 2, 2),
        nn.ConvTranspose2d(8, 8, 2, 2, groups=2),
    ],
)
def test_a_backward_takes_twice_the_forward(layer: nn.Module) -> None:
    job = Job(
        model=lambda: nn.Sequential(nn.Conv2d(3, 8, 1), layer),
        loss=lambda y, t: y.square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=lambda: [(torch.zeros(3, 8, 8), torch.zeros(1))] * 4,
        batch_size=4,
    )
    work = {
        (x.name, op.kind): op.flops.at(4)
        for x in trace(job).layers
        for op in x.ops
        if op.kind in ("conv", "conv_backward")
    }
    assert work["1", "conv_backward"] == pytest.approx(2 * work["1", "conv"])
    assert work["0", "conv_backward"] == pytest.approx(work["0", "conv"])  # the images need no gradient
