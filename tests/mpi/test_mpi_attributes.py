"""Attributes of communicators, datatypes and windows; and mpi4py's buffer. One rank is enough."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from mpi_checks import caught

from drumline import MPI

OWNERS: list[Callable[[], Any]] = [
    lambda: MPI.COMM_SELF.Dup(),
    lambda: MPI.INT.Dup(),
    lambda: MPI.Win.Create(bytearray(8), comm=MPI.COMM_SELF),
]


@pytest.mark.parametrize("make", OWNERS)
def test_a_value_belongs_to_its_owner_until_it_is_deleted(make: Callable[[], Any]) -> None:
    deleted: list[Any] = []
    owner, other = make(), make()
    key = type(owner).Create_keyval(delete_fn=lambda o, k, v: deleted.append((k, v)))
    assert owner.Get_attr(key) is None
    owner.Set_attr(key, "first")
    assert owner.Get_attr(key) == "first"
    assert other.Get_attr(key) is None
    owner.Set_attr(key, "second")
    assert deleted == [(key, "first")]
    owner.Delete_attr(key)
    owner.Delete_attr(key)
    assert deleted == [(key, "first"), (key, "second")]
    owner.Set_attr(key, "third")
    assert type(owner).Free_keyval(key) == MPI.KEYVAL_INVALID
    assert owner.Get_attr(key) == "third", "values stay when their key is freed"
    owner.Free()
    other.Free()
    assert deleted[-1] == (key, "third"), "freeing the owner deletes its values"


@pytest.mark.parametrize("make", OWNERS[:2])
@pytest.mark.parametrize(
    ("copy", "expected"),
    [(None, None), (False, None), (True, 7), (lambda o, k, v: v + 1, 8), (lambda *_: NotImplemented, None)],
)
def test_copies_receive_what_the_key_says(make: Callable[[], Any], copy: Any, expected: Any) -> None:
    owner = make()
    key = type(owner).Create_keyval(copy)
    owner.Set_attr(key, 7)
    copied = owner.Dup()
    assert copied.Get_attr(key) == expected
    copied.Free()
    owner.Free()
    type(owner).Free_keyval(key)


@pytest.mark.parametrize("make", OWNERS)
def test_keys_are_checked(make: Callable[[], Any]) -> None:
    owner = make()
    other = next(kind for kind in (MPI.Comm, MPI.Datatype) if not isinstance(owner, kind)).Create_keyval()
    for wrong in (MPI.KEYVAL_INVALID, 123456, other):
        for call in (owner.Get_attr, owner.Delete_attr, type(owner).Free_keyval, lambda k: owner.Set_attr(k, 1)):
            assert caught(MPI.Exception, lambda c=call, w=wrong: c(w)).startswith(f"MPI_ERR_KEYVAL: key {wrong}")
    number = type(owner).Create_keyval(nopython=True)
    owner.Set_attr(number, 5)
    assert owner.Get_attr(number) == 5
    caught(TypeError, lambda: owner.Set_attr(number, "five"))
    owner.Free()


def test_the_attributes_of_mpi_are_read_only() -> None:
    assert MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) >= 32767
    assert caught(MPI.Exception, lambda: MPI.COMM_WORLD.Set_attr(MPI.TAG_UB, 1)).startswith("MPI_ERR_KEYVAL")


def test_callbacks_that_fail_are_reported_as_errors_of_mpi(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: Any) -> Any:
        raise KeyError("lost")

    owner = MPI.INT.Dup()
    key = MPI.Datatype.Create_keyval(fail, fail)
    owner.Set_attr(key, 1)
    text = caught(MPI.Exception, owner.Dup)
    assert text.startswith(f"MPI_ERR_OTHER: the callback of attribute key {key} raised KeyError: 'lost'")
    assert "KeyError: 'lost'" in capsys.readouterr().err, "the program's traceback is printed"
    caught(MPI.Exception, lambda: owner.Delete_attr(key))
    assert owner.Get_attr(key) is None
    owner.Free()


# -- buffer -----------------------------------------------------------------------------------------------------------


def test_a_buffer_is_the_memory_of_its_object() -> None:
    owner = bytearray(b"abcdef")
    view = MPI.buffer(owner)
    assert view.obj is owner
    assert (view.nbytes, view.readonly, view.address) == (6, False, MPI.Get_address(owner))
    view[1:3] = b"XY"
    view[-1] = ord("Z")
    assert owner == b"aXYdeZ"
    part = view[2:4]
    assert part.tobytes() == b"Yd"
    assert part.address == view.address + 2
    part[:] = 0
    assert owner == b"aX\0\0eZ"
    assert MPI.memory is MPI.buffer


def test_what_a_buffer_refuses() -> None:
    view = MPI.buffer.allocate(4)
    for wrong in (None, 1, 1.0, [], ()):
        assert "has no memory" in caught(TypeError, lambda w=wrong: MPI.buffer(w))
    caught(IndexError, lambda: view[::2])
    caught(IndexError, lambda: view[4])
    caught(TypeError, lambda: view[None])
    assert caught(ValueError, lambda: view.__setitem__(slice(0, 2), b"abc")) == "3 bytes assigned to 2"
    caught(TypeError, lambda: MPI.buffer(b"abc").__setitem__(0, 1))
    caught(NotImplementedError, lambda: view.__delitem__(0))
    caught(BufferError, lambda: MPI.Attach_buffer(MPI.buffer(b"abc")))


def test_released_memory_is_gone_from_the_buffer_but_not_from_its_views() -> None:
    view = MPI.Alloc_mem(16)
    view[:] = 7
    kept = memoryview(view)
    MPI.Free_mem(view)
    assert (view.address, view.nbytes, len(view), view.obj) == (0, 0, 0, None)
    assert memoryview(view).nbytes == 0
    assert kept.tolist() == [7] * 16
    del view
    assert kept.tolist() == [7] * 16
