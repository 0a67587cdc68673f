"""Values that a notebook shows as tables and pictures. How they look is given from above: reports draw them."""

from __future__ import annotations

from collections.abc import Callable

_RENDERERS: list[Callable[[object], str]] = []


def set_renderer(renderer: Callable[[object], str]) -> None:
    """Say how values become HTML; the package does so when it is imported."""
    _RENDERERS[:] = [renderer]


class NotebookValue:
    """A value that shows itself in a notebook."""

    __slots__ = ()

    def _repr_html_(self) -> str | None:
        return _RENDERERS[0](self) if _RENDERERS else None
