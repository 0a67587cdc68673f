"""Every kind of state of torch's optimizers, schedules and modules is saved and restored exactly."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fakes
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as rates

from drumline.core.errors import InputError
from drumline.runtime.checkpoint import Saver, load, saver_for
from drumline.runtime.checkpoint.codec import decode, encode
from drumline.runtime.checkpoint.folder import complete_checkpoints
from drumline.runtime.training.checkpoint_policy import CheckpointPolicy, TrainingCheckpoints

VALUES = [
    None,
    True,
    3,
    2**70,
    0.1,
    math.inf,
    -math.inf,
    "text",
    [1, (2, [3.5])],
    {"a": (1,)},
    {1: 2, None: 3},
    {"~": "marked"},
    Counter({3: 1}),
    deque([1, 2]),
    (),
    {},
]


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_values(value: Any) -> None:
    decoded = decode(encode(value, "it"), "there")
    assert decoded == value and type(decoded) is type(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex128])
def test_tensors(dtype: torch.dtype) -> None:
    for value in (torch.ones(2, 3).to(dtype), torch.ones(()).to(dtype), torch.ones(0).to(dtype)):
        decoded = decode(encode(value, "it"), "there")
        assert decoded.dtype == dtype and decoded.shape == value.shape and torch.equal(decoded, value)
    assert math.isnan(decode(encode(math.nan, "it"), "there"))


def test_values_that_are_not_data() -> None:
    for value in ({"a": [print]}, object(), {1, 2}, nn.Linear(1, 1)):
        with pytest.raises(InputError, match=r"the state.* is of type .*, which a checkpoint cannot store"):
            encode(value, "the state")
    deep: list[Any] = []
    for _ in range(60):
        deep = [deep]
    with pytest.raises(InputError, match="nested too deeply"):
        encode(deep, "the state")


Maker = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Maker] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.003),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.003, momentum=0.9, nesterov=True),
    "adam with a tensor rate": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "nadam": lambda p: torch.optim.NAdam(p),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "rprop": lambda p: torch.optim.Rprop(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    "asgd": lambda p: torch.optim.ASGD(p),
}
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "milestones": lambda o: rates.MultiStepLR(o, [2, 3], 0.5),
    "one cycle": lambda o: rates.OneCycleLR(o, 0.1, total_steps=20),
    "lambda": lambda o: rates.LambdaLR(o, lambda n: 0.9**n),
    "restarts": lambda o: rates.CosineAnnealingWarmRestarts(o, 3),
    "in turn": lambda o: rates.SequentialLR(o, [rates.LinearLR(o), rates.CosineAnnealingLR(o, 8)], [2]),
}


class Odd(nn.Module):
    """Unusual dtypes, a parameter without elements, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.none = nn.Linear(4, 3), nn.Parameter(torch.zeros(0, 2))
        self.register_buffer("waves", torch.ones(3, dtype=torch.complex128) * 1j)
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.waves *= 1j
        return self.layer(x)

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def make_engine(optimizer: Maker, schedule: Callable[[Any], Any] | None) -> Any:
    torch.manual_seed(0)
    engine = fakes.engine(model=Odd())
    engine.optimizer = optimizer(list(engine.model.parameters()))
    engine.schedule = schedule(engine.optimizer) if schedule else None
    return engine


def train(engine: Any, steps: int) -> None:
    for _ in range(steps):
        engine.optimizer.zero_grad()
        engine.model(torch.randn(5, 4, generator=torch.Generator().manual_seed(engine.steps))).square().sum().backward()
        engine.optimizer.step()
        if engine.schedule:
            engine.schedule.step()
        engine.steps += 1


def restarted(tmp_path: Path, optimizer: Maker, schedule: Callable[[Any], Any] | None = None) -> None:
    straight, first, second = (make_engine(optimizer, schedule) for _ in range(3))
    train(straight, 6)
    train(first, 3)
    with Saver(first, tmp_path) as saver:
        saver.save(wait=False)
    load(second, tmp_path)
    train(second, 3)
    for (name, a), (_, b) in zip(straight.model.state_dict().items(), second.model.state_dict().items(), strict=True):
        assert (a == b) if name == "_extra_state" else torch.equal(a, b), name
    for a, b in zip(straight.model.parameters(), second.model.parameters(), strict=True):
        ours, theirs = straight.optimizer.state[a], second.optimizer.state[b]
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            assert (
                torch.equal(torch.as_tensor(value), torch.as_tensor(theirs[key]))
                if value is not None
                else theirs[key] is None
            )
            assert not isinstance(value, torch.Tensor) or value.shape == theirs[key].shape, key


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(tmp_path: Path, name: str) -> None:
    restarted(tmp_path, OPTIMIZERS[name])


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules(tmp_path: Path, name: str) -> None:
    restarted(tmp_path, OPTIMIZERS["momentum"], SCHEDULES[name])


def saving_engine() -> Any:
    """A fake engine with the methods that save during a run."""
    engine = fakes.engine(saver=None)

    def saver_of(folder: str, *, keep: int) -> Saver:
        engine.saver = saver_for(engine, folder, keep=keep, current=engine.saver)
        return engine.saver

    engine.saver_for = saver_of
    engine.finish_saves = lambda: engine.saver.close()
    return engine


def test_run_continues_after_a_failed_save(tmp_path: Path) -> None:
    """The failure is reported, and the next save is complete."""
    engine = saving_engine()
    reports: list[str] = []
    checkpoints = TrainingCheckpoints(engine, CheckpointPolicy(str(tmp_path), every=1), reports.append)
    checkpoints.begin()
    disk = fakes.Faulty(None, fakes.FULL, only="write")
    engine.saver._disk, good = disk, engine.saver._disk
    disk.at = 0
    fakes.train(engine, 1)
    assert not checkpoints.after_step()
    fakes.train(engine, 1)
    engine.saver._join()
    engine.saver._disk = good
    assert not checkpoints.after_step()
    checkpoints.end()
    assert reports == [
        "step 1 was not saved: No space left on device; trying again",
        f"saved: {tmp_path / 'step-00000002'}",
    ]


def test_run_is_asked_to_stop(tmp_path: Path) -> None:
    engine = saving_engine()
    reports: list[str] = []
    checkpoints = TrainingCheckpoints(engine, CheckpointPolicy(str(tmp_path)), reports.append)
    checkpoints.begin()
    fakes.train(engine, 1)
    assert not checkpoints.after_step()
    (tmp_path / "STOP").touch()
    fakes.train(engine, 1)
    assert checkpoints.after_step() and checkpoints.preempted
    assert checkpoints.end() == str(tmp_path / "step-00000002") and not (tmp_path / "STOP").exists()
    assert reports == ["asked to stop: saving a checkpoint", f"saved: {tmp_path / 'step-00000002'}"]


def test_the_step_before_one_that_failed_is_saved_without_an_interval(tmp_path: Path) -> None:
    engine = saving_engine()
    checkpoints = TrainingCheckpoints(engine, CheckpointPolicy(str(tmp_path), before=2), lambda text: None)
    checkpoints.begin()
    for _ in range(4):
        fakes.train(engine, 1)
        assert not checkpoints.after_step()
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-00000002"]
    checkpoints.end()


def test_good_weights_are_saved_without_an_interval(tmp_path: Path) -> None:
    engine = saving_engine()
    checkpoints = TrainingCheckpoints(engine, CheckpointPolicy(str(tmp_path)), lambda text: None)
    checkpoints.begin()
    fakes.train(engine, 3)
    checkpoints.save_good_weights()
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-00000003"]
