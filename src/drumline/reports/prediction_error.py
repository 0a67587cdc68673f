"""Prediction errors on the page: as a sentence, as a coloured sign, and as tables whose rows add up."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ..core.units import format_percent, format_seconds
from .markup import Content, Html, join, swatch, table, tag
from .run import Run
from .step_parts import PARTS, parts_of

NEAR, FAR = 0.10, 0.25
"""Errors up to the first are good, up to the second fair, above it poor."""

LEAST_DIFFERENCE = 0.0005
"""Smaller differences are not worth a word."""

MEMORY_PARTS = ("parameters", "gradients", "optimizer", "activations", "communication", "workspace", "other")


def verdict(run: Run) -> str:
    """One sentence: predicted, measured, and the error."""
    predicted = format_seconds(run.estimate.step_seconds)
    if run.time_error is None:
        return f"Predicted {predicted} a step; nothing was measured."
    return (
        f"Predicted {predicted} a step, measured {format_seconds(run.step_seconds)}: {time_in_words(run.time_error)}."
    )


def time_in_words(error: float) -> str:
    """The error of a predicted time, (predicted - measured) / measured, as what the run did: `6.8% slower than
    predicted`."""
    if (difference := measured_difference(error)) is None:
        return "nothing was predicted"
    if abs(difference) < LEAST_DIFFERENCE:
        return "as predicted, to 0.1%"
    if difference >= 1:
        return f"{1 + difference:.1f} times as long as predicted"
    if difference <= -0.5:
        return f"{1 / (1 + difference):.1f} times as fast as predicted"
    return f"{100 * abs(difference):.1f}% {'slower' if difference > 0 else 'faster'} than predicted"


def short_time_words(error: float) -> str:
    """`6.8% slower`: the same for a cell of a table, next to the prediction."""
    return time_in_words(error).removesuffix(" than predicted").removesuffix(" predicted").removesuffix(" as")


def memory_in_words(error: float) -> str:
    """The error of a predicted size as what the run needed: `8.2% more than predicted`."""
    if (difference := measured_difference(error)) is None:
        return "nothing was predicted"
    if abs(difference) < LEAST_DIFFERENCE:
        return "as predicted, to 0.1%"
    if difference >= 1:
        return f"{1 + difference:.1f} times as much as predicted"
    return f"{100 * abs(difference):.1f}% {'more' if difference > 0 else 'less'} than predicted"


def measured_difference(error: float | None) -> float | None:
    """(measured - predicted) / predicted of an error (predicted - measured) / measured: above zero the run took, or
    needed, more than predicted. None if nothing was measured, or predicted."""
    return 1 / (1 + error) - 1 if error is not None and error > -1 else None


def level(error: float | None, words: Callable[[float], str]) -> Html:
    """An error in words with a matching sign and colour; nothing if nothing was measured."""
    if error is None:
        return Html("")
    kind, sign = ("good", "●") if abs(error) <= NEAR else ("fair", "◆") if abs(error) <= FAR else ("poor", "▲")
    return tag("span", f"{sign} {words(error)}", class_=f"level {kind}")


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
        "are (measured - predicted) in percent of the predicted step, so the rows add up to the difference of the step."
    )
    if measured and abs(stretch - 1) > 0.005 and run.measured:
        note += f" The recorded step took {format_seconds(run.measured.seconds)}; its parts are scaled to the median."
    if not measured:
        note = "No step was recorded, so only the totals can be compared." if run.step_seconds else ""
    whole = (run.estimate.step_seconds, run.step_seconds)
    return join(
        _table("step", predicted, measured, whole, order=PARTS, unit=unit, words=("faster", "slower")),
        tag("p", note, class_="note") if note else None,
    )


def memory_table(run: Run) -> Html:
    """The peak memory by part."""
    whole = (run.estimate.memory_bytes, run.peak_bytes)
    unit = _byte_unit(max(whole))
    words = ("less", "more")
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
    """Part, predicted, measured, difference in percent of the predicted total, and that as a bar."""
    name, size, digits = unit
    total = whole[0]
    keys = list(ordered({k: 1.0 for k in (*predicted, *measured) if predicted.get(k) or measured.get(k)}, order))
    shares = {k: (measured.get(k, 0.0) - predicted.get(k, 0.0)) / total for k in keys} if measured and total else {}
    difference = (whole[1] - total) / total if total and whole[1] else None
    widest = max((abs(x) for x in (*shares.values(), difference or 0.0)), default=0.0)
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
        rows.append(row + [""] * (5 - len(row) if difference is not None else 0))
    last: list[Content] = [what, number(total)]
    heads = [(f"in {name}", "tight"), ("predicted", "num")]
    if difference is not None:
        last += [number(whole[1]), format_percent(difference), _bar(difference, edge)]
        heads += [("measured", "num"), ("of predicted", "num"), (_edges(words, edge), "bars")]
    caption = f"The {what} by part, predicted and measured"
    return table(heads, rows, caption=caption, total=last, class_="" if difference is not None else "narrow")


def _edges(words: tuple[str, str], edge: float) -> Html:
    percent = f"{100 * edge:g}%"
    return tag("span", tag("span", f"{percent} {words[0]}"), tag("span", f"{percent} {words[1]}"), class_="edges")


def _bar(share: float, edge: float) -> Html:
    """A bar from the middle: to the left less was measured than predicted, to the right more."""
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
