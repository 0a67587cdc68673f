"""Memory that other libraries describe: by address, by DLPack, or by CUDA's array interface."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch

_CPU = 1
"""DLPack's number for host memory."""


class _Tensor(ctypes.Structure):
    """DLPack's description of a tensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
    )


_KINDS = {0: "i", 1: "u", 2: "f", 5: "c", 6: "b"}


def from_address(address: int, nbytes: int, keep: object = None) -> memoryview:
    """Memory of this process by its address; `keep` lives as long as the view."""
    if nbytes == 0:
        return memoryview(bytearray())
    memory = (ctypes.c_char * nbytes).from_address(address)
    memory.keep = keep  # type: ignore[attr-defined]  # ctypes lets us
    return memoryview(memory).cast("B")


def from_dlpack(obj: Any, writable: bool) -> tuple[memoryview, str] | torch.Tensor:
    """The memory behind DLPack; of a GPU, its tensor. Read by hand, because torch knows fewer number types."""
    if obj.__dlpack_device__()[0] != _CPU:
        return torch.from_dlpack(obj)
    capsule = obj.__dlpack__()
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    named = ctypes.pythonapi.PyCapsule_IsValid
    named.restype, named.argtypes = ctypes.c_int, [ctypes.py_object, ctypes.c_char_p]
    if named(capsule, b"dltensor"):
        tensor, readonly = _Tensor.from_address(pointer(capsule, b"dltensor")), False
    else:  # version 1 begins with a version, a context, a deleter and flags
        start = pointer(capsule, b"dltensor_versioned")
        tensor, readonly = _Tensor.from_address(start + 32), bool(ctypes.c_uint64.from_address(start + 24).value & 1)
    if writable and readonly:
        raise BufferError("the buffer is read-only: nothing can be received into it")
    shape = [tensor.shape[i] for i in range(tensor.ndim)]
    if tensor.strides and not _contiguous(shape, [tensor.strides[i] for i in range(tensor.ndim)]):
        raise BufferError("a DLPack tensor with gaps")
    kind, size = _KINDS.get(tensor.code, "V"), tensor.bits // 8 * tensor.lanes
    if kind == "f" and tensor.lanes == 2:  # how complex numbers were told before they had a kind of their own
        kind = "c"
    memory = from_address((tensor.data or 0) + tensor.offset, math.prod(shape) * size, (obj, capsule))
    return memory, f"{kind}{size}"


def from_cuda_interface(obj: Any, writable: bool) -> tuple[memoryview, str] | torch.Tensor:
    """The memory behind CUDA's array interface; without a GPU it can only be the host's."""
    told = obj.__cuda_array_interface__
    if torch.cuda.is_available():
        return torch.as_tensor(obj, device="cuda")
    address, readonly = told["data"]
    if writable and readonly:
        raise BufferError("the buffer is read-only: nothing can be received into it")
    kind = told["typestr"]
    size = int(kind[2:])
    total = math.prod(told["shape"]) * size
    strides = told.get("strides")
    if strides and not _contiguous(list(told["shape"]), [s // size for s in strides]):
        raise BufferError("an array with gaps")
    return from_address(address or 0, total, obj), kind.lstrip("<|=")


def _contiguous(shape: list[int], strides: list[int]) -> bool:
    """Whether elements lie one after the other, rows first or columns first."""
    return any(_runs(s, t) for s, t in ((shape[::-1], strides[::-1]), (shape, strides))) or 0 in shape


def _runs(shape: list[int], strides: list[int]) -> bool:
    expected = 1
    for n, stride in zip(shape, strides, strict=True):
        if n > 1 and stride != expected:
            return False
        expected *= n
    return True
