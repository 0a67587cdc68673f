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
from drumline.mpi.buffers import parse_message
from drumline.mpi.message_tensors import input_tensor as as_tensor


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


@pytest.mark.parametrize("order", [MPI.ORDER_C, MPI.ORDER_F])
def test_distributed_arrays_divide_all_elements_among_the_ranks(order: int) -> None:
    array = np.arange(7 * 10, dtype="i").reshape((7, 10), order="C" if order == MPI.ORDER_C else "F")
    flat = np.arange(70, dtype="i")
    owners = {}
    for rank in range(6):
        distribs = [MPI.DISTRIBUTE_BLOCK, MPI.DISTRIBUTE_CYCLIC]
        part = MPI.INT.Create_darray(6, rank, [7, 10], distribs, [MPI.DISTRIBUTE_DFLT_DARG, 2], [2, 3], order)
        assert part.extent == 70 * 4
        got = np.zeros(part.size // 4, "i")
        sent([flat, 1, part], got)
        owners |= {int(n): rank for n in got}
    expected = [[3 * (row // 4) + column // 2 % 3 for column in range(10)] for row in range(7)]
    assert [[owners[int(n)] for n in row] for row in array] == expected


def test_distributed_arrays_are_checked() -> None:
    block, default = MPI.DISTRIBUTE_BLOCK, MPI.DISTRIBUTE_DFLT_DARG
    cases = [
        ((4, 4, [8], [block], [default], [4]), "MPI_ERR_RANK: rank 4"),
        ((4, 0, [8], [block], [default], [3]), "MPI_ERR_ARG: a grid of [3]"),
        ((4, 0, [8], [block], [1], [4]), "MPI_ERR_ARG: 8 elements in blocks of 1 on 4 ranks"),
        ((4, 0, [8], [MPI.DISTRIBUTE_NONE], [default], [4]), "MPI_ERR_ARG: 4 ranks along a dim"),
    ]
    for arguments, words in cases:
        assert caught(MPI.Exception, lambda a=arguments: MPI.INT.Create_darray(*a)).startswith(words)
    caught(ValueError, lambda: MPI.INT.Create_darray(4, 0, [8, 8], [block], [default], [4]))


def test_fortran_types_have_the_precision_asked_for() -> None:
    assert [MPI.Datatype.Create_f90_integer(r).Get_size() for r in (2, 4, 9, 18)] == [1, 2, 4, 8]
    assert MPI.Datatype.Create_f90_real(6, 30).typestr == "f4"
    assert MPI.Datatype.Create_f90_real(15, MPI.UNDEFINED).typestr == "f8"
    complex_type = MPI.Datatype.Create_f90_complex(7, 30)
    assert complex_type.typestr == "c16"
    assert complex_type == MPI.Datatype.Create_f90_complex(7, 30), "one type, however often it is asked for"
    assert complex_type.is_predefined
    assert not complex_type.is_named
    assert complex_type.decode()[1:] == ("F90_COMPLEX", {"p": 7, "r": 30})
    assert pickle.loads(pickle.dumps(complex_type)) == complex_type
    text = caught(MPI.Exception, lambda: MPI.Datatype.Create_f90_integer(40))
    assert text.startswith("MPI_ERR_ARG: F90_INTEGER with r = 40")


@pytest.mark.parametrize(
    ("kind", "native", "expected"),
    [
        (MPI.INT, np.array([1, -2], "i"), "00000001fffffffe"),
        (MPI.LONG, np.array([1, -2], "l"), "00000001fffffffe"),
        (MPI.INT64_T, np.array([-2], "i8"), "fffffffffffffffe"),
        (MPI.WCHAR, np.array(["a"], "U1"), "0061"),
        (MPI.DOUBLE, np.array([1.5]), "3ff8000000000000"),
        (MPI.C_FLOAT_COMPLEX, np.array([1.5 - 2j], "F"), "3fc00000c0000000"),
        (MPI.LONG_DOUBLE, np.array([-1.5], "g"), "bfff8000000000000000000000000000"),
    ],
    ids=lambda x: x.name if isinstance(x, MPI.Datatype) else "",
)
def test_external32_is_big_endian_with_fixed_sizes(kind: Any, native: Any, expected: str) -> None:
    size = kind.Pack_external_size("external32", len(native))
    packed, back = bytearray(size + 1), np.zeros_like(native)
    assert kind.Pack_external("external32", native.view("u1"), packed, 1) == size + 1
    assert packed[1:].hex() == expected
    assert kind.Unpack_external("external32", packed, 1, back.view("u1")) == size + 1
    assert (back == native).all()


def test_external32_of_structs_and_of_what_does_not_fit() -> None:
    pair = MPI.Datatype.Create_struct([1, 2], [0, 8], [MPI.SHORT, MPI.DOUBLE])
    native = np.array([(7, [1.5, -2.0]), (8, [0.0, 4.0])], np.dtype([("n", "h"), ("x", "d", 2)], align=True))
    assert pair.Pack_external_size("external32", 2) == 2 * 18
    packed, back = bytearray(36), np.zeros_like(native)
    pair.Pack_external("external32", native, packed, 0)
    assert packed[:10].hex() == "00073ff8000000000000"
    pair.Unpack_external("external32", packed, 0, back)
    assert (back["n"] == native["n"]).all()
    assert (back["x"] == native["x"]).all()
    large = np.array([1 << 40], "l")
    text = caught(MPI.Exception, lambda: MPI.LONG.Pack_external("external32", large, bytearray(8), 0))
    assert text.startswith(f"MPI_ERR_CONVERSION: {1 << 40} in external32")
    assert "MPI_ERR_TYPE" in caught(MPI.Exception, lambda: MPI.DOUBLE_INT.Pack_external_size("external32", 1))
    assert "rule:  external32" in caught(MPI.Exception, lambda: MPI.INT.Pack_external_size("native", 1))
    text = caught(MPI.Exception, lambda: MPI.INT.Pack(np.zeros(3, "i"), bytearray(8), 0, MPI.COMM_SELF))
    assert text.startswith("MPI_ERR_ARG: bytes 0 to 12 of a buffer of 8")
