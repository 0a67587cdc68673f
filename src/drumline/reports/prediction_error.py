"""Prediction errors on the page: as a sentence, as a coloured sign, and as tables whose rows add up."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..core.units import format_percent, format_seconds
from .markup import Content, Html, join, swatch, table, tag
from .run import Run
from .step_parts import PARTS, parts_of

NEAR, FAR = 0.10, 0.25
"""Errors up to the first are good, up to the second fair, above it poor."""

MEMORY_PARTS = ("parameters", "gradients", "optimizer", "activations", "communication", "workspace", "other")


def verdict(run: Run) -> str:
    """One sentence: predicted, measured, and the error."""
    predicted = format_seconds(run.estimate.step_seconds)
    if run.time_error is None:
        return f"Predicted {predicted} a step; nothing was measured."
    return f"Predicted {predicted} a step, measured {format_seconds(run.step_seconds)}: {in_words(run.time_error)}."


def in_words(error: float, low: str = "too fast", high: str = "too slow") -> str:
    """`6.4% too fast`: the signed error of a prediction in words."""
    if abs(error) < 0.0005:
        return "correct to 0.1%"
    size = f"{100 * abs(error):.1f}%" if abs(error) < 1 else f"{1 + error:.1f} times" if error > 0 else "100%"
    return f"{size} {low if error < 0 else high}"


def level(error: float | None, low: str, high: str) -> Html:
    """An error in words with a matching sign and colour; nothing if nothing was measured."""
    if error is None:
        return Html("")
    kind, sign = ("good", "●") if abs(error) <= NEAR else ("fair", "◆") if abs(error) <= FAR else ("poor", "▲")
    return tag("span", f"{sign} {in_words(error, low, high)}", class_=f"level {kind}")


def time_table(run: Run) -> Html:
    """The step by part."""
    predicted = run.estimate.parts
    recorded = parts_of(run.measured) if run.measured and run.step_seconds else {}
    # Only one step is recorded: its parts are scaled to the median step, which was predicted.
    stretch = run.step_seconds / sum(recorded.values()) if recorded else 1.0
    measured = {k: v * stretch for k, v in recorded.items()}
    unit = _time_unit(max(run.estimate.step_seconds, run.step_seconds))
    note = (
        "Communication is the part not hidden by computation; overhead is loading, waiting and the rest. Differences "
        "are (predicted - measured) in percent of the measured step, so the rows add up to the error of the step."
    )
    if measured and abs(stretch - 1) > 0.005 and run.measured:
        note += f" The recorded step took {format_seconds(run.measured.seconds)}; its parts are scaled to the median."
    if not measured:
        note = "No step was recorded, so only the totals can be compared." if run.step_seconds else ""
    whole = (run.estimate.step_seconds, run.step_seconds)
    return join(
        _table("step", predicted, measured, whole, order=PARTS, unit=unit, words=("too fast", "too slow")),
        tag("p", note, class_="note") if note else None,
    )


def memory_table(run: Run) -> Html:
    """The peak memory by part."""
    whole = (run.estimate.memory_bytes, run.peak_bytes)
    unit = _byte_unit(max(whole))
    words = ("too low", "too high")
    return _table(
        "peak", run.estimate.memory_parts, run.memory_parts, whole, order=MEMORY_PARTS, unit=unit, words=words
    )


def ordered(parts: dict[str, float], order: Sequence[str]) -> dict[str, float]:
    """The parts that are not zero, in the given order; others follow."""
    return {k: parts[k] for k in (*order, *sorted(set(parts) - set(order))) if parts.get(k)}


def time_unit(most: float) -> tuple[str, float]:
    """The unit of a column of times, and its size in seconds."""
    return next(((u, k) for u, k in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)) if most >= k), ("ns", 1e-9))


Unit = tuple[str, float, int]
"""Name, size, digits after the point."""


def _time_unit(most: float) -> Unit:
    unit, scale = time_unit(most)
    x = most / scale
    return unit, scale, 1 if x >= 100 else 2 if x >= 10 else 3


def _byte_unit(most: float) -> Unit:
    k = max(0, min(4, int(math.log2(max(most, 1)) // 10)))
    scale = 2.0 ** (10 * k)
    return ("B", "KiB", "MiB", "GiB", "TiB")[k], scale, 0 if k == 0 else 1 if most >= 10 * scale else 2


def _table(
    what: str,
    predicted: dict[str, float],
    measured: dict[str, float],
    whole: tuple[float, float],
    *,
    order: Sequence[str],
    unit: Unit,
    words: tuple[str, str],
) -> Html:
    """Part, predicted, measured, difference in percent of the measured total, and that as a bar."""
    name, size, digits = unit
    total = whole[1]
    keys = list(ordered({k: 1.0 for k in (*predicted, *measured) if predicted.get(k) or measured.get(k)}, order))
    shares = {k: (predicted.get(k, 0.0) - measured.get(k, 0.0)) / total for k in keys} if measured and total else {}
    error = (whole[0] - total) / total if total else None
    widest = max((abs(x) for x in (*shares.values(), error or 0.0)), default=0.0)
    edge = next((x for x in (0.05, 0.1, 0.25, 0.5, 1.0) if widest <= x), 1.0)

    def number(x: float) -> str:
        return f"{x / size:.{digits}f}"

    rows: list[list[Content]] = []
    for k in keys:
        row: list[Content] = [join(swatch(k), k), number(predicted.get(k, 0.0))]
        if measured:
            row.append(number(measured.get(k, 0.0)))
        if shares:
            row += [format_percent(shares[k]), _bar(shares[k], edge)]
        rows.append(row + [""] * (5 - len(row) if error is not None else 0))
    last: list[Content] = [what, number(whole[0])]
    heads = [(f"in {name}", "tight"), ("predicted", "num")]
    if error is not None:
        last += [number(total), format_percent(error), _bar(error, edge)]
        heads += [("measured", "num"), (f"of {what}", "num"), (_edges(words, edge), "bars")]
    caption = f"The {what} by part, predicted and measured"
    return table(heads, rows, caption=caption, total=last, class_="" if error is not None else "narrow")


def _edges(words: tuple[str, str], edge: float) -> Html:
    percent = f"{100 * edge:g}%"
    return tag("span", tag("span", f"{percent} {words[0]}"), tag("span", f"{percent} {words[1]}"), class_="edges")


def _bar(share: float, edge: float) -> Html:
    """A bar from the middle: to the left the prediction is too low, to the right too high."""
    size = min(1.0, abs(share) / edge) * 50
    x = 50 - size if share < 0 else 50
    return tag(
        "svg",
        tag("rect", x=f"{x:.2f}%", y=4, width=f"{size:.2f}%", height=9, class_="under" if share < 0 else "over"),
        tag("line", x1="50%", x2="50%", y1=0, y2=17, class_="rule"),
        width="100%",
        height=17,
        aria_hidden="true",
    )
