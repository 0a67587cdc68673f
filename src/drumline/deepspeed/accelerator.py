"""`get_accelerator()`: this rank's device, by the names of DeepSpeed's accelerator."""

from __future__ import annotations

from typing import Any

import torch

from ..comm.environment import device_of, rank_info


class LocalAccelerator:
    """The device of this rank. Other names are those of `torch.cuda` or `torch.cpu`: `memory_allocated`."""

    def __init__(self) -> None:
        self._cuda = torch.cuda.is_available()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda if self._cuda else torch.cpu, name)

    def device_name(self, device_index: int | None = None) -> str:
        """`cuda`, `cuda:1` or `cpu`."""
        return "cpu" if not self._cuda else "cuda" if device_index is None else f"cuda:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        """A context in which a device is current."""
        return torch.device(self.device_name(device_index))

    def current_device(self) -> int | str:
        """The number of the current device; `cpu` without one."""
        return torch.cuda.current_device() if self._cuda else "cpu"

    def current_device_name(self) -> str:
        """The name of the current device."""
        return str(device_of(rank_info()))

    def device_count(self) -> int:
        """Devices of this host: at least 1."""
        return torch.cuda.device_count() if self._cuda else 1

    def set_device(self, device_index: int) -> None:
        """Make a GPU the current device."""
        if self._cuda:
            torch.cuda.set_device(device_index)

    def is_available(self) -> bool:
        """Whether there is a device: always."""
        return True

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait for the device."""
        if self._cuda:
            torch.cuda.synchronize(device_index)

    def empty_cache(self) -> None:
        """Return unused GPU memory to the driver."""
        if self._cuda:
            torch.cuda.empty_cache()

    def manual_seed(self, seed: int) -> None:
        """Seed the generator of the device."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def communication_backend_name(self) -> str:
        """The backend that `init_distributed` chooses: nccl, or gloo on CPUs."""
        return "nccl" if self._cuda else "gloo"

    def is_bf16_supported(self) -> bool:
        """Whether bf16 can be used."""
        return not self._cuda or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        """Whether fp16 can be used."""
        return True


_ACCELERATOR = LocalAccelerator()


def get_accelerator() -> LocalAccelerator:
    """The device of this rank."""
    return _ACCELERATOR
