"""The parts of the page about ranks that wait: seconds by rank, a histogram of staleness, charts over seconds."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.units import format_count, format_seconds
from .markup import Content, Html, join, table, tag
from .page_style import data_table
from .step_records import StepRecord
from .step_summaries import StalenessSummary, WaitSummary, staleness_summary, throughput, wait_summary
from .svg_bars import BarRow, bar_rows
from .svg_charts import LOSS_OUTLIER, SECONDS_AXIS, line_chart

MOST_BARS = 32
"""Ranks that are drawn; of more, those that waited longest and shortest."""
MOST_ROWS = 512
"""Ranks in a table."""
MOST_BINS = 16
"""Bars of a histogram; more values are put together."""
TABLE_ROWS = 20
"""Rows of the table of a chart."""


def waiting_parts(steps: Sequence[StepRecord]) -> list[tuple[str, str, Html]]:
    """(key, title, contents) of sections about ranks that wait and gradients that are late, where they were
    measured."""
    waits, stale = wait_summary(steps), staleness_summary(steps)
    sections = [("Waiting", "How long ranks waited for each other", waiting_section(waits, steps))] if waits else []
    return sections + ([("Staleness", "How stale the gradients were", staleness_section(stale))] if stale else [])


# ---- waiting


def waiting_section(waits: WaitSummary, steps: Sequence[StepRecord]) -> Html:
    """How long each rank waited, as bars and as a table, and which rank was slow."""
    return join(
        tag("p", " ".join(waiting_words(waits, steps)), class_="lead"),
        tag("figure", wait_bars(waits)),
        data_table(wait_table(waits)),
    )


def waiting_words(waits: WaitSummary, steps: Sequence[StepRecord]) -> list[str]:
    """Sentences about the waiting of a run."""
    share, most = waits.shares, waits.longest
    sentences = [
        f"Ranks waited for others {100 * waits.mean_share:.1f}% of the time; most of all rank {most}: "
        f"{format_seconds(waits.seconds[most])}, {100 * share[most]:.1f}%."
    ]
    if share[most] - share[waits.shortest] >= 0.02:
        sentences.append(f"Rank {waits.shortest} waited least: the others waited for it.")
    if waits.network_share is not None:
        sentences.append(f"Messages took another {100 * waits.network_share:.1f}%, with all ranks there.")
    last = next((s for s in reversed(steps) if s.slowest_rank is not None and s.slowest_factor is not None), None)
    if last is not None:
        what = "links" if last.slowest_phase == "network" else "own work"
        sentences.append(
            f"In the last comparison rank {last.slowest_rank} was slowest: its {what} took {last.slowest_factor:.2f} "
            f"times as long as the fastest rank's, mostly in {last.slowest_phase}."
        )
    return sentences


def wait_bars(waits: WaitSummary, *, most: float | None = None) -> Html:
    """The share of the time that each rank waited; `most` is the end of the scale."""
    order = _shown(waits)
    rows = [
        BarRow(f"rank {r}", waits.shares[r], f"{100 * waits.shares[r]:.1f}%, {format_seconds(waits.seconds[r])}")
        for r in order
    ]
    rest = len(waits.seconds) - len(order)
    note = f"{rest} more ranks waited longer than the last of these and shorter than the first." if rest else ""
    bars = bar_rows("Waiting by rank", rows, kind="communication", most=most)
    return join(bars, tag("p", note, class_="note") if note else None)


def _shown(waits: WaitSummary, most: int = MOST_BARS) -> list[int]:
    """The ranks to show: all by number, or the extremes, longest wait first."""
    ranks = range(len(waits.seconds))
    if len(ranks) <= most:
        return list(ranks)
    order = sorted(ranks, key=lambda r: -waits.seconds[r])
    return [*order[: most // 2], *order[-most // 2 :]]


def wait_table(waits: WaitSummary, *, most: int = MOST_ROWS) -> Html:
    """Seconds and share by rank; of more than `most` ranks, those that waited longest and shortest."""
    rows: list[list[Content]] = [
        [f"rank {r}", format_seconds(waits.seconds[r]), f"{100 * waits.shares[r]:.1f}%"] for r in _shown(waits, most)
    ]
    heads = (("", "tight"), ("waited", "num"), ("of the time", "num"))
    return table(heads, rows, caption="Waiting by rank", class_="narrow")


# ---- staleness


def staleness_section(stale: StalenessSummary) -> Html:
    """The histogram of staleness, its table, and the gradients of each worker."""
    workers = _worker_table(stale) if stale.workers and len(stale.workers) > 1 else None
    return join(
        tag("p", staleness_words(stale), class_="lead"),
        tag("figure", staleness_bars(stale)),
        data_table(staleness_table(stale)),
        join(tag("h3", "Gradients by worker"), workers) if workers else None,
    )


def staleness_words(stale: StalenessSummary) -> str:
    """Mean, maximum and number of gradients, in words."""
    fresh = stale.counts.get(0, 0) / stale.gradients
    text = (
        f"A gradient was applied to weights that were on average {stale.mean:.2f} updates newer than those it was "
        f"computed on, at most {stale.largest}. {100 * fresh:.1f}% of {stale.gradients} gradients were fresh."
    )
    return text + (f" {stale.dropped} came too late and were dropped." if stale.dropped else "")


def staleness_bins(stale: StalenessSummary, largest: int | None = None) -> list[tuple[str, int]]:
    """(values, gradients): one bin for each value from 0 to the largest, or ranges of equal width."""
    end = max(stale.largest, largest or 0) + 1
    width = -(-end // MOST_BINS)
    bins = []
    for low in range(0, end, width):
        high = low + width - 1
        count = sum(n for value, n in stale.counts.items() if low <= value <= high)
        bins.append((f"{low}" if width == 1 else f"{low} to {high}", count))
    return bins


def staleness_bars(stale: StalenessSummary, *, largest: int | None = None) -> Html:
    """Gradients by staleness, as shares of all of them."""
    total = stale.gradients
    rows = [
        BarRow(name, count / total, f"{100 * count / total:.1f}%, {count}")
        for name, count in staleness_bins(stale, largest)
    ]
    return bar_rows("Gradients by staleness", rows, kind="backward")


def staleness_table(stale: StalenessSummary) -> Html:
    """Gradients by staleness."""
    total = stale.gradients
    rows: list[list[Content]] = [[name, f"{n}", f"{100 * n / total:.1f}%"] for name, n in staleness_bins(stale)]
    heads = (("updates", "tight"), ("gradients", "num"), ("of all", "num"))
    return table(heads, rows, caption="Gradients by staleness", total=["all", f"{total}", "100%"], class_="narrow")


def _worker_table(stale: StalenessSummary) -> Html:
    assert stale.workers is not None
    total = stale.gradients
    rows: list[list[Content]] = [
        [f"worker {w}", f"{x.gradients}", f"{100 * x.gradients / total:.1f}%", f"{x.mean_staleness:.2f}"]
        for w, x in stale.workers.items()
    ]
    heads = (("", "tight"), ("gradients", "num"), ("of all", "num"), ("mean staleness", "num"))
    return table(heads, rows, caption="Gradients by worker", class_="narrow")


# ---- over the run's time


def time_charts(steps: Sequence[StepRecord]) -> list[Html]:
    """Loss and throughput over the seconds of the run; nothing if they were not recorded."""
    timed = [(s, s.elapsed) for s in steps if s.elapsed is not None]
    rates = throughput(steps)
    if len(timed) < 2 or not rates:
        return []
    loss = [(t, s.loss, f"{format_seconds(t)}, step {s.step}\nloss {s.loss:.5g}") for s, t in timed]
    rate = [(t, r, f"{format_seconds(t)}\n{format_count(r)} samples/s") for t, r in rates]
    seconds = f"over {format_seconds(timed[-1][1])}"
    return [
        tag(
            "figure",
            tag("h3", "Loss ", tag("small", seconds)),
            line_chart(
                "Loss over the seconds", loss, form=lambda v: f"{v:.4g}", axis=SECONDS_AXIS, outlier=LOSS_OUTLIER
            ),
        ),
        tag(
            "figure",
            tag("h3", "Throughput ", tag("small", "in samples/s over all ranks")),
            line_chart("Throughput over the seconds", rate, form=format_count, zero=True, axis=SECONDS_AXIS),
        ),
    ]


def steps_table(steps: Sequence[StepRecord]) -> Html:
    """Some steps, evenly chosen, with the numbers of the charts."""
    stride = max(1, -(-len(steps) // TABLE_ROWS))
    chosen = [*steps[:-1:stride], steps[-1]]
    rows: list[list[Content]] = [
        [
            s.step,
            format_seconds(s.elapsed) if s.elapsed is not None else "-",
            f"{s.loss:.5g}",
            format_seconds(s.seconds),
        ]
        for s in chosen
    ]
    heads = (("step", "num"), ("after", "num"), ("loss", "num"), ("step time", "num"))
    return table(heads, rows, caption="Some of the steps", class_="narrow")
