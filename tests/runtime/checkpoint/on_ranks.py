"""Functions that the checkpoint tests run on ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import small_jobs
import torch
from torch import nn

import drumline as dl
from drumline.core.errors import DrumlineError, GaveUp
from drumline.runtime.checkpoint import Saver
from drumline.runtime.checkpoint.disk import Disk
from drumline.runtime.state.pieces import assemble


class ImageModel(nn.Module):
    """Convolutions with running statistics, and an unused buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv, self.head = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4, 3)
        self.register_buffer("unread", torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.conv(self.norm(self.stem(x)).relu()).mean((2, 3)))


class WithExtraState(nn.Linear):
    """A layer with extra state."""

    def get_extra_state(self) -> int:
        return 3

    def set_extra_state(self, state: Any) -> None:
        assert state == 3


class ExtraStateModel(nn.Module):
    """A model with extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.counter = nn.Linear(6, 8), WithExtraState(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.counter(self.up(x).tanh())


def engine_of(name: str, plan: str, **changes: Any) -> dl.Engine:
    """An engine on this rank."""
    if name == "images":
        name, changes = "cnn", {"model": ImageModel, **changes}
    return dl.initialize(small_jobs.make(name, **changes), plan)


def train(engine: dl.Engine, steps: int) -> list[float]:
    """The losses of some steps."""
    return [engine.step(batch) for batch in engine.data(steps)]


def state(engine: dl.Engine) -> dict[str, Any]:
    """The whole state, the same on every rank under any plan."""
    result: dict[str, Any] = {f"model/{n}": t.cpu() for n, t in engine.whole_parameters().items()}
    result |= {f"buffer/{n}": b.cpu().clone() for n, b in engine.model.named_buffers()}
    keys = sorted({k for p in engine.pieces for k in engine.optimizer.state.get(p.value, {})} | {"exp_avg"})
    for key in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
        pairs = [
            (p, engine.optimizer.state[p.value][key])
            for p in engine.pieces
            if key in engine.optimizer.state.get(p.value, {})
        ]
        whole = assemble(engine.parameter_specs, pairs, engine.strategy.group, engine.device)
        result |= {f"{key}/{n}": t.cpu() for n, t in whole.items()}
    result["rates"] = [
        {k: v for k, v in g.items() if k not in ("params", "param_names")} for g in engine.optimizer.param_groups
    ]
    result["schedule"] = engine.schedule.state_dict() if engine.schedule else None
    result["scaler"] = engine.scaler.state_dict() if engine.scaler else None
    result["steps"] = engine.steps, engine.position
    result["counts"] = sorted(
        {float(s["step"]) for p in engine.pieces if "step" in (s := engine.optimizer.state.get(p.value, {}))}
    )
    assert keys
    return result


def save(name: str, plan: str, folder: str, steps: int, wait: bool = True) -> dict[str, Any]:
    """Train and save; returns the saved state."""
    engine = engine_of(name, plan)
    train(engine, steps)
    engine.save(folder, wait=wait)
    result = state(engine)
    engine.finish_saves()
    return result


def loaded(name: str, plan: str, folder: str, steps: int = 0) -> dict[str, Any]:
    """The state after loading and some more steps."""
    engine = engine_of(name, plan)
    train(engine, 1)  # so that there is state to overwrite
    engine.load(folder)
    train(engine, steps)
    return state(engine)


def passed_on(name: str, plan: str, source: str, target: str) -> dict[str, Any]:
    """Load from one folder and save to another; returns the state."""
    engine = engine_of(name, plan)
    train(engine, 1)
    engine.load(source)
    engine.save(target)
    engine.finish_saves()
    return state(engine)


def refused_to_save(plan: str, folder: str) -> str:
    """The error of saving a model with extra state."""
    try:
        engine_of("mlp", plan, model=ExtraStateModel).save(folder)
    except DrumlineError as e:
        return f"{type(e).__name__}: {e}"
    return ""


def straight(name: str, plan: str, steps: int) -> dict[str, Any]:
    """The state after an uninterrupted run."""
    engine = engine_of(name, plan)
    train(engine, steps)
    return state(engine)


def files(name: str, plan: str, folder: str) -> dict[str, int]:
    """Sizes of the files of a checkpoint."""
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
    """The second rank's disk is full in the second save: every rank gets the error, and a later save succeeds."""
    engine = engine_of("mlp", "dp=2")
    errors = []
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
            errors.append(e.what)
    saver._disk = good
    path = saver.save(wait=False) or saver.finish()
    saver.close()
    return [*errors, str(path)]


def refused(name: str, plan: str, folder: str) -> str:
    """The error of a load."""
    try:
        engine_of(name, plan).load(folder)
    except DrumlineError as e:
        return f"{type(e).__name__}: {e}"
    return ""


def weights(name: str, plan: str, path: str, strict: bool = True) -> dict[str, torch.Tensor]:
    """The parameters after loading weights, and the loss of a step with them."""
    engine = engine_of(name, plan, seed=11)
    engine.load_weights(path, strict=strict)
    result = {n: t.cpu().clone() for n, t in engine.whole_parameters().items()}
    return (
        result
        | {n: b.cpu().clone() for n, b in engine.model.named_buffers()}
        | {"loss": torch.tensor(train(engine, 1))}
    )


def losses(plan: str, steps: int) -> list[float]:
    """The losses of the first steps."""
    return train(engine_of("mlp", plan), steps)


def packed_ledger(plan: str, folder: str, pack: str, steps: int) -> tuple[list[int], list[float]]:
    """Like `ledger`, from packed data; also the losses."""
    engine = engine_of("mlp", plan, data=partial(dl.PackedDataset, pack))
    if any(Path(folder).glob("step-*")):
        engine.load(folder)
    seen: list[int] = []
    load = engine.stream.dataset.collated
    engine.stream.dataset.collated = lambda chosen: (seen.extend(chosen), load(chosen))[1]
    losses = train(engine, steps)
    engine.save(folder)
    engine.finish_saves()
    return seen, losses


def ledger(plan: str, folder: str, steps: int) -> list[int]:
    """Resume, train and save; returns the samples that this rank used."""
    engine = engine_of("mlp", plan)
    if any(Path(folder).glob("step-*")):
        engine.load(folder)
    seen: list[int] = []
    load_sample = engine.stream.source.sample
    engine.stream.source.sample = lambda i: (seen.append(i), load_sample(i))[1]  # type: ignore[method-assign]
    train(engine, steps)
    engine.save(folder)
    engine.finish_saves()
    return seen
