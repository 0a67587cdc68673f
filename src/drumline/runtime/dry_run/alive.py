"""Counts the bytes of all tensors that are alive, operator by operator, and remembers the most."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...tracing.kinds import size_of, tensors
from ...tracing.recorder import RESERVE
from ...tracing.running import only_shapes
from .kernels import Kernels


class Alive(TorchDispatchMode):
    """While it is entered, every storage that an operator makes is counted until it dies; on one kind of device.

    Works on tensors with values as on those without: so a dry run can be compared with a real one. `kernels` tells what
    operators take for themselves, `reserves` that recurrent layers of a CPU stand for those of a GPU.
    """

    def __init__(self, device: str, *, kernels: Kernels | None = None, reserves: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._device, self._kernels, self._reserves = device, kernels, reserves
        self.now = 0
        self.most = 0
        self.phase = self.most_phase = ""
        """Where the step is, and where it was when the most was alive."""
        self._sizes: dict[int, int] = {}
        self._watch: dict[int, weakref.ref[Any]] = {}
        self._resized: list[torch.UntypedStorage] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch's wrapper would cost time at every operator

    def include(self, found: Iterable[Any]) -> None:
        """Count tensors that were there before; parts of distributed ones."""
        for t in found:
            local = t.to_local() if isinstance(t, DTensor) else t
            if isinstance(local, torch.Tensor):
                self._see(local)

    def start(self) -> None:
        """From now on: the most of all begins with what is here.

        FSDP2 gives the memory of a storage back, and takes it again, without an operator. It does so with storages that
        stay; so these are looked at again after every operator.
        """
        kept = [storage for ref in self._watch.values() if (storage := ref()) is not None]
        self._resized = [s for s in kept if s.nbytes() != self._sizes[int(s._cdata)]]
        self._look_again()
        self.most, self.most_phase = self.now, self.phase

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # its parts come by here next
        out = func(*args, **(kwargs or {}))
        for t in tensors(out):
            self._see(t)
        if self._reserves and func is torch.ops.aten.mkldnn_rnn_layer.default:
            self._reserve(*tensors(out))
        if self._resized:
            self._look_again()
        now = self.now + (self._kernels.takes(func, args, kwargs or {}) if self._kernels else 0)
        if now > self.most:
            self.most, self.most_phase = now, self.phase
        return out

    def _reserve(self, output: torch.Tensor, *others: torch.Tensor) -> None:
        """A GPU's recurrent layer keeps more for its backward than a CPU's: it lives as long as the CPU's workspace."""
        key = int(others[-1].untyped_storage()._cdata)
        if key in self._sizes:
            more = int(RESERVE * size_of(output))
            self._sizes[key] += more
            self.now += more

    def _see(self, t: torch.Tensor) -> None:
        if t.device.type != self._device or only_shapes(t) or t.layout != torch.strided:
            return
        storage = t.untyped_storage()
        key = int(storage._cdata)
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self.now += self._sizes[key]
            self._watch[key] = weakref.ref(storage, partial(self._died, key))

    def _died(self, key: int, _: Any) -> None:
        self.now -= self._sizes.pop(key, 0)
        self._watch.pop(key, None)

    def _look_again(self) -> None:
        for storage in self._resized:
            key, size = int(storage._cdata), storage.nbytes()
            self.now += size - self._sizes[key]
            self._sizes[key] = size


def storage_bytes(found: Iterable[Any], device: str) -> int:
    """Bytes of the memory behind some tensors on a kind of device, each run of memory once."""
    sizes: dict[int, int] = {}
    for t in found:
        local = t.to_local() if isinstance(t, DTensor) else t
        if isinstance(local, torch.Tensor) and local.device.type == device:
            storage = local.untyped_storage()
            sizes[int(storage._cdata)] = storage.nbytes()
    return sum(sizes.values())
