"""On a GPU: a step that is captured once and replayed equals the plain engine's, step by step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import drumline as dl
from drumline.comm.environment import disconnect
from drumline.core.errors import JobError, PlanError
from drumline.runtime.core.step_graph import PLAIN_STEPS
from drumline.runtime.engine import Engine, initialize

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


class Net(nn.Module):
    """Convolutions, norms, dropout, and a linear head."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.drop, self.head = nn.Dropout(dropout), nn.Linear(8 * 64, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(torch.relu(self.norm(self.conv(x)))).flatten(1))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.003, weight_decay=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.03, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.03, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.003),
}


def job(
    optimizer: str = "adamw",
    *,
    clip: float | None = None,
    model: Callable[[], nn.Module] = Net,
    loss: Callable[..., Any] = nn.functional.cross_entropy,
    samples: int = 96,
    schedule: Callable[[Any], Any] | None = None,
) -> dl.Job:
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(3, 8, 8, generator=generator), i % 5) for i in range(samples)]
    cosine = schedule or (lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20))
    return dl.Job(
        model=model,
        loss=loss,
        data=lambda: data,
        batch_size=8,
        clip=clip,
        optimizer=OPTIMIZERS[optimizer],
        schedule=cosine,
        steps=10,
    )


@pytest.fixture(autouse=True)
def _leaves() -> Iterator[None]:
    yield
    disconnect()


def trained(engine: Engine, steps: int = 10) -> dict[str, Any]:
    """Losses, norms and rates of all steps, and the state afterwards."""
    losses, norms, rates = [], [], []
    for batch in engine.data(steps):
        losses.append(engine.step(batch))
        norms.append(engine.grad_norm)
        rates.append(engine.optimizer.param_groups[0]["lr"])
    state = {k: v.clone() for k, v in engine.whole_parameters().items()}
    state |= {k: v.clone().double() for k, v in engine.model.named_buffers()}
    for i, piece in enumerate(engine.pieces):
        for key, value in engine.optimizer.state[piece.value].items():
            state[f"{i}.{key}"] = value.clone()
    return {"losses": losses, "norms": norms, "rates": rates, "state": state}


def compare(made: dl.Job, plan: str, *, dtype: torch.dtype | None, bound: float) -> None:
    """Ten steps with and without a graph."""
    plain = trained(initialize(made, plan, dtype=dtype))
    engine = initialize(made, f"{plan},graph=true", dtype=dtype)
    replayed = trained(engine)
    assert engine.graph is not None and engine.graph.is_captured
    assert replayed["rates"] == plain["rates"]
    for name in ("losses", "norms"):
        assert replayed[name] == pytest.approx(plain[name], rel=bound, abs=bound)
    largest = max(float(v.abs().max()) for v in plain["state"].values() if v.is_floating_point())
    for name, value in plain["state"].items():
        error = float((replayed["state"][name].double() - value.double()).abs().max())
        assert error <= bound * max(float(value.abs().max()), 1e-3 * largest), name


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("plan", ["dp=1", "dp=1,micro=4"])
def test_equals_plain_engine_in_float64(optimizer: str, clip: float | None, plan: str) -> None:
    """With dropout and BatchNorm: masks and statistics are the same."""
    compare(job(optimizer, clip=clip), plan, dtype=torch.float64, bound=1e-10)


@pytest.mark.parametrize("plan", ["dp=1", "dp=1,precision=tf32", "dp=1,precision=bf16,micro=2", "dp=1,zero=1"])
@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
def test_equals_plain_engine_in_its_own_precision(plan: str, optimizer: str) -> None:
    compare(job(optimizer, clip=1.0), plan, dtype=None, bound=2e-2 if "bf16" in plan else 1e-3)


@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_equals_compiled_model() -> None:
    with mock.patch("torch._inductor.config.compile_threads", 1):  # the workers would outlive the test
        compare(job(clip=1.0), "dp=1,compile=true", dtype=None, bound=1e-3)


def test_equals_weighted_loss() -> None:
    def loss(y: torch.Tensor, t: torch.Tensor) -> Any:
        kept = (t != 3).to(y.dtype)
        return (nn.functional.cross_entropy(y, t, reduction="none") * kept).sum(), kept.sum()

    compare(job(loss=loss, clip=0.5), "dp=1,micro=2", dtype=torch.float64, bound=1e-10)


def test_fp16_overflow_repeats_the_batch_and_captures_again() -> None:
    engine = initialize(job(), "dp=1,precision=fp16,graph=true")
    assert engine.scaler is not None
    for i, batch in enumerate(engine.data(8)):
        if i == PLAIN_STEPS + 2:
            engine.scaler.scale = 2.0**40  # the gradients overflow until it was halved often
        assert math.isfinite(engine.step(batch))
    assert engine.steps == 8 and engine.scaler.overflows > 3
    assert engine.graph is not None and engine.graph.is_captured


def test_dropout_differs_between_steps() -> None:
    """The same batch in every step, and weights that do not move."""
    made = job("momentum", model=lambda: Net(0.5), samples=8)
    engine = initialize(made, "dp=1,graph=true")
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0
    batch = next(iter(engine.data(1)))
    losses = [engine.step((batch.micros[0].input, batch.micros[0].target)) for _ in range(8)]
    assert len(set(losses)) == 8


def test_resumed_run_is_the_same_run(tmp_path: Path) -> None:
    whole = trained(initialize(job(clip=0.5), "dp=1,graph=true", dtype=torch.float64), 12)
    first = initialize(job(clip=0.5), "dp=1,graph=true", dtype=torch.float64)
    trained(first, 6)
    first.save(tmp_path)
    trained(first, 1)  # captured, and then set back
    first.load(tmp_path)
    again = trained(first, 6)
    second = initialize(job(clip=0.5), "dp=1,graph=true", dtype=torch.float64)
    second.load(tmp_path)
    resumed = trained(second, 6)
    for run in (again, resumed):
        assert run["losses"] == pytest.approx(whole["losses"][6:], rel=1e-12)
        for name, value in whole["state"].items():
            torch.testing.assert_close(run["state"][name], value, rtol=1e-10, atol=1e-12)


def test_bad_step_changes_nothing_and_is_explained() -> None:
    def loss(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(y, t) * FACTOR

    engine = initialize(job(loss=loss), "dp=1,graph=true", guards=dl.Guards(nonfinite="skip"))
    FACTOR.fill_(1.0)
    trained(engine, 6)
    before = {k: v.clone() for k, v in [*engine.whole_parameters().items(), *engine.model.named_buffers()]}
    steps = engine.steps
    FACTOR.fill_(math.nan)
    trained(engine, 1)
    after = {**engine.whole_parameters(), **dict(engine.model.named_buffers())}
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert engine.steps == steps and "skipped: the loss is nan" in engine.note
    FACTOR.fill_(1.0)
    assert all(math.isfinite(x) for x in trained(engine, 2)["losses"])
    assert engine.steps == steps + 2
    FACTOR.fill_(math.nan)
    stopping = initialize(job(loss=loss), "dp=1,graph=true")
    with pytest.raises(dl.DrumlineError, match="the loss is nan at step 0"):
        trained(stopping, 1)


FACTOR = torch.ones((), device="cuda") if torch.cuda.is_available() else torch.ones(())


def test_gradients_can_be_watched() -> None:
    plain, engine = initialize(job(clip=0.5), "dp=1"), initialize(job(clip=0.5), "dp=1,graph=true")
    seen: dict[str, list[float]] = {"plain": [], "graph": []}
    for name, e in (("plain", plain), ("graph", engine)):
        e.gradients_ready = lambda name=name, e=e: seen[name].append(  # type: ignore[method-assign]
            float(e.whole_gradients()["head.weight"].norm())
        )
        trained(e, 6)
    assert seen["graph"] == pytest.approx(seen["plain"], rel=1e-3)


def test_verify_passes() -> None:
    from drumline.runtime.verification.verify import verify

    result = verify(job(clip=0.5), dl.Plan.parse("dp=1,micro=2,graph=true"), steps=8)
    assert result is not None and result.passed, result


class Reads(Net):
    """Reads a number of the GPU in its forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y * 2 if y.detach().sum().item() > 1e9 else y


class Draws(Net):
    """Drops its output by a number that the host draws."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * float(torch.rand(()))


@pytest.mark.parametrize(
    ("model", "words"), [(Reads, "cannot be captured"), (Draws, "random numbers on the host, from torch's CPU")]
)
def test_step_that_cannot_be_captured_is_refused(model: Callable[[], nn.Module], words: str) -> None:
    engine = initialize(job(model=model), "dp=1,micro=2,graph=true")
    with pytest.raises(PlanError, match=words) as error:
        trained(engine, PLAIN_STEPS + 1)
    assert "the nearest plan that runs: dp=1,micro=2" in str(error.value.fix)
    del engine
    assert math.isfinite(trained(initialize(job(), "dp=1"), 1)["losses"][0])  # nothing is left of the capture


def test_other_shapes_are_refused() -> None:
    engine = initialize(job(), "dp=1,graph=true")
    x, t = torch.randn(8, 3, 8, 8), torch.zeros(8, dtype=torch.long)
    for _ in range(PLAIN_STEPS + 1):
        engine.step((x, t))
    with pytest.raises(JobError, match="step 4 has 6 samples"):
        engine.step((x[:6], t[:6]))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"samples": 20}, "20 samples in batches of 8"),
        ({"optimizer": lambda p: torch.optim.RMSprop(p)}, "with the optimizer RMSprop"),
        ({"optimizer": lambda p: torch.optim.AdamW(p, foreach=True)}, "with the optimizer AdamW"),
    ],
)
def test_jobs_that_cannot_be_captured_are_refused(changed: dict[str, Any], words: str) -> None:
    from dataclasses import replace

    made = job(samples=changed.get("samples", 96))
    made = replace(made, **{k: v for k, v in changed.items() if k != "samples"})
    with pytest.raises(PlanError, match=words):
        initialize(made, "dp=1,graph=true")
