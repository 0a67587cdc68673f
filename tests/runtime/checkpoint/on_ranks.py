"""What ranks do in the tests of checkpoints; functions travel by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import small_jobs
import torch
from torch import nn

import drumline as dl
from drumline.core.errors import DrumlineError, GaveUp
from drumline.runtime.checkpoint import Saver
from drumline.runtime.checkpoint.disk import Disk
from drumline.runtime.strategies.pieces import assemble


class Pictures(nn.Module):
    """Convolutions with running statistics, and a buffer that no operator reads."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv, self.head = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4, 3)
        self.register_buffer("unread", torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.conv(self.norm(self.stem(x)).relu()).mean((2, 3)))


class Counter(nn.Linear):
    """Keeps a state beside its tensors."""

    def get_extra_state(self) -> int:
        return 3

    def set_extra_state(self, state: Any) -> None:
        assert state == 3


class Counted(nn.Module):
    """A module with such a state."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.counter = nn.Linear(6, 8), Counter(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.counter(self.up(x).tanh())


def engine_of(name: str, plan: str, **changes: Any) -> dl.Engine:
    """An engine on this rank."""
    if name == "pictures":
        name, changes = "cnn", {"model": Pictures, **changes}
    return dl.initialize(small_jobs.make(name, **changes), plan)


def train(engine: dl.Engine, steps: int) -> list[float]:
    """The losses of some steps."""
    return [engine.step(batch) for batch in engine.data(steps)]


def state(engine: dl.Engine) -> dict[str, Any]:
    """The whole state, the same on every rank whatever the plan."""
    found: dict[str, Any] = {f"model/{n}": t.cpu() for n, t in engine.whole_parameters().items()}
    found |= {f"buffer/{n}": b.cpu().clone() for n, b in engine.model.named_buffers()}
    keys = sorted({k for p in engine.pieces for k in engine.optimizer.state.get(p.value, {})} | {"exp_avg"})
    for key in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
        held = [
            (p, engine.optimizer.state[p.value][key])
            for p in engine.pieces
            if key in engine.optimizer.state.get(p.value, {})
        ]
        whole = assemble(engine.kinds, held, engine.strategy.group, engine.device)
        found |= {f"{key}/{n}": t.cpu() for n, t in whole.items()}
    found["rates"] = [
        {k: v for k, v in g.items() if k not in ("params", "param_names")} for g in engine.optimizer.param_groups
    ]
    found["schedule"] = engine.schedule.state_dict() if engine.schedule else None
    found["scaler"] = engine.scaler.state_dict() if engine.scaler else None
    found["steps"] = engine.steps, engine.position
    found["counts"] = sorted(
        {float(s["step"]) for p in engine.pieces if "step" in (s := engine.optimizer.state.get(p.value, {}))}
    )
    assert keys
    return found


def save(name: str, plan: str, folder: str, steps: int, wait: bool = True) -> dict[str, Any]:
    """Train, save, and tell the state that was saved."""
    engine = engine_of(name, plan)
    train(engine, steps)
    engine.save(folder, wait=wait)
    found = state(engine)
    engine.finish_saves()
    return found


def loaded(name: str, plan: str, folder: str, steps: int = 0) -> dict[str, Any]:
    """The state after a load, and after some more steps."""
    engine = engine_of(name, plan)
    train(engine, 1)  # so that there is something to be overwritten
    engine.load(folder)
    train(engine, steps)
    return state(engine)


def passed_on(name: str, plan: str, source: str, target: str) -> dict[str, Any]:
    """Load from one folder, save to another: the state between."""
    engine = engine_of(name, plan)
    train(engine, 1)
    engine.load(source)
    engine.save(target)
    engine.finish_saves()
    return state(engine)


def refused_to_save(plan: str, folder: str) -> str:
    """What a save of a model with a state beside its tensors is refused with."""
    try:
        engine_of("mlp", plan, model=Counted).save(folder)
    except DrumlineError as e:
        return f"{type(e).__name__}: {e}"
    return ""


def straight(name: str, plan: str, steps: int) -> dict[str, Any]:
    """The state after steps without a break."""
    engine = engine_of(name, plan)
    train(engine, steps)
    return state(engine)


def files(name: str, plan: str, folder: str) -> dict[str, int]:
    """Bytes that each rank wrote."""
    engine = engine_of(name, plan)
    train(engine, 1)
    path = engine.save(folder)
    engine.finish_saves()
    assert path is not None
    return {p.name: p.stat().st_size for p in Path(path).iterdir()}


class _Full(Disk):
    def create(self, path: Path) -> int:
        if path.name.endswith("rank-00001.safetensors"):
            raise OSError(28, "No space left on device", str(path))
        return super().create(path)


def one_rank_fails(folder: str) -> list[str]:
    """The second rank's disk is full in the second save; every rank hears of it, and the third save is well."""
    engine = engine_of("mlp", "dp=2")
    told = []
    saver = Saver(engine, folder)
    saver.save()
    good = saver._disk
    train(engine, 1)
    for wait in (True, False):
        saver._disk = _Full()
        try:
            saver.save(wait=wait)
            saver.finish()
        except GaveUp as e:
            told.append(e.what)
    saver._disk = good
    path = saver.save(wait=False) or saver.finish()
    saver.close()
    return [*told, str(path)]


def refused(name: str, plan: str, folder: str) -> str:
    """What a load is refused with."""
    try:
        engine_of(name, plan).load(folder)
    except DrumlineError as e:
        return f"{type(e).__name__}: {e}"
    return ""


def weights(name: str, plan: str, path: str, strict: bool = True) -> dict[str, torch.Tensor]:
    """The parameters after weights were loaded, and the model ran a step with them."""
    engine = engine_of(name, plan, seed=11)
    engine.load_weights(path, strict=strict)
    found = {n: t.cpu().clone() for n, t in engine.whole_parameters().items()}
    return (
        found | {n: b.cpu().clone() for n, b in engine.model.named_buffers()} | {"loss": torch.tensor(train(engine, 1))}
    )


def ledger(plan: str, folder: str, steps: int) -> list[int]:
    """Go on from what is there, train, save: the samples that this rank has seen."""
    engine = engine_of("mlp", plan)
    if any(Path(folder).glob("step-*")):
        engine.load(folder)
    seen: list[int] = []
    load_sample = engine.stream._sample
    engine.stream._sample = lambda i: (seen.append(i), load_sample(i))[1]  # type: ignore[method-assign]
    train(engine, steps)
    engine.save(folder)
    engine.finish_saves()
    return seen
