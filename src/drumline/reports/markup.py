"""HTML and SVG built from values. Text that is not markup is escaped, so no user text can become markup."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence


class Html(str):
    """Text that is markup; made only here and in constants of the page."""

    __slots__ = ()


Content = str | int | float | None | Iterable["Content"]
"""Html is kept, other text is escaped, None is dropped, a list is its items."""

# Control characters, half surrogates and marks that reverse text: none belongs in a name.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def escape(text: object) -> Html:
    """Text made safe for content and for attributes in double quotes."""
    if isinstance(text, Html):
        return text
    return Html(html.escape(_UNSEEN.sub("\ufffd", str(text)), quote=True))


def join(*parts: Content) -> Html:
    """Concatenate markup."""
    return Html("".join(_each(parts)))


def tag(name: str, /, *inside: Content, **attributes: object) -> Html:
    """An element. `class_` is class, `aria_label` is aria-label; attributes that are None or False are omitted."""
    head = name
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        head += f" {key}" if value is True else f' {key}="{escape(value)}"'
    content = "".join(_each(inside))
    if not content and name in _BARE:
        return Html(f"<{head}/>" if name in _SVG else f"<{head}>")
    return Html(f"<{head}>{content}</{name}>")


_SVG = frozenset({"rect", "line", "path", "circle", "polyline", "use"})
_BARE = _SVG | {"meta", "link", "br", "col", "img", "input"}


def _each(parts: Iterable[Content]) -> Iterable[str]:
    for part in parts:
        if part is None:
            continue
        if isinstance(part, str | int | float):
            yield escape(part)
        else:
            yield from _each(part)


def cut(text: str, length: int = 40) -> Html:
    """A name, shortened in the middle if it is long; the whole of it is in the tooltip."""
    if len(text) <= length:
        return escape(text)
    head = (length - 1) // 2
    return tag("span", f"{text[:head]}…{text[len(text) - (length - 1 - head) :]}", class_="cut", title=text)


def names(text: str, length: int = 90) -> Html:
    """A plan, or any comma-separated list, as code that wraps after commas only."""
    if len(text) > length:
        return tag("code", cut(text, length))
    return tag("code", Html(",<wbr>".join(map(escape, text.split(",")))))


def table(
    heads: Sequence[tuple[str, str]],
    rows: Iterable[Sequence[Content]],
    *,
    caption: str,
    total: Sequence[Content] = (),
    marked: int = -1,
    class_: str = "",
) -> Html:
    """A table that scrolls sideways on a narrow screen. `heads` are (text, class of the column); the first cell of a
    row is its header; row `marked` is highlighted; `total` is the last row."""

    def row(cells: Sequence[Content], mark: str | None = None) -> Html:
        return tag(
            "tr",
            *(
                tag("th" if i == 0 else "td", cell, scope="row" if i == 0 else None, class_=heads[i][1] or None)
                for i, cell in enumerate(cells)
            ),
            class_=mark,
        )

    body = [row(cells, "marked" if i == marked else None) for i, cells in enumerate(rows)]
    return tag(
        "div",
        tag(
            "table",
            tag("caption", caption, class_="unseen"),
            tag("thead", tag("tr", *(tag("th", text, scope="col", class_=kind or None) for text, kind in heads))),
            tag("tbody", *body),
            tag("tfoot", row(total)) if total else None,
            class_=class_ or None,
        ),
        class_="scroll",
        tabindex="0",
        role="region",
        aria_label=caption,
    )


def swatch(kind: str) -> Html:
    """A small square in the colour of a part in the drawings."""
    return tag("span", class_=f"swatch k-{kind}", aria_hidden="true")
