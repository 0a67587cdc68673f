"""A forward that runs again in the backward runs within the modes that it ran in: torch takes them off there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType

from torch.overrides import _get_current_function_mode_stack

Make = Callable[[], AbstractContextManager[None]]


def repeated(make: Make) -> AbstractContextManager[None]:
    """Called in the forward: what is around its repetition, within a context of `make` for each time."""
    return _Again(_get_current_function_mode_stack(), make)


class _Again(AbstractContextManager[None]):
    """Around a repetition; a graph that is retained has one for each of its backwards."""

    def __init__(self, modes: Sequence[AbstractContextManager[object]], make: Make) -> None:
        self._modes, self._make = modes, make
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for mode in self._modes if not _get_current_function_mode_stack() else ():
                stack.enter_context(mode)
            stack.enter_context(self._make())
            self._entered.append(stack.pop_all())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._entered.pop().__exit__(kind, error, trace)
