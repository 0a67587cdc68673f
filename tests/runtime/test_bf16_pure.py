"""precision=bf16-pure: weights, gradients and optimizer states in bf16, whose updates are rounded stochastically."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import parity
import pytest
import small_jobs
import torch
import torch.nn.functional as F
from torch import nn
from world import World

import drumline as dl
from drumline.comm.environment import disconnect
from drumline.core.errors import PlanError
from drumline.plans import Plan, check
from drumline.runtime.engine import Engine, initialize
from drumline.runtime.numerics.stochastic_rounding import StochasticRounding, round_with
from drumline.tracing import trace

Worlds = Callable[[int], World]
NOTHING, MOST = 0, 2**16 - 1


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """An engine in this process makes a process group of one rank. Threads would only wait for each other here."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    disconnect()


def rounded(values: torch.Tensor, noise: int) -> torch.Tensor:
    return round_with(values.clone(), torch.full_like(values, noise, dtype=torch.int32))


def test_values_of_bf16_stay_and_others_go_to_a_neighbour() -> None:
    own = torch.tensor([0.0, -0.0, 1.0, -3.5, 2.0**-133, torch.inf, -torch.inf])
    between = torch.tensor([1 + 2.0**-9, -1 - 2.0**-9])
    for noise in (NOTHING, MOST):
        assert torch.equal(rounded(own, noise).float(), own)
    assert rounded(between, NOTHING).tolist() == [1.0, -1.0]
    assert rounded(between, MOST).tolist() == [1 + 2.0**-7, -1 - 2.0**-7]


def test_no_nan_becomes_a_number() -> None:
    """The NaN of GPUs has all its bits set: a sum with the noise would be -0."""
    every = torch.tensor([0x7FC00000, 0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    assert rounded(every, MOST).isnan().all()


def test_rounding_is_right_on_average() -> None:
    value = 1 + 2.0**-7 / 5
    noise = torch.empty(200_000, dtype=torch.int32).random_(0, 2**16, generator=torch.Generator().manual_seed(0))
    mean = float(round_with(torch.full((200_000,), value), noise).double().mean())
    assert abs(mean - value) < 2.0**-7 / 100


class Counting(torch.optim.SGD):
    """SGD that counts its steps in the group, as some optimizers do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)


@pytest.mark.parametrize("at_once", [1, 10, 10**6])
def test_steps_do_not_depend_on_how_many_parameters_are_updated_at_once(
    monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr("drumline.runtime.numerics.stochastic_rounding.ROUNDED_AT_ONCE", at_once)
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(n, generator=generator).bfloat16()) for n in (3, 5, 7)]
    parameters.insert(1, nn.Parameter(torch.ones(2)))
    optimizer = Counting([{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.1}], lr=0.3, momentum=0.9)
    rounding = StochasticRounding(optimizer, {p: str(i) for i, p in enumerate(parameters)}, seed=7)
    for step in range(3):
        for p in parameters:
            p.grad = torch.full_like(p, 1e-3)
        rounding.step(step)
    assert [g["count"] for g in optimizer.param_groups] == [3, 3]
    assert [g["params"] for g in optimizer.param_groups] == [parameters[:2], parameters[2:]]
    assert set(optimizer.state) == set(parameters)
    types = [optimizer.state[p]["momentum_buffer"].dtype for p in parameters]
    assert types == [torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16]
    numbers = torch.cat([p.detach().float() for p in parameters])
    expected = _UPDATED.setdefault("all", numbers)
    assert torch.equal(numbers, expected)


_UPDATED: dict[str, torch.Tensor] = {}


# -- training


class Text(torch.utils.data.Dataset[Any]):
    """Sequences in which each token follows from the one before it."""

    def __init__(self) -> None:
        columns = [torch.randint(0, 31, (64, 1), generator=torch.Generator().manual_seed(0))]
        for _ in range(12):
            columns.append((columns[-1] * 3 + 1) % 31)
        self.tokens = torch.cat(columns, 1)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.tokens[i, :-1], self.tokens[i, 1:]


def text_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def text_job() -> dl.Job:
    return dl.Job(
        model=lambda: small_jobs.GPT(32, 31, 12),
        loss=text_loss,
        optimizer=lambda p: torch.optim.AdamW(p, lr=3e-4, weight_decay=0.0),
        data=Text,
        batch_size=32,
        seed=1,
    )


def trained(plan: str, steps: int = 150, *, careless: bool = False) -> float:
    """The mean loss of the last ten steps; `careless`: every update is rounded to the nearest number."""
    engine = initialize(text_job(), plan)
    if careless:
        engine.update._rounding = None
    losses = [engine.step(batch) for batch in engine.data(steps)]
    return sum(losses[-10:]) / 10


def test_reaches_the_loss_of_full_weights_and_careless_bf16_does_not() -> None:
    master, pure = trained("dp=1,precision=bf16"), trained("dp=1,precision=bf16-pure")
    careless = trained("dp=1,precision=bf16-pure", careless=True)
    assert abs(pure - master) <= 0.05 * master
    assert careless > 1.2 * master


def test_everything_stored_is_bf16() -> None:
    engine = initialize(small_jobs.make("cnn"), "dp=1,precision=bf16-pure")
    engine.step(next(iter(engine.data(1))))
    assert {p.dtype for p in engine.model.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in engine.model.buffers()} == {torch.float32, torch.int64}
    states = [t for s in engine.optimizer.state.values() for k, t in s.items() if k != "step"]
    assert states
    assert {t.dtype for t in states} == {torch.bfloat16}


def test_a_resumed_run_repeats_the_random_numbers(tmp_path: Path) -> None:
    job = text_job()
    first = initialize(job, "dp=1,precision=bf16-pure")
    batches = list(first.data(4))
    for batch in batches[:2]:
        first.step(batch)
    first.save(tmp_path)
    second = initialize(job, "dp=1,precision=bf16-pure")
    second.load(tmp_path)
    for batch in batches[2:]:
        first.step(batch)
        second.step(batch)
    mine, theirs = first.whole_parameters(), second.whole_parameters()
    assert all(torch.equal(p, theirs[name]) for name, p in mine.items())


# -- ranks


def elements(engine: Engine) -> dict[str, list[float]]:
    """Collect this rank's part of every parameter, by the positions of its elements."""
    from drumline.runtime.core.update import _place

    return {_place(p): p.value.detach().float().flatten().tolist() for p in engine.pieces}


def train_on_ranks(name: str, plan: str) -> tuple[dict[str, list[float]], list[str]]:
    """The elements of this rank after three steps, and the types of its gradients."""
    with parity.shard_small_layers(plan):
        engine = initialize(small_jobs.make(name), plan)
        types: set[str] = set()

        def ready() -> None:
            types.update(str(g.dtype) for _, g in engine.update.gradients())

        engine.gradients_ready = ready  # type: ignore[method-assign]  # this is what it is for
        for batch in engine.data(3):
            engine.step(batch)
        return elements(engine), sorted(types)


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=2", "dp=2,zero=3,micro=2", "tp=2", "pp=2,micro=2"])
def test_ranks_that_store_the_same_elements_stay_equal(world: Worlds, plan: str) -> None:
    (first, types), (second, _) = world(2).run(train_on_ranks, "gpt", f"{plan},precision=bf16-pure")
    assert types == ["torch.bfloat16"]
    shared = first.keys() & second.keys()
    assert bool(shared) == ("zero" not in plan)
    assert all(first[place] == second[place] for place in shared)


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("gpt", "dp=2"),
        ("cnn", "dp=2,zero=1,micro=3"),
        ("gpt", "dp=2,zero=2"),
        ("cnn", "dp=2,zero=3,recompute=full"),
        ("gpt", "tp=2"),
        ("gpt", "pp=2,micro=2,schedule=zero-bubble"),
        ("cnn", "pp=2,micro=2"),
    ],
)
def test_parity(world: Worlds, name: str, plan: str) -> None:
    result = world(2).run(parity.run_verify, name, f"{plan},precision=bf16-pure", 3)[0]
    parity.check(result)
    assert any("bf16-pure is approximate: loss error" in note for note in result.notes)


# -- refusals


@pytest.mark.parametrize(
    "more",
    [
        "chunk=2",
        "compile=true",
        "graph=true",
        "offload=optimizer",
        "compress=fp16",
        "sync=local:2",
        "backend=threads",
        "backend=mpi",
        "recompute=selective",
        "ep=2",
        "cp=2",
        "pp=2,schedule=pipedream",
        "static=true",
        "allreduce=ring",
    ],
)
@pytest.mark.parametrize("precision", ["bf16-pure", "fp8"])
def test_other_keys_are_refused_by_name(more: str, precision: str) -> None:
    with pytest.raises(PlanError, match="the engine does not run") as caught:
        check(Plan.parse(f"dp=2,precision={precision},{more}"))
    if "precision=" in caught.value.what:
        assert more.rpartition(",")[2] in caught.value.rule
        check(Plan.parse(caught.value.fix.removeprefix("the nearest plan that runs: ")))


def test_optimizers_that_look_at_more_than_an_element_are_refused() -> None:
    job = small_jobs.make("mlp", optimizer=lambda p: torch.optim.Muon([x for x in p if x.dim() == 2], lr=0.1))
    with pytest.raises(PlanError, match="Muon"):
        initialize(job, "dp=1,precision=bf16-pure")


def test_a_trace_counts_what_is_stored() -> None:
    profile = trace(small_jobs.make("gpt"), precision="bf16-pure", device="cuda")
    assert (profile.parameter_bytes, profile.state_per_parameter, profile.precision) == (2, 4.0, "bf16-pure")
