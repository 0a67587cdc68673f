"""Datatypes: their memory layout, and that messages respect it."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi_checks import caught

from drumline import MPI
from drumline.mpi.buffers import input_tensor as as_tensor
from drumline.mpi.buffers import parse_message


def sent(message: Any, into: Any) -> MPI.Status:
    """Send a message to this rank."""
    status = MPI.Status()
    request = MPI.COMM_SELF.Isend(message, 0)
    MPI.COMM_SELF.Recv(into, 0, status=status)
    request.Wait()
    return status


def test_derived_types_select_their_elements() -> None:
    data = np.arange(24, dtype="i").reshape(4, 6)
    column = MPI.INT.Create_vector(4, 1, 6).Commit()
    got = np.zeros(4, "i")
    sent([data, 1, column], got)
    assert got.tolist() == [0, 6, 12, 18]
    box = MPI.INT.Create_subarray([4, 6], [2, 3], [1, 2]).Commit()
    got = np.zeros(6, "i")
    status = sent([data, 1, box], got)
    assert got.tolist() == data[1:3, 2:5].reshape(-1).tolist()
    assert status.Get_count(MPI.INT) == 6
    assert status.Get_elements(box) == 6
    into = np.full((4, 6), -1, "i")
    sent(np.arange(6, dtype="i"), [into, 1, box])
    assert into[1:3, 2:5].reshape(-1).tolist() == list(range(6))
    assert (into == -1).sum() == 18
    picked = MPI.INT.Create_indexed([2, 1], [0, 4]).Commit()
    got = np.zeros(6, "i")
    sent([data, 2, picked], got)
    assert got.tolist() == [0, 1, 4, 5, 6, 9]
    next_column = column.Create_resized(0, 4).Commit()
    got = np.zeros(8, "i")
    sent([data, 2, next_column], got)
    assert got.tolist() == [0, 6, 12, 18, 1, 7, 13, 19]


def test_structs_have_c_layout() -> None:
    kind = np.dtype([("a", "b"), ("b", "d"), ("c", "i")], align=True)
    made = MPI.Datatype.Create_struct([1, 1, 1], [0, 8, 16], [MPI.SIGNED_CHAR, MPI.DOUBLE, MPI.INT]).Commit()
    assert (made.size, made.extent) == (13, kind.itemsize)
    data = np.array([(1, 2.5, 3), (4, 5.5, 6)], kind)
    got = np.zeros(2, kind)
    sent([data, 2, made], [got, 2, made])
    assert got.tolist() == data.tolist()
    again = pickle.loads(pickle.dumps(made))
    assert (again.Get_envelope(), again.extent) == (made.Get_envelope(), made.extent)


def test_predefined_types_match_numpy_and_torch() -> None:
    for code in "bhilqBHILQfdgFDG?":
        made = MPI.Datatype.fromcode(code)
        assert made.size == np.dtype(code).itemsize, code
    assert MPI.DOUBLE_INT.extent == 16
    assert MPI.DOUBLE_INT.size == 12
    for dtype in (torch.float32, torch.bfloat16, torch.uint16, torch.complex128, torch.bool):
        assert as_tensor(parse_message(torch.zeros(3, dtype=dtype), writable=False)).dtype == dtype


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_unpacking_inverts_packing(data: Any) -> None:
    """For nested types, against a plain walk over their parts."""
    kind = data.draw(st.sampled_from([MPI.BYTE, MPI.SHORT, MPI.DOUBLE]))
    for _ in range(data.draw(st.integers(0, 3))):
        n, length = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
        how = data.draw(st.sampled_from(["vector", "indexed", "resized", "contiguous"]))
        if how == "vector":
            kind = kind.Create_vector(n, length, length + data.draw(st.integers(0, 2)))
        elif how == "indexed":
            gaps = data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
            kind = kind.Create_indexed([length] * n, [i * length + sum(gaps[: i + 1]) for i in range(n)])
        elif how == "resized":
            kind = kind.Create_resized(0, kind.extent + data.draw(st.integers(0, 3)))
        else:
            kind = kind.Create_contiguous(n)
    count = data.draw(st.integers(0, 3))
    size = 16 + max(0, count - 1) * kind.extent + kind.true_ub
    memory = np.frombuffer(np.random.default_rng(1).bytes(size), np.uint8).copy()
    packed = bytes(parse_message([memory, count, kind], writable=False).data())
    assert packed == b"".join(_walk(memory, kind._layout, i * kind.extent) for i in range(count))
    copy = np.zeros(size, np.uint8)
    parse_message([copy, count, kind], writable=True).fill(packed)
    assert bytes(parse_message([copy, count, kind], writable=False).data()) == packed
    assert np.count_nonzero(copy) <= len(packed)


def _walk(memory: Any, layout: Any, at: int) -> bytes:
    if layout.scalar is not None:
        return memory[at : at + layout.size].tobytes()
    return b"".join(_walk(memory, old, at + d + i * old.extent) for d, n, old in layout.parts for i in range(n))


@pytest.mark.parametrize(
    ("message", "error", "words"),
    [
        ([bytearray(4), 2, MPI.INT], ValueError, "2 of MPI_INT reach from byte 0 to byte 8 of a buffer of 4"),
        ([bytearray(5), MPI.INT], ValueError, "5 bytes are no multiple of elements of 4 bytes"),
        ([bytearray(4), -1, MPI.INT], ValueError, "count -1 is negative"),
        ([bytearray(4), "nonsense"], KeyError, "'nonsense' is no MPI datatype"),
        (b"read only", BufferError, "nothing can be received into it"),
        (np.zeros((4, 4))[:, ::2], BufferError, "not contiguous"),
        (torch.zeros(4, 4).t(), ValueError, "call .contiguous()"),
        ({1: 2}, TypeError, "dict is neither a buffer nor a list with one"),
        (None, TypeError, "None is no buffer"),
    ],
)
def test_invalid_messages_are_refused(message: Any, error: type[Exception], words: str) -> None:
    assert words in caught(error, lambda: MPI.COMM_SELF.Recv(message, 0))


def test_null_and_predefined_types() -> None:
    assert "DATATYPE_NULL" in caught(MPI.Exception, lambda: MPI.DATATYPE_NULL.Get_size())
    assert "predefined types cannot be freed" in caught(MPI.Exception, lambda: MPI.INT.Free())
