"""Messages and memory of the ranks of a split model, for tests that compare them with predictions."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import small_jobs
import torch
from test_memory_shares import live
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import drumline as dl
from drumline.runtime.engine import initialize


class Words(torch.utils.data.Dataset[Any]):
    """Random sequences."""

    def __init__(self, words: int, length: int) -> None:
        self.tokens = torch.randint(words, (64, length + 1), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> Any:
        return self.tokens[i, :-1], self.tokens[i, 1:]


class Deep(small_jobs.GPT):
    """Four blocks."""

    def __init__(self, width: int, words: int, length: int) -> None:
        super().__init__(width, words, length)
        self.blocks = nn.ModuleList(small_jobs.Attention(width) for _ in range(4))


def job(kind: str, width: int, words: int, length: int, batch: int) -> dl.Job:
    """A GPT of these sizes."""
    model = {"gpt": small_jobs.GPT, "deep": Deep}[kind]
    return small_jobs.make(
        "gpt",
        model=lambda: model(width, words, length),
        data=lambda: Words(words, length),
        clip=None,
        schedule=None,
        batch_size=batch,
    )


def of_name(name: str) -> dl.Job:
    """One of the small jobs, without messages of its own."""
    return small_jobs.make(name, clip=None, schedule=None, batch_size=6)


def sends(plan: str, *sizes: Any) -> tuple[dict[tuple[str, float], int], int]:
    """The messages of one step by name and bytes, with counts; and the elements on this rank."""
    engine = initialize(job(*sizes) if len(sizes) > 1 else of_name(*sizes), plan)
    seen: Counter[tuple[str, float]] = Counter()
    for batch in engine.data(1):
        engine.step(batch)
    for span in engine.record.spans():
        if span.bytes:
            seen[span.name, span.bytes] += 1
    return dict(seen), sum(p.numel() for p in engine.model.parameters())


class LiveMemory(TorchDispatchMode):
    """Peak bytes of all storages that operators have created since it began."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._watch: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in _tensors(args)}
        out = func(*args, **(kwargs or {}))
        for t in _tensors(out):
            storage = t.untyped_storage()
            key = storage._cdata
            if key not in given and key not in self._watch:
                size = storage.nbytes()
                self.now += size
                self._watch[key] = weakref.ref(storage, lambda _, key=key, size=size: self._died(key, size))
        self.most = max(self.most, self.now)
        return out

    def _died(self, key: int, size: int) -> None:
        self._watch.pop(key, None)
        self.now -= size


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value for t in _tensors(v)] if isinstance(value, list | tuple) else []


def holds(plan: str, *sizes: Any) -> dict[str, float]:
    """Bytes of this rank in its third step: states when the gradients are ready, and the peak that the step adds."""
    given = job(*sizes)
    data = given.data()
    before = live()
    engine = initialize(dl.Job(**{**_fields(given), "data": lambda: data}), plan)
    seen: dict[str, dict[int, int]] = {}
    engine.gradients_ready = lambda: seen.update(ready=live())  # type: ignore[method-assign]  # this is what it is for
    alive = LiveMemory()
    for step, batch in enumerate(engine.data(3)):
        if step < 2:
            engine.step(batch)
        else:
            with alive:
                engine.step(batch)
    ready = {k: n for k, n in seen["ready"].items() if k not in before}
    return {"states": float(sum(ready.values())), "step": float(alive.most)}


def _fields(given: dl.Job) -> dict[str, Any]:
    import dataclasses

    return {f.name: getattr(given, f.name) for f in dataclasses.fields(given) if f.init}
