"""Memory of any object: buffers, tensors, DLPack, CUDA's array interface, or an address."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
import torch

from .datatype import Datatype
from .predefined_types import of_torch


class SpecialBuffer:
    """A constant that is passed in place of a buffer or of a list."""

    def __init__(self, name: str, value: int) -> None:
        self._name, self._value = name, value

    def __repr__(self) -> str:
        return self._name

    def __bool__(self) -> bool:
        return self._value != 0

    def __int__(self) -> int:
        return self._value

    def __reduce__(self) -> str:
        return self._name


SpecialBuffer.__module__ = "drumline.MPI"  # where unpickling finds the constants
BOTTOM, IN_PLACE, BUFFER_AUTOMATIC = (
    SpecialBuffer("BOTTOM", 0),
    SpecialBuffer("IN_PLACE", -1),
    SpecialBuffer("BUFFER_AUTOMATIC", -2),
)


def _tensor(tensor: torch.Tensor, writable: bool) -> tuple[memoryview, Datatype, torch.Tensor | None]:
    tensor = tensor.detach()
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is not contiguous: call .contiguous()")
    host = tensor.cpu()
    memory = from_address(host.data_ptr(), host.numel() * host.element_size(), host)
    return memory, of_torch(tensor.dtype), tensor if writable and host.data_ptr() != tensor.data_ptr() else None


def _buffer(obj: Any, writable: bool) -> tuple[memoryview, str]:
    if isinstance(obj, np.ndarray) and not obj.flags.c_contiguous and obj.flags.f_contiguous:
        obj = obj.T
    view = memoryview(obj)
    if not view.c_contiguous:
        raise BufferError("ndarray is not contiguous")
    if writable and view.readonly:
        raise BufferError("the buffer is read-only: nothing can be received into it")
    return view.cast("B") if view.nbytes else memoryview(bytearray()), view.format.lstrip("<=@")


def resolve(obj: Any, writable: bool) -> tuple[memoryview, str | Datatype, torch.Tensor | None]:
    """The bytes of any object with memory, its element type, and the GPU tensor that they are a copy of."""
    if isinstance(obj, torch.Tensor):
        return _tensor(obj, writable)
    try:
        return *_buffer(obj, writable), None
    except TypeError:
        if hasattr(obj, "__dlpack__"):
            memory = from_dlpack(obj, writable)
        elif hasattr(obj, "__cuda_array_interface__"):
            memory = from_cuda_interface(obj, writable)
        else:
            raise TypeError(f"message: {type(obj).__name__} is neither a buffer nor a list with one") from None
    return _tensor(memory, writable) if isinstance(memory, torch.Tensor) else (*memory, None)


def memory_of(obj: Any, *, writable: bool) -> memoryview:
    """The bytes of any object with memory."""
    return memoryview(bytearray()) if obj is None or obj is BOTTOM else resolve(obj, writable)[0]


def address_of(obj: Any) -> int:
    """The address of an object's memory."""
    if obj is None or obj is BOTTOM:
        return 0
    memory = memory_of(obj, writable=False)
    return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data) if len(memory) else 0


def check_attachable(buf: Any) -> None:
    """Refuse a buffer for buffered sends that cannot be written."""
    if buf is not None and buf is not BUFFER_AUTOMATIC:
        memory_of(buf, writable=True)


_CPU = 1
"""DLPack's device type of host memory."""


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
    """Memory of this process by address; `keep` stays alive as long as the view."""
    if nbytes == 0:
        return memoryview(bytearray())
    memory = (ctypes.c_char * nbytes).from_address(address)
    memory.keep = keep  # type: ignore[attr-defined]  # ctypes objects take attributes
    return memoryview(memory).cast("B")


def from_dlpack(obj: Any, writable: bool) -> tuple[memoryview, str] | torch.Tensor:
    """The memory of a DLPack object; for a GPU, a tensor. Decoded here, because torch supports fewer types."""
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
        raise BufferError("a DLPack tensor that is not contiguous")
    kind, size = _KINDS.get(tensor.code, "V"), tensor.bits // 8 * tensor.lanes
    if kind == "f" and tensor.lanes == 2:  # complex numbers, before they had their own code
        kind = "c"
    memory = from_address((tensor.data or 0) + tensor.offset, math.prod(shape) * size, (obj, capsule))
    return memory, f"{kind}{size}"


def from_cuda_interface(obj: Any, writable: bool) -> tuple[memoryview, str] | torch.Tensor:
    """The memory of an object with CUDA's array interface; without a GPU it is host memory."""
    interface = obj.__cuda_array_interface__
    if torch.cuda.is_available():
        return torch.as_tensor(obj, device="cuda")
    address, readonly = interface["data"]
    if writable and readonly:
        raise BufferError("the buffer is read-only: nothing can be received into it")
    kind = interface["typestr"]
    size = int(kind[2:])
    total = math.prod(interface["shape"]) * size
    strides = interface.get("strides")
    if strides and not _contiguous(list(interface["shape"]), [s // size for s in strides]):
        raise BufferError("an array that is not contiguous")
    return from_address(address or 0, total, obj), kind.lstrip("<|=")


def _contiguous(shape: list[int], strides: list[int]) -> bool:
    """Whether elements are contiguous, in row-major or column-major order."""
    return any(_runs(s, t) for s, t in ((shape[::-1], strides[::-1]), (shape, strides))) or 0 in shape


def _runs(shape: list[int], strides: list[int]) -> bool:
    expected = 1
    for n, stride in zip(shape, strides, strict=True):
        if n > 1 and stride != expected:
            return False
        expected *= n
    return True
