"""Schedules as pages that play: what every rank holds after each round of a collective; a pipeline over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

from ..core.errors import InputError
from ..core.timeline import Span, Timeline
from ..core.units import format_seconds
from ..schedules import Pipeline, Schedule, Send, contents, messages
from ..schedules.contracts import pair
from .markup import Content, Html, join, swatch, tag
from .player import player_page
from .schedule_text import legend_lines, message_text, number_runs, signal_text

LARGEST_PAGE = 1_000_000
"""Bytes of a page."""
MOST_CELLS = 60_000
"""Cells of all steps of a collective, above which a page is refused before it is made."""
MOST_ACTIONS = 4_000
"""Actions of a pipeline, above which a page is refused before it is made."""

_ROW, _WIDE, _HIGH = 34, 54, 28
_LABEL = 58
_UNIT = 30
"""Pixels of one unit of time."""


def collective_page(schedule: Schedule, *, where: str, seconds: float) -> Html:
    """The page of a collective; `where` and `seconds` are of its replay."""
    cells = (schedule.count_rounds() + 1) * schedule.p * schedule.chunks
    name = f"{schedule.name} over {schedule.p} ranks"
    if cells > MOST_CELLS:
        raise _too_large(name, f"{cells:,} cells", f"at most {MOST_CELLS:,} cells", "fewer --ranks")
    drawing = _CollectiveDrawing(schedule)
    steps = [drawing.step(k, sends, state) for k, (sends, state) in enumerate(contents(schedule))]
    empty = schedule.collective == "barrier"
    legend = tag(
        "ul",
        tag("li", swatch("forward"), "contributions that a chunk contains, by rank"),
        tag("li", swatch("optimizer"), "of all ranks"),
        tag("li", swatch("communication"), "received in this round"),
        class_="legend",
    )
    facts = join(
        tag("p", f"{str(schedule).partition(': ')[2]}. {where}: {format_seconds(seconds)}.", class_="lead"),
        tag("p", "; ".join(legend_lines(schedule)), class_="note"),
        None if empty else legend,
    )
    text = schedule.contract.text
    page = player_page(name, text[0].upper() + text[1:] + ".", facts, drawing.symbols(), steps, _FOOT)
    return _checked(page, name, "fewer --ranks")


_FEWER = "fewer --micro or --ranks"
_FOOT = "Drumline. Drawn from the schedule that the communicator runs and the planner prices."


class _CollectiveDrawing:
    """The frames of one collective; equal cells are drawn once and used by reference."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.rounds = schedule.count_rounds()
        self.cells: dict[tuple[int, ...], int] = {}
        self.reach = 22 + 5 * min(schedule.p, 14)
        """Width of the arcs next to the ranks."""

    def step(self, k: int, sends: tuple[Send, ...], state: dict[tuple[int, int], tuple[int, ...]]) -> Html:
        """One step of the list: the messages of a round, and what the ranks hold after it."""
        s = self.schedule
        name = f"round {k} of {self.rounds}" if k else "start"
        write = signal_text if s.collective == "barrier" else message_text
        sent = [write(parts) for parts in messages(sends).values()]
        width = self.reach + _LABEL + s.chunks * _WIDE + 4
        height = 20 + s.p * _ROW
        used = [
            tag("use", href=f"#c{self._cell(ranks)}", x=self._x(chunk), y=self._y(rank))
            for (rank, chunk), ranks in sorted(state.items())
        ]
        svg = tag(
            "svg",
            tag("title", f"After {name}" if k else "Before the first round"),
            tag("use", href="#grid"),
            *used,
            *self._marks(sends),
            *self._arrows(sends),
            width=width,
            height=height,
            role="img",
            class_="fixed",
        )
        text = tag("p", "; ".join(sent), class_="sends") if sent else tag("p", "No message yet.", class_="note")
        head = f"Round {k} of {self.rounds}" if k else "Start"
        label = f"Ranks and chunks after {name}" if k else "Ranks and chunks at the start"
        pan = tag("div", svg, class_="pan", tabindex="0", role="region", aria_label=label)
        return tag("li", tag("h3", head), text, pan, class_="step", data_name=name)

    def symbols(self) -> Html:
        """The cells and the empty grid, to be used by the steps."""
        s = self.schedule
        grid = [
            tag("text", self._head(c), x=self._x(c) + _WIDE / 2 - 2, y=13, text_anchor="middle")
            for c in range(s.chunks)
            if s.collective != "barrier"
        ]
        for rank in range(s.p):
            grid.append(tag("text", f"rank {rank}", x=self.reach + 4, y=self._y(rank) + 18, class_="strong"))
            row = tag(
                "path",
                d="".join(f"M{self._x(c)} {self._y(rank)}h{_WIDE - 4}v{_HIGH}h-{_WIDE - 4}z" for c in range(s.chunks)),
                class_="cell",
            )
            grid.append(row)
        drawn = [tag("g", *grid, id="grid")]
        drawn += [self._symbol(ranks, number) for ranks, number in self.cells.items()]
        return tag("svg", tag("defs", *drawn), width=0, height=0, aria_hidden="true", class_="unseen")

    def _head(self, chunk: int) -> str:
        """The name of a chunk: its number, and whose block it is."""
        s = self.schedule
        if s.contract.chunk_names == "pairs":
            src, dst = pair(s, chunk)
            return f"{chunk}: {src}\u2192{dst}"
        return f"chunk {chunk}" if s.chunks <= 12 else str(chunk)

    def _cell(self, ranks: tuple[int, ...]) -> int:
        return self.cells.setdefault(ranks, len(self.cells))

    def _symbol(self, ranks: tuple[int, ...], number: int) -> Html:
        """A bar with a segment for each rank, and the ranks in numbers."""
        p, wide = self.schedule.p, _WIDE - 8
        part = wide / p
        bars = "".join(
            f"M{2 + r * part:.2f} 3h{max(part - 0.6, 0.6):.2f}v8h-{max(part - 0.6, 0.6):.2f}z" for r in ranks
        )
        text = "all" if len(ranks) == p and p > 1 else number_runs(list(ranks))
        text = text if len(text) <= 9 else f"{len(ranks)} of {p}"
        kind = "full" if len(ranks) == p else "have"
        return tag(
            "g",
            tag("path", d=bars, class_=kind),
            tag("text", text, x=_WIDE / 2 - 2, y=23, class_="what"),
            id=f"c{number}",
        )

    def _marks(self, sends: tuple[Send, ...]) -> list[Html]:
        """Outlines of the chunks that were sent, and of those that were received."""
        if self.schedule.collective == "barrier":
            return []
        box = {"width": _WIDE - 4, "height": _HIGH}
        sent = dict.fromkeys((s.src, s.chunk) for s in sends)
        got = dict.fromkeys((s.dst, s.chunk) for s in sends)
        marks = [tag("rect", x=self._x(c), y=self._y(r), class_="sent", **box) for r, c in sent if (r, c) not in got]
        return marks + [tag("rect", x=self._x(c), y=self._y(r), class_="got", **box) for r, c in got]

    def _arrows(self, sends: tuple[Send, ...]) -> list[Html]:
        """An arc for each message, from the row of its sender to that of its receiver."""
        drawn = []
        for src, dst in messages(sends):
            start, end = self._y(src) + 14, self._y(dst) + 14
            bulge = self.reach - 8 - min(self.reach - 12, 10 + 5 * abs(src - dst))
            path = f"M{self.reach} {start}C{bulge} {start} {bulge} {end} {self.reach - 5} {end}"
            drawn.append(tag("path", d=path, pathLength=1, class_="move"))
            drawn.append(tag("path", d=f"M{self.reach - 6} {end - 4}l7 4l-7 4z", class_="head"))
        return drawn

    def _x(self, chunk: int) -> int:
        return self.reach + _LABEL + chunk * _WIDE

    def _y(self, rank: int) -> int:
        return 20 + rank * _ROW


# ---- pipelines


def pipeline_page(pipeline: Pipeline, timeline: Timeline, *, bubble: float, notes: Sequence[str] = ()) -> Html:
    """The page of a pipeline order over its replay, in which a micro-batch takes a rank 1 forward and 2 backward."""
    name = f"{pipeline.name}: {pipeline.stages} stages on {len(pipeline.lanes)} ranks, {pipeline.micros} micro-batches"
    if len(timeline.spans) > MOST_ACTIONS:
        raise _too_large(name, f"{len(timeline.spans):,} actions", f"at most {MOST_ACTIONS:,} actions", _FEWER)
    spans = sorted(timeline.spans, key=lambda s: (s.start, s.rank))
    moments = sorted({s.start for s in spans})
    steps = [_moment(pipeline, spans, t) for t in moments]
    steps.append(_moment(pipeline, spans, timeline.seconds, last=True))
    lead = f"Ranks wait {100 * bubble:.1f}% of the time."
    legend = tag(
        "ul",
        tag("li", swatch("forward"), "forward (F)"),
        tag("li", swatch("backward"), "backward (B)"),
        tag("li", swatch("activations"), "backward for weights (W)") if pipeline.splits_backward else None,
        tag("li", swatch("optimizer"), "update (U)") if any(s.name[0] == "U" for s in spans) else None,
        class_="legend",
    )
    halves = " (B and W 1 each)" if pipeline.splits_backward else ""
    text = (
        f"Of a micro-batch, a rank's forward takes 1 unit of time and its backward 2{halves}. Stored are activations, "
        "each of one stage and one micro-batch, until the last backward that needs them."
    )
    facts = join(tag("p", " ".join([text, *notes]), class_="lead"), legend)
    page = player_page(name, lead, facts, _lanes(pipeline, spans, timeline.seconds), steps, _FOOT)
    return _checked(page, name, _FEWER)


def _lanes(pipeline: Pipeline, spans: list[Span], seconds: float) -> Html:
    """All actions on the lanes of the ranks."""
    place = _scale(pipeline)
    names = [tag("text", f"rank {r}", x=0, y=40 + r * _ROW, class_="strong") for r in range(len(pipeline.lanes))]
    drawn = []
    for t in range(0, int(seconds) + 1, 5 if seconds <= 80 else 10):
        drawn.append(tag("text", t, x=place(t), y=13, text_anchor="middle" if t else "start"))
    for s in spans:
        x, wide = place(s.start), place(s.end) - place(s.start)
        y = 22 + s.rank * _ROW
        kind = _KINDS[s.name[0]]
        name = s.name if 6.4 * len(s.name) <= wide else s.name.partition("@")[0]
        written = tag("text", name, x=f"{x + wide / 2:g}", y=y + 18, class_=f"act k-{kind}")
        rect = tag(
            "rect",
            tag("title", f"{s.name}, rank {s.rank}\ntime {s.start:g} to {s.end:g}"),
            x=f"{x:g}",
            y=y,
            width=f"{wide:g}",
            height=_HIGH,
            class_=f"s room k-{kind}",
        )
        drawn.append(tag("g", rect, written, data_start=f"{s.start:g}", data_end=f"{s.end:g}"))
    height = 26 + len(pipeline.lanes) * _ROW
    drawn.append(tag("line", x1=place(0), x2=place(0), y1=16, y2=height, class_="clock"))
    svg = tag(
        "svg",
        tag("title", str(pipeline)),
        *drawn,
        width=f"{place(seconds) + 4:g}",
        height=height,
        role="img",
        class_="fixed",
    )
    label = "Actions of the ranks over time"
    left = tag("svg", *names, width=_LABEL, height=height, aria_hidden="true")
    pan = tag("div", svg, class_="pan", tabindex="0", role="region", aria_label=label)
    return tag("figure", tag("div", left, pan, class_="pair"))


_KINDS = {"F": "forward", "B": "backward", "W": "activations", "U": "optimizer"}


def _scale(pipeline: Pipeline) -> Callable[[float], float]:
    """Time -> pixels from the left. Stages of one rank share its unit of time, which is wider if there are several."""
    unit = _UNIT * pipeline.stages / len(pipeline.lanes)
    return lambda t: 1 + t * unit


def _moment(pipeline: Pipeline, spans: list[Span], t: float, *, last: bool = False) -> Html:
    """One step of the list: what each rank does at a time, and how many micro-batches it stores."""
    running = {s.rank: s for s in spans if s.start <= t < s.end}
    stored = stored_micro_batches(pipeline, spans, t)
    rows = []
    for rank in range(len(pipeline.lanes)):
        action = running.get(rank)
        what = f"runs {action.name}" if action else "is idle"
        rows.append(f"rank {rank} {what}, stores {stored[rank]}")
    name = f"time {_fraction(t)}" + (", the end" if last else "")
    note: Content = tag("p", "; ".join(rows), class_="sends")
    head = name[0].upper() + name[1:]
    moment = {"data_name": name, "data_time": f"{t:g}", "data_x": f"{_scale(pipeline)(t):g}"}
    return tag("li", tag("h3", head), note, class_="step", **moment)


def stored_micro_batches(pipeline: Pipeline, spans: Sequence[Span], t: float) -> list[int]:
    """By rank: activations alive at a time, one for each stage and micro-batch, from F until the last backward ends."""
    last = "W" if pipeline.splits_backward else "B"
    counts = [0] * len(pipeline.lanes)
    for s in spans:
        if s.name[0] == "F" and s.start <= t:
            counts[s.rank] += 1
        elif s.name[0] == last and s.end <= t:
            counts[s.rank] -= 1
    return counts


def _fraction(t: float) -> str:
    """A time in whole units and simple fractions."""
    value = Fraction(t).limit_denominator(64)
    return f"{t:g}" if value.denominator in (1, 2, 4, 5) else f"{float(value):.2f}"


def _checked(page: Html, name: str, fix: str) -> Html:
    size = len(page.encode())
    if size > LARGEST_PAGE:
        raise _too_large(name, f"{size / 1e6:.1f} MB", f"at most {LARGEST_PAGE / 1e6:g} MB", fix)
    return page


def _too_large(name: str, size: str, rule: str, fix: str) -> InputError:
    return InputError(f"--page: {name} is too large to draw, {size}", rule=f"a page has {rule}", fix=fix)
