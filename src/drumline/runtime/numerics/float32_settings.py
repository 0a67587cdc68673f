"""How a GPU computes float32 matmuls, convolutions and recurrent layers: exactly, or in tf32.

Torch has two interfaces for it. The older one (`allow_tf32`, `set_float32_matmul_precision`) writes the settings of the
newer one (`fp32_precision`) as well, but not the other way round, and then raises when it is read. So what the older
interface can read is changed by it, and both agree; otherwise the user has chosen the newer one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


def float32_in(word: str, device: torch.device) -> AbstractContextManager[None]:
    """Compute float32 as `ieee` or `tf32` on a device, whatever the process has set, and restore its settings.

    A CPU has no settings of convolutions and recurrent layers; that of matmuls is one with a GPU's.
    """
    on_gpu = device.type == "cuda"
    settings: list[_Matmul | _Convolutions] = []
    if not _means(torch.backends.cuda.matmul.fp32_precision, word):
        settings.append(_Matmul())
    if on_gpu and not all(_means(setting.fp32_precision, word) for setting in _convolutions()):
        settings.append(_Convolutions())
    return _changed(settings, word) if settings else nullcontext()


@contextmanager
def _changed(settings: Sequence[_Matmul | _Convolutions], word: str) -> Iterator[None]:
    try:
        for setting in settings:
            setting.set(word)
        yield
    finally:
        for setting in settings:
            setting.restore()


class _Matmul:
    """The setting of matmuls, which the older interface shares with those of a CPU."""

    def __init__(self) -> None:
        cpu: Any = torch.backends.mkldnn
        self._settings = torch.backends.cuda.matmul, cpu.matmul
        self._new = tuple(setting.fp32_precision for setting in self._settings)
        self._old = _old_matmul()

    def set(self, word: str) -> None:
        """Change it for all float32 matmuls of a GPU."""
        if self._old is not None:
            torch.set_float32_matmul_precision("high" if word == "tf32" else "highest")
        _choose(self._settings[:1], word)

    def restore(self) -> None:
        """Set it as it was found, in both interfaces."""
        if self._old is not None:
            torch.set_float32_matmul_precision(self._old)
        _put_back(self._settings, self._new)


class _Convolutions:
    """The settings of convolutions and recurrent layers, which the older interface does not distinguish."""

    def __init__(self) -> None:
        self._settings = _convolutions()
        self._new = tuple(setting.fp32_precision for setting in self._settings)
        try:
            self._old: bool | None = torch.backends.cudnn.allow_tf32
        except RuntimeError:
            self._old = None

    def set(self, word: str) -> None:
        """Change them."""
        if self._old is not None:
            torch.backends.cudnn.allow_tf32 = word == "tf32"
        _choose(self._settings, word)

    def restore(self) -> None:
        """Set them as they were found, in both interfaces."""
        if self._old is not None:
            torch.backends.cudnn.allow_tf32 = self._old
        _put_back(self._settings, self._new)


def _convolutions() -> tuple[Any, Any]:
    cudnn: Any = torch.backends.cudnn
    return cudnn.conv, cudnn.rnn


def _choose(settings: Sequence[Any], word: str) -> None:
    """Choose by the newer interface where the older one has not, or where a choice for all kinds overrules it."""
    for setting in settings:
        if not _means(setting.fp32_precision, word):
            setting.fp32_precision = word


def _put_back(settings: Sequence[Any], words: Sequence[str]) -> None:
    for setting, word in zip(settings, words, strict=True):
        if setting.fp32_precision != word:
            setting.fp32_precision = word


def _means(setting: str, word: str) -> bool:
    """Whether a setting computes as `word` says; `none`, where nothing was chosen, is exact."""
    return setting == word or (word == "ieee" and setting == "none")


def _old_matmul() -> str | None:
    """The precision of matmuls by the older interface; None where it does not agree with the newer one."""
    try:
        allowed = torch.backends.cuda.matmul.allow_tf32
        word = torch.get_float32_matmul_precision()
    except RuntimeError:
        return None
    return word if allowed == (word != "highest") else None
