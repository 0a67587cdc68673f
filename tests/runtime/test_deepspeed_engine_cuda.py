"""On a GPU: the DeepSpeed loop computes what a plain loop on the CPU computes; workers deliver pinned batches."""

from __future__ import annotations

from typing import Any

import deepspeed_functions as on_ranks
import pytest
import small_jobs
import torch
import torch.distributed as dist
import torch.nn.functional as F

import drumline as dl
from drumline.datasets import Loader, Stream
from drumline.runtime.learning_rates.gradient_noise import noise_scale

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


@pytest.fixture(autouse=True)
def alone() -> Any:
    """One rank, in this process."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("offload", [False, True])
def test_gpu_matches_cpu(zero: int, offload: bool) -> None:
    model = on_ranks.model_of("mlp")
    config = on_ranks.config_of(zero, 2, 0.5)
    if offload:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    engine, _, loader, _ = dl.initialize(
        model=model,
        optimizer=on_ranks.optimizer_of("two", model),
        data=on_ranks.samples_of("mlp"),
        config=config,
        scheduler=dl.rates.Exponential(by=0.9),
        dtype=torch.float64,
        workers=1,
    )
    assert loader is not None
    for _ in range(2):
        for x, y in loader:
            assert x.is_pinned()
            engine.backward(F.cross_entropy(engine(x.double().to(engine.device)), y.to(engine.device)))
            engine.step()
    expected = on_ranks.plain("mlp", 1, 2, 0.5, "two")
    for name, w in expected["weights"].items():
        torch.testing.assert_close(engine.module_state_dict()[name].cpu(), w, rtol=1e-9, atol=1e-11, msg=name)


def test_batches_are_pinned() -> None:
    job = small_jobs.make("named")
    with Loader(Stream(job, job.data()), workers=1, pin=True) as loader:
        [micro] = loader.batch(0).micros
    assert all(t.is_pinned() for t in (*micro.input.values(), micro.target))


def test_noise_scale() -> None:
    engine = dl.initialize(on_ranks.regression(), "dp=1,zero=1", dtype=torch.float64)
    assert engine.device.type == "cuda"
    assert 10 < noise_scale(engine, batches=10).scale < 60
