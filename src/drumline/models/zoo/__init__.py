"""Well-known models as profiles by formula: `profile("gpt:175b")` needs neither torch nor the model.

gpt:125m ... gpt:1t     llama:1b ... llama:405b     qwen3:0.6b ... 235b-a22b     gemma:2b, 9b, 27b
mixtral:8x7b, 8x22b     deepseek:v2, v3             gpt-oss:20b, 120b            llama4:scout, maverick
mamba:130m ... 2.8b     bert:base, large            vit:base, large, huge        unet
resnet18 ... resnet152  vgg11, 16, 19               mlp:4x4096                   lstm:2x1024
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass

from ...core.errors import InputError, nearest
from ..profile import Profile
from . import convolution, gated, recurrent, state_space, transformer

__all__ = ["has_sequence", "is_zoo", "names", "profile"]


@dataclass(frozen=True, slots=True)
class _Family:
    """Models that differ in size only."""

    sizes: tuple[str, ...]
    """Sizes after the family's name; examples if any `layers x width` is allowed."""
    make: Callable[[str, int | None, int | None], Profile]
    """(size, batch_size, sequence)"""
    joint: str = ":"
    """Separator between name and size."""
    sequence: bool = False
    """Whether its samples are sequences of selectable length."""
    grid: bool = False
    """Whether a size is any `layers x width`."""


def _gated(family: str, sizes: dict[str, gated.GatedSize]) -> _Family:
    """A family of gated language models."""
    return _Family(
        tuple(sizes), lambda size, batch, s: gated.gated(f"{family}:{size}", sizes[size], batch, s), sequence=True
    )


def _split(size: str) -> tuple[int, int]:
    layers, width = size.split("x")
    return int(layers), int(width)


_FAMILIES = {
    "gpt": _Family(tuple(transformer.GPT), transformer.gpt, sequence=True),
    "llama": _gated("llama", gated.LLAMA),
    "llama4": _gated("llama4", gated.LLAMA4),
    "qwen3": _gated("qwen3", gated.QWEN3),
    "gemma": _gated("gemma", gated.GEMMA),
    "mixtral": _gated("mixtral", gated.MIXTRAL),
    "deepseek": _gated("deepseek", gated.DEEPSEEK),
    "gpt-oss": _gated("gpt-oss", gated.GPT_OSS),
    "mamba": _Family(tuple(state_space.MAMBA), state_space.mamba, sequence=True),
    "bert": _Family(tuple(transformer.BERT), transformer.bert, sequence=True),
    "vit": _Family(tuple(transformer.VIT), lambda size, batch, _: transformer.vit(size, batch)),
    "resnet": _Family(tuple(convolution.RESNET), lambda size, batch, _: convolution.resnet(size, batch), joint=""),
    "vgg": _Family(tuple(convolution.VGG), lambda size, batch, _: convolution.vgg(size, batch), joint=""),
    "unet": _Family(("",), lambda size, batch, _: convolution.unet(batch), joint=""),
    "mlp": _Family(("4x4096",), lambda size, batch, _: recurrent.mlp(*_split(size), batch), grid=True),
    "lstm": _Family(
        ("2x1024",), lambda size, batch, s: recurrent.lstm(*_split(size), batch, s), sequence=True, grid=True
    ),
}
_PATTERN = re.compile(rf"({'|'.join(_FAMILIES)})(?::([\w.-]*)|(\d[\w.]*))?", re.ASCII)
_GRID = re.compile(r"[1-9]\d{0,4}x[1-9]\d{0,5}", re.ASCII)
_FILES = (".py", ".json", ".toml")


def names() -> tuple[str, ...]:
    """The names that `profile` knows; for `mlp` and `lstm` one example each of any `layers x width`."""
    return tuple(_name(family, size) for family, f in _FAMILIES.items() for size in f.sizes)


def is_zoo(text: str) -> bool:
    """Whether the text names a model of the zoo rather than a file; `profile` refuses unknown sizes."""
    return _match(text) is not None


def has_sequence(name: str) -> bool:
    """Whether the samples of a model of the zoo are sequences of selectable length."""
    match = _match(name)
    return match is not None and _FAMILIES[match[0]].sequence


def profile(name: str, *, batch_size: int | None = None, sequence: int | None = None) -> Profile:
    """Profile of a model with `batch_size` samples per step and, for sequences, `sequence` tokens per sample."""
    match = _match(name)
    if match is None:
        raise InputError(
            f"no model {name!r} in the zoo",
            rule=f"its families are {', '.join(_FAMILIES)}",
            fix=nearest(name.strip().lower(), names()),
        )
    family, size = match
    f = _FAMILIES[family]
    size = size or (f.sizes[0] if f.grid else "")
    if size not in f.sizes and not (f.grid and _GRID.fullmatch(size)):
        raise _unknown(name, family)
    for key, value in (("batch_size", batch_size), ("sequence", sequence)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise InputError(f"{key} = {value!r} for {_name(family, size)}", rule=f"{key} is a whole number above 0")
    if sequence is not None and not f.sequence:
        takes = ", ".join(k for k, x in _FAMILIES.items() if x.sequence)
        raise InputError(f"{_name(family, size)} has no sequence length", rule=f"only {takes} have")
    return _made(family, size, batch_size, sequence)


@functools.lru_cache(maxsize=64)
def _made(family: str, size: str, batch_size: int | None, sequence: int | None) -> Profile:
    return _FAMILIES[family].make(size, batch_size, sequence)


def _name(family: str, size: str) -> str:
    return f"{family}{_FAMILIES[family].joint}{size}"


def _match(text: str) -> tuple[str, str] | None:
    """Family and size that a text names, in lower case; the size may be unknown."""
    text = text.strip().lower()
    match = _PATTERN.fullmatch(text)
    if not match or text.endswith(_FILES):
        return None
    return match[1], match[2] or match[3] or ""


def _unknown(name: str, family: str) -> InputError:
    f = _FAMILIES[family]
    known = [_name(family, size) for size in f.sizes]
    rule = f"{family}:LAYERSxWIDTH, such as {known[0]}" if f.grid else f"the zoo has {', '.join(known)}"
    near = nearest(name.strip().lower(), known)
    return InputError(f"no model {name!r} in the zoo", rule=rule, fix=near)
