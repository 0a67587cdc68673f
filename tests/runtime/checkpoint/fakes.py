"""A fake engine with one rank, and disks that fail, for the checkpoint tests."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from drumline.plans import Plan
from drumline.runtime.checkpoint.disk import Disk
from drumline.runtime.state.pieces import ParameterSpec, Piece


def stream(samples: int) -> Any:
    """The data of a fake engine."""
    return SimpleNamespace(source=SimpleNamespace(name="shuffled", length=samples))


class Model(nn.Module):
    """Tied weights, a frozen layer, running statistics, a non-persistent buffer, a scalar."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.token, self.norm = nn.Embedding(7, width), nn.BatchNorm1d(width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.token.weight
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("seen", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.head(self.frozen(self.norm(self.token(x))) * self.scale)


def engine(seed: int = 0, *, width: int = 4, model: nn.Module | None = None, **changes: Any) -> Any:
    """A fake engine whose one rank has everything."""
    torch.manual_seed(seed)
    model = model or Model(width)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in trained.values() if p.dim() > 1]},
            {"params": [p for p in trained.values() if p.dim() <= 1], "weight_decay": 0.0},
        ],
        lr=1e-2,
    )
    fields = {
        "model": model,
        "optimizer": optimizer,
        "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
        "pieces": [Piece(n, tuple(p.shape), 0, p, replicated=True) for n, p in trained.items()],
        "frozen": [
            Piece(n, tuple(p.shape), 0, p, replicated=True) for n, p in model.named_parameters() if n not in trained
        ],
        "parameter_specs": {n: ParameterSpec(tuple(p.shape), p.dtype) for n, p in model.named_parameters()},
        "strategy": SimpleNamespace(group=None, values_loaded=lambda: None, saved_tensors=dict, steps_alone=False),
        "average_replicas": lambda: None,
        "group": None,
        "device": torch.device("cpu"),
        "rank": 0,
        "ranks": 1,
        "steps": 0,
        "position": 0,
        "plan": Plan(),
        "stream": stream(40),
        "scaler": None,
        "template": model,
        "owns_buffer": lambda name: True,
        "drain": lambda: None,
        "steps_in_flight": 0,
        "in_flight": None,
        "job": SimpleNamespace(source="job.py:job", digest="d" * 64, seed=seed, batch_size=8),
    }
    return SimpleNamespace(**{**fields, **changes})


def train(engine: Any, steps: int) -> None:
    """Train some steps, whose data is a function of the step."""
    for _ in range(steps):
        x = torch.randint(7, (8,), generator=torch.Generator().manual_seed(engine.steps)).to(engine.device)
        engine.optimizer.zero_grad()
        nn.functional.cross_entropy(engine.model(x), (x + 1) % 7).backward()
        engine.optimizer.step()
        engine.schedule.step()
        engine.steps += 1
        engine.position += 1


def state(engine: Any) -> dict[str, Any]:
    """Everything that must be bitwise equal after a restart."""
    state_now: dict[str, Any] = {f"model/{n}": p.detach().clone() for n, p in engine.model.named_parameters()}
    state_now |= {f"buffer/{n}": b.clone() for n, b in engine.model.named_buffers()}
    for piece in engine.pieces:
        for key, value in engine.optimizer.state.get(piece.value, {}).items():
            state_now[f"{key}/{piece.name}"] = torch.as_tensor(value).clone()
    for i, group in enumerate(engine.optimizer.param_groups):
        state_now[f"group {i}"] = {k: v for k, v in group.items() if k != "params"}
    state_now["schedule"], state_now["steps"] = engine.schedule.state_dict(), engine.steps
    return state_now


def assert_equal(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Bit for bit."""
    assert a.keys() == b.keys()
    for name, value in a.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == b[name].dtype and torch.equal(value, b[name]), name
        else:
            assert value == b[name], name


class Killed(BaseException):
    """Raised where the process would be killed."""


class Faulty(Disk):
    """A disk that counts its operations and, at one of them, kills the process or fails.

    `how`: "before" it, "within" it (half of a write arrives), "after" it, "power" (before it, and half of what was not
    synced is lost); or an errno. Syncs are counted but not done: a killed process loses nothing.
    """

    def __init__(self, at: int | None = None, how: str | int = "before", only: str = "") -> None:
        self.count, self.at, self.how, self.only = 0, at, how, only
        self.dead = False
        self.log: list[str] = []
        self._open: dict[int, Path] = {}
        self._unsynced: set[Path] = set()

    def die(self) -> None:
        """Close all open files, which releases their locks, as the kernel does."""
        self.dead = True
        for handle in self._open:
            os.close(handle)
        self._open.clear()
        for path in self._unsynced if self.how == "power" else ():
            os.truncate(path, path.stat().st_size // 2)
        raise Killed

    def _do(self, name: str, *arguments: Any) -> Any:
        if self.dead:
            raise Killed
        hit = not self.only or name in self.only.split()
        number, self.count = self.count, self.count + hit
        self.log.append(name)
        now = hit and self.at is not None and (number == self.at if isinstance(self.how, str) else number >= self.at)
        if now and isinstance(self.how, int):
            raise OSError(self.how, os.strerror(self.how), str(arguments[0]))
        if now and self.how in ("before", "power"):
            self.die()
        if now and self.how == "within" and name == "write":
            super().write(arguments[0], memoryview(arguments[1])[: len(arguments[1]) // 2])
            self.die()
        result = None if name.startswith("sync") else getattr(super(), name)(*arguments)
        if now:
            self.die()
        return result

    def make_folder(self, path: Path) -> None:
        self._do("make_folder", path)

    def create(self, path: Path) -> int:
        handle = self._open_as(path, self._do("create", path))
        self._unsynced.add(path)
        return handle

    def open_lock(self, path: Path) -> int:
        return self._open_as(path, self._do("open_lock", path))

    def _open_as(self, path: Path, handle: int) -> int:
        self._open[handle] = path
        return handle

    def write(self, handle: int, data: bytes | memoryview) -> None:
        self._do("write", handle, data)

    def sync(self, handle: int) -> None:
        self._do("sync", handle)
        self._unsynced.discard(self._open[handle])

    def close(self, handle: int) -> None:
        if not self.dead:  # the kernel has closed it
            del self._open[handle]
            super().close(handle)

    def sync_folder(self, path: Path) -> None:
        self._do("sync_folder", path)

    def rename(self, old: Path, new: Path) -> None:
        self._do("rename", old, new)
        self._unsynced = {new / p.relative_to(old) if p.is_relative_to(old) else p for p in self._unsynced}

    def remove(self, path: Path) -> None:
        self._do("remove", path)
        self._unsynced.discard(path)

    def remove_folder(self, path: Path) -> None:
        self._do("remove_folder", path)

    def lock(self, handle: int) -> bool | None:
        locked: bool | None = self._do("lock", handle)
        return locked

    def rewrite(self, handle: int, data: bytes) -> None:
        self._do("rewrite", handle, data)


FULL, BROKEN, READ_ONLY, QUOTA = errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT


def missing_in_engine() -> list[str]:
    """Attributes that the fake engine has and a real engine lacks."""
    import drumline as dl

    real = dl.initialize(dl.Job(Model, nn.functional.cross_entropy, torch.optim.AdamW, lambda: [(0, 0)], 1))
    return [name for name in vars(engine()) if not hasattr(real, name)]
