"""Errors of process groups: programs written for torch catch RuntimeError, so what a group raises is one as well."""

from __future__ import annotations

from ...core.errors import DrumlineError, GaveUp, InputError


class GroupInputError(InputError, RuntimeError):
    """A call of a process group is wrong."""


class GroupGaveUp(GaveUp, RuntimeError):
    """A process group could not go on."""


def for_torch(error: BaseException) -> BaseException:
    """The same error, as one that `except RuntimeError` catches."""
    if isinstance(error, RuntimeError) or not isinstance(error, DrumlineError):
        return error
    kind = GroupInputError if isinstance(error, InputError) else GroupGaveUp
    twin = kind(error.what, where=error.where, rule=error.rule, fix=error.fix)
    twin.__cause__, twin.__suppress_context__ = error.__cause__, True
    return twin.with_traceback(error.__traceback__)
