"""Lossless JSON for the plain Python values in the state of schedules, scalers and parameter groups.

JSON has no tuples, infinities, numeric keys or tensors; those become objects with one marked key. Anything else (a
function, an object of a class) is refused by its path: a checkpoint contains data, never code.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import torch

from ...core.errors import CorruptFile, InputError

_DEPTH = 50
_MARK = "~"


def encode(value: Any, where: str, depth: int = 0) -> Any:
    """The JSON form of a value; `where` names it in errors."""
    if depth > _DEPTH:
        raise InputError(f"{where} is nested too deeply to be saved", rule=f"at most {_DEPTH} levels")
    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if isinstance(value, int | float):
        number = float(value) if isinstance(value, float) else int(value)
        return number if math.isfinite(number) else {_MARK: "float", "value": repr(number)}
    if isinstance(value, torch.Tensor):
        return {_MARK: "tensor", "dtype": dtype_name(value.dtype), "shape": list(value.shape), "value": _hex(value)}
    if isinstance(value, list | tuple | deque):
        items = [encode(v, f"{where}[{i}]", depth + 1) for i, v in enumerate(value)]
        return items if isinstance(value, list) else {_MARK: type(value).__name__, "value": items}
    if type(value) in (dict, OrderedDict, Counter, defaultdict):
        return _encode_dict(value, where, depth)
    if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
        return encode(value.item(), where, depth)
    raise InputError(
        f"{where} is of type {type(value).__name__}, which a checkpoint cannot store",
        rule="a state consists of numbers, strings, lists, dicts and tensors",
        fix="omit it from the state_dict() of its object",
    )


def _encode_dict(value: dict[Any, Any], where: str, depth: int) -> Any:
    inner = {k: encode(v, f"{where}[{k!r}]", depth + 1) for k, v in value.items()}
    if type(value) is dict and all(type(k) is str for k in inner) and _MARK not in inner:
        return inner
    pairs = [[encode(k, f"{where}: the key {k!r}", depth + 1), v] for k, v in inner.items()]
    return {_MARK: "counter" if isinstance(value, Counter) else "dict", "value": pairs}


def _hex(tensor: torch.Tensor) -> Any:
    """The bytes of a small tensor as hexadecimal text: exact for every dtype."""
    flat = tensor.detach().cpu().contiguous().flatten()
    return bytes(flat.view(torch.uint8).tolist()).hex()


def decode(value: Any, where: str) -> Any:
    """The value of a JSON form."""
    if isinstance(value, list):
        return [decode(v, where) for v in value]
    if not isinstance(value, dict):
        return value
    if _MARK not in value:
        return {k: decode(v, where) for k, v in value.items()}
    try:
        kind, content = value[_MARK], value["value"]
        if kind == "float":
            return {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[content]
        if kind == "tensor":
            return _tensor(content, dtype_of(value["dtype"], where), value["shape"])
        if kind in ("tuple", "deque"):
            items = [decode(v, where) for v in content]
            return tuple(items) if kind == "tuple" else deque(items)
        if kind in ("dict", "counter"):
            pairs = {decode(k, where): decode(v, where) for k, v in content}
            return Counter(pairs) if kind == "counter" else pairs
    except (KeyError, TypeError, ValueError, RuntimeError):
        pass
    raise CorruptFile(f"a value in {where} cannot be decoded", where=where, rule=f"given {str(value)[:60]}")


def _tensor(text: str, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    raw = bytearray.fromhex(text)
    flat = torch.frombuffer(raw, dtype=dtype).clone() if raw else torch.empty(0, dtype=dtype)
    return flat.view(shape)


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, such as `float32`."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str, where: str) -> torch.dtype:
    """The dtype of a name in a manifest."""
    dtype = getattr(torch, name, None) if isinstance(name, str) and name.isidentifier() else None
    if not isinstance(dtype, torch.dtype):
        raise CorruptFile(f"{name!r} is no dtype", where=where)
    return dtype
