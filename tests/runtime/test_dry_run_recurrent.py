"""Recurrent layers in a dry run for a GPU: stand-ins have the outputs and the memory of the real layers."""

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
from drumline.runtime.dry_run.live_memory import LiveMemory
from drumline.runtime.dry_run.recurrent_layers import LAYOUTS, GradientLayout, LayerMemory, RecurrentStandIns
from drumline.runtime.engine import initialize
from drumline.torchkit.fake_tensors import DryRunMode

CPU = torch.device("cpu")
LAYERS = {
    "lstm": partial(nn.LSTM, 8, 16, 2, batch_first=True),
    "projected": partial(nn.LSTM, 8, 16, proj_size=4),
    "gru": partial(nn.GRU, 8, 16, bidirectional=True),
    "rnn": partial(nn.RNN, 8, 16, 2, nonlinearity="relu", dropout=0.1),
}


@pytest.fixture(autouse=True)
def _disconnect() -> Iterator[None]:
    """A single rank has a process group too."""
    yield
    disconnect()


class FakeLayer:
    """A measured layer for the CPU: real output shapes, with `more` extra bytes kept and allocated."""

    def __init__(self, layer: nn.RNNBase, given: list[torch.Tensor], more: int) -> None:
        x, *states = (torch.zeros(t.shape) for t in given)
        made = outputs_of(layer, x, states)
        size = sum(t.nbytes for t in made)
        self.memory = LayerMemory(tuple((tuple(t.shape), t.dtype) for t in made), size + more, size + 3 * more)
        self.gradients: list[GradientLayout] = []
        self._peak = sum(p.nbytes for p in layer.parameters()) + 5 * more

    def backward(self, gradients: GradientLayout) -> int:
        self.gradients.append(gradients)
        return self._peak


def outputs_of(layer: nn.RNNBase, x: torch.Tensor, states: list[torch.Tensor]) -> list[torch.Tensor]:
    output, last = layer(x, (tuple(states) if layer.mode == "LSTM" else states[0]) if states else None)
    return [output, *(last if isinstance(last, tuple) else (last,))]


def run(
    monkeypatch: pytest.MonkeyPatch, name: str, more: int, *states: torch.Size
) -> tuple[LiveMemory, list[int], Any, FakeLayer]:
    """The layer without values: what was memory before, after its forward and after its backward; what it gave."""
    fake = FakeLayer(LAYERS[name](), [torch.zeros(3, 5, 8), *(torch.zeros(s) for s in states)], more)
    monkeypatch.setattr(RecurrentStandIns, "measure", lambda self, module, name, given: fake)
    memory = LiveMemory("cpu")
    with DryRunMode(allow_non_fake_inputs=True), memory:
        layer: nn.RNNBase = LAYERS[name]()
        RecurrentStandIns(CPU, "fp32", separate_weights=False).install(layer)
        x, *hx = torch.empty(3, 5, 8), *(torch.empty(s, requires_grad=True) for s in states)
        memory.include([*layer.parameters(), x, *hx])
        memory.start()
        before = memory.current
        made = outputs_of(layer, x, hx)
        after = memory.current - before
        shapes = [tuple(t.shape) for t in made]
        assert memory.peak - before == fake.memory.peak
        total = made[0].sum() if not hx else made[1].sum() + made[2].sum()
        del made
        total.backward()
        assert all(p.grad is not None and p.grad.shape == p.shape for p in layer.parameters())
        assert all(h.grad is not None for h in hx)
        return memory, [before, after, memory.current], shapes, fake


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("name", LAYERS)
def test_stand_ins_have_the_same_outputs_and_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    more = 1 << 20
    memory, (before, after, end), shapes, _ = run(monkeypatch, name, more)
    real: nn.RNNBase = LAYERS[name]()
    made = outputs_of(real, torch.zeros(3, 5, 8), [])
    assert shapes == [tuple(t.shape) for t in made]
    assert after == sum(t.nbytes for t in made) + more
    # in the backward: what was kept, the workspace, and the few bytes of the loss and its gradient
    assert memory.peak - before == pytest.approx(after + 5 * more + sum(p.nbytes for p in real.parameters()), abs=4096)
    assert end - before == pytest.approx(sum(p.nbytes for p in real.parameters()), abs=64), "what was kept is freed"


def test_given_state_gets_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a decoder: only the last states are used, and the first ones are given."""
    state = torch.Size((2, 3, 16))
    *_, fake = run(monkeypatch, "lstm", 4096, state, state)
    assert fake.gradients == [GradientLayout(output=False, states=True, contiguous=True)]


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_type_can_be_measured(name: str, separate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, with an allocator that counts its readings: all backwards are measured before one runs."""
    readings = itertools.count(1)
    for reading in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, reading, lambda device: next(readings))
    for nothing in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, nothing, lambda device: None)
    layer: nn.RNNBase = LAYERS[name]()
    x = torch.zeros(3, 5, 8, requires_grad=True)
    states = [torch.zeros_like(t, requires_grad=True) for t in outputs_of(layer, x, [])[1:]]
    for given in ([x], [x, *states]):
        measured = RecurrentStandIns(CPU, "fp32", separate_weights=separate).measure(layer, name, given)
        assert [shape for shape, _ in measured.memory.outputs] == [tuple(t.shape) for t in outputs_of(layer, x, [])]
        assert (measured.memory.kept, measured.memory.peak) == (1, 2)
        assert all(measured.backward(layout) == 1 for layout in LAYOUTS)
    frozen = RecurrentStandIns(CPU, "fp32", separate_weights=separate).measure(layer.eval(), name, [x])
    with pytest.raises(JobError, match="in evaluation mode"):
        frozen.backward(LAYOUTS[0])


def test_layers_that_cannot_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.LSTM(8, 16)
    RecurrentStandIns(torch.device("meta"), "fp32", separate_weights=False).install(layer)
    with pytest.raises(JobError, match="could not be measured"):
        layer(torch.zeros(3, 5, 8))
    packed = nn.utils.rnn.pack_padded_sequence(torch.zeros(3, 5, 8), torch.tensor([3, 2, 2, 1, 1]))
    with pytest.raises(JobError, match="packed sequence"):
        layer(packed)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU to measure its layers")
@pytest.mark.parametrize("plan", ["", "precision=bf16", "zero=3", "micro=2"])
def test_peak_on_a_gpu(plan: str) -> None:
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
    predicted = dry_run(job, plan)
    engine = initialize(job, plan)
    (batch,) = engine.data(1)
    engine.step(batch)
    torch.cuda.synchronize()
    start, rank = torch.cuda.memory_allocated(), predicted.ranks[0]
    torch.cuda.reset_peak_memory_stats()
    engine.step(batch)
    torch.cuda.synchronize()
    grown = torch.cuda.max_memory_allocated() - start
    assert rank.peak - rank.parameters - rank.buffers - rank.optimizer == pytest.approx(grown, rel=0.05)
