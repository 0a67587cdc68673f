"""A call is recognized by the identity of the code that made it, and only by that."""

from __future__ import annotations

from typing import Any

from drumline.comm import call_check
from drumline.comm.call_check import CallPlace, CallSite, call_site

LIBRARY: dict[str, Any] = {"__name__": "library", "CallPlace": CallPlace, "call_site": call_site}
SOURCE = """
def all_reduce(known=None, then=None):
    return _method(known, then)
def broadcast(known=None, then=None):
    return _method(known, then)
def _method(known, then):
    return _run(known, then)
def _run(known, then):
    if then is not None:
        return then(known)
    return known.is_here() if known else (CallPlace.here(("library",)), call_site(("library",)))
"""
exec(compile(SOURCE, "library.py", "exec"), LIBRARY)
all_reduce, broadcast = LIBRARY["all_reduce"], LIBRARY["broadcast"]


def user(function: Any, *arguments: Any) -> Any:
    """A line of the user's program that makes calls."""
    return function(*arguments)


def test_the_same_instruction_is_recognized() -> None:
    place, site = user(all_reduce)
    assert place.site == site and site.text.startswith(__file__)
    assert user(all_reduce, place) and user(all_reduce, place)


def test_another_line_is_not() -> None:
    place, _ = all_reduce()
    assert not all_reduce(place)
    assert not user(all_reduce, place)


def test_another_caller_inside_the_library_is_not() -> None:
    place, _ = user(all_reduce)
    assert not user(broadcast, place)


def test_fewer_frames_are_not() -> None:
    place, _ = user(all_reduce)
    deep = CallPlace(place.site, 10_000, place.code, place.instruction, place.caller)
    assert not user(all_reduce, deep)


def test_a_users_function_in_between_is_not() -> None:
    """The library calls the user's code back, which makes a call of its own: a line further inside."""
    place, _ = user(all_reduce)
    assert not user(all_reduce, place, lambda known: all_reduce(known))


def test_attributed_calls_are_not(monkeypatch: Any) -> None:
    place, _ = user(all_reduce)
    monkeypatch.setattr(call_check, "_attributes", False)
    try:
        call_check.attribute_calls_to(CallSite("elsewhere.py:1", 1))
        assert not user(all_reduce, place)
        assert user(all_reduce) == (None, CallSite("elsewhere.py:1", 1))
    finally:
        call_check.attribute_calls_to(None)
