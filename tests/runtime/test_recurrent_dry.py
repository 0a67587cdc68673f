"""Recurrent layers in a dry run for a GPU: stand-ins give what the layers give, and need what the GPU says."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import small_jobs
import torch
from torch import nn

from drumline.comm.environment import disconnect
from drumline.core.errors import JobError
from drumline.runtime.dry_run import dry_run
from drumline.runtime.dry_run.alive import Alive
from drumline.runtime.dry_run.recurrent import KINDS, Gradients, Needs, StandIns
from drumline.runtime.engine import initialize
from drumline.tracing.running import RunningMode

CPU = torch.device("cpu")
LAYERS = {
    "lstm": partial(nn.LSTM, 8, 16, 2, batch_first=True),
    "projected": partial(nn.LSTM, 8, 16, proj_size=4),
    "gru": partial(nn.GRU, 8, 16, bidirectional=True),
    "rnn": partial(nn.RNN, 8, 16, 2, nonlinearity="relu", dropout=0.1),
}


@pytest.fixture(autouse=True)
def _leaves() -> Iterator[None]:
    """One rank alone has a process group too."""
    yield
    disconnect()


class Told:
    """Who answers here: a layer of the CPU gives the shapes; it keeps and takes some bytes more."""

    def __init__(self, layer: nn.RNNBase, given: list[torch.Tensor], more: int) -> None:
        x, *states = (torch.zeros(t.shape) for t in given)
        made = given_by(layer, x, states)
        size = sum(t.nbytes for t in made)
        self.needs = Needs(tuple((tuple(t.shape), t.dtype) for t in made), size + more, size + 3 * more)
        self.gradients: list[Gradients] = []
        self._most = sum(p.nbytes for p in layer.parameters()) + 5 * more

    def backward(self, gradients: Gradients) -> int:
        self.gradients.append(gradients)
        return self._most


def given_by(layer: nn.RNNBase, x: torch.Tensor, states: list[torch.Tensor]) -> list[torch.Tensor]:
    output, last = layer(x, (tuple(states) if layer.mode == "LSTM" else states[0]) if states else None)
    return [output, *(last if isinstance(last, tuple) else (last,))]


def run(
    monkeypatch: pytest.MonkeyPatch, name: str, more: int, *states: torch.Size
) -> tuple[Alive, list[int], Any, Told]:
    """The layer without values: what was alive before, after its forward and after its backward; what it gave."""
    told = Told(LAYERS[name](), [torch.zeros(3, 5, 8), *(torch.zeros(s) for s in states)], more)
    monkeypatch.setattr(StandIns, "ask", lambda self, module, name, given: told)
    alive = Alive("cpu")
    with RunningMode(allow_non_fake_inputs=True), alive:
        layer: nn.RNNBase = LAYERS[name]()
        StandIns(CPU, "fp32", apart=False).place(layer)
        x, *hx = torch.empty(3, 5, 8), *(torch.empty(s, requires_grad=True) for s in states)
        alive.include([*layer.parameters(), x, *hx])
        alive.start()
        before = alive.now
        made = given_by(layer, x, hx)
        after = alive.now - before
        shapes = [tuple(t.shape) for t in made]
        assert alive.most - before == told.needs.most
        total = made[0].sum() if not hx else made[1].sum() + made[2].sum()
        del made
        total.backward()
        assert all(p.grad is not None and p.grad.shape == p.shape for p in layer.parameters())
        assert all(h.grad is not None for h in hx)
        return alive, [before, after, alive.now], shapes, told


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("name", LAYERS)
def test_stand_ins_give_and_need_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    more = 1 << 20
    alive, (before, after, end), shapes, _ = run(monkeypatch, name, more)
    real: nn.RNNBase = LAYERS[name]()
    made = given_by(real, torch.zeros(3, 5, 8), [])
    assert shapes == [tuple(t.shape) for t in made]
    assert after == sum(t.nbytes for t in made) + more
    # in the backward: what was kept, what the layer takes, and the few bytes of the loss and its gradient
    assert alive.most - before == pytest.approx(after + 5 * more + sum(p.nbytes for p in real.parameters()), abs=4096)
    assert end - before == pytest.approx(sum(p.nbytes for p in real.parameters()), abs=64), (
        "what was kept is given back"
    )


def test_a_state_that_is_given_gets_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a decoder: only the last states are used, and the first ones come from somewhere."""
    state = torch.Size((2, 3, 16))
    *_, told = run(monkeypatch, "lstm", 4096, state, state)
    assert told.gradients == [Gradients(output=False, states=True, contiguous=True)]


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_every_kind_of_layer_can_be_asked(name: str, apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, with an allocator that counts its readings: all backwards are asked before one runs."""
    readings = itertools.count(1)
    for reading in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, reading, lambda device: next(readings))
    for nothing in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, nothing, lambda device: None)
    layer: nn.RNNBase = LAYERS[name]()
    x = torch.zeros(3, 5, 8, requires_grad=True)
    states = [torch.zeros_like(t, requires_grad=True) for t in given_by(layer, x, [])[1:]]
    for given in ([x], [x, *states]):
        asked = StandIns(CPU, "fp32", apart=apart).ask(layer, name, given)
        assert [shape for shape, _ in asked.needs.outputs] == [tuple(t.shape) for t in given_by(layer, x, [])]
        assert (asked.needs.kept, asked.needs.most) == (1, 2)
        assert all(asked.backward(kind) == 1 for kind in KINDS)
    frozen = StandIns(CPU, "fp32", apart=apart).ask(layer.eval(), name, [x])
    with pytest.raises(JobError, match="in evaluation"):
        frozen.backward(KINDS[0])


def test_what_cannot_be_asked_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.LSTM(8, 16)
    StandIns(torch.device("meta"), "fp32", apart=False).place(layer)
    with pytest.raises(JobError, match="could not be asked for its memory"):
        layer(torch.zeros(3, 5, 8))
    packed = nn.utils.rnn.pack_padded_sequence(torch.zeros(3, 5, 8), torch.tensor([3, 2, 2, 1, 1]))
    with pytest.raises(JobError, match="packed sequence"):
        layer(packed)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: only it knows what its layers take")
@pytest.mark.parametrize("plan", ["", "precision=bf16", "zero=3", "micro=2"])
def test_the_peak_on_a_gpu(plan: str) -> None:
    layer = partial(nn.LSTM, 64, 256, 2, batch_first=True, bidirectional=True)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = layer(), nn.Linear(512, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            _, (h, _) = self.lstm(x)
            return self.head(torch.cat([h[-2], h[-1]], -1))

    data = [(torch.randn(64, 64), i % 4) for i in range(256)]
    job = small_jobs.make("mlp", model=Model, data=lambda: data, batch_size=256, loss=nn.functional.cross_entropy)
    said = dry_run(job, plan)
    engine = initialize(job, plan)
    (batch,) = engine.data(1)
    engine.step(batch)
    torch.cuda.synchronize()
    start, kept = torch.cuda.memory_allocated(), said.ranks[0]
    torch.cuda.reset_peak_memory_stats()
    engine.step(batch)
    torch.cuda.synchronize()
    grown = torch.cuda.max_memory_allocated() - start
    assert kept.peak - kept.parameters - kept.buffers - kept.optimizer == pytest.approx(grown, rel=0.05)
