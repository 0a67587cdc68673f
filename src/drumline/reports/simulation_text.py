"""A simulated step as text for 40 columns and more: critical path, links, memory over time, failures, scaling."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from rich.console import RenderableType

from ..core.timeline import Timeline
from ..core.units import counted, format_bytes, format_count, format_rate, format_seconds
from ..costs.link_traffic import LinkLoad
from ..planner.scaling_curve import ScalingPoint
from ..simulator.critical_path import PathPart, path_in_words
from ..simulator.failures import FailureReplay
from ..simulator.memory_curve import StageMemory
from ..theory.checkpoint_interval import save_interval
from .console import NARROW, borderless_table
from .shown_stages import shown_stages

LEAST_SHARE = 0.005
"""Share of the step below which a kind on the critical path is not listed."""
_LEVELS = "_.:-=+*#"
"""Memory from the least to the most of all stages."""
_OWNERS = {"node": "a device", "network": "a node"}


def ranks_line(timeline: Timeline) -> str:
    """How many ranks are simulated, and how many of them are drawn."""
    drawn, whole = len(timeline.ranks), timeline.all_ranks
    spans = f"{len(timeline.spans)} spans"
    if drawn == whole:
        return f"{whole} rank{'s' if whole > 1 else ''}, {spans}"
    counts = set(timeline.rank_counts.values())
    if len(counts) == 1 and len(timeline.rank_counts) == drawn:
        return f"{whole} ranks: {drawn} drawn (x {counts.pop()} ranks that do the same), {spans}"
    return f"{whole} ranks: {drawn} drawn for all, {spans}"


def rate_line(samples: float | None, tokens: float | None, latency: float | None, mfu: float | None) -> str:
    """Throughput, latency of one batch and use of the devices, as far as they are known."""
    words = [f"{format_count(samples, 'samples')}/s"] if samples else []
    words += [f"{format_count(tokens, 'tokens')}/s"] if tokens else []
    words += [f"latency of one batch {format_seconds(latency)}"] if latency else []
    words += [f"MFU {100 * mfu:.1f}%"] if mfu else []
    return ", ".join(words)


def path_line(path: Sequence[PathPart]) -> str:
    """The critical path by kind, each with its share."""
    whole = sum(part.seconds for part in path)
    listed = [(words, s / whole) for words, s in path_in_words(path) if whole and s / whole >= LEAST_SHARE]
    return "critical path: " + "; ".join(f"{words} {100 * share:.0f}%" for words, share in listed)


def link_lines(links: Sequence[LinkLoad]) -> list[str]:
    """Each level of links: how busy it is, and with how many bytes."""
    return [
        f"{x.level} link ({format_rate(x.bandwidth)}) busy {100 * x.busy:.1f}% of the step: "
        f"{format_bytes(x.bytes)} sent by {_OWNERS[x.level]}"
        for x in links
    ]


def memory_lines(stages: Sequence[StageMemory], width: int) -> list[str]:
    """A line for each stage: its memory over the step, and its peak."""
    if not stages:
        return []
    least, most = min(min(s.bytes) for s in stages), max(s.peak for s in stages)
    room = max(10, min(60, width - 24))
    title = "memory over the step" + (", by stage" if len(stages) > 1 else "")
    lines = [f"{title} ({_LEVELS[0]} {format_bytes(least)} to {_LEVELS[-1]} {format_bytes(most)})"]
    for s in shown_stages(stages):
        name = f"stage {s.stage:<3} " if len(stages) > 1 else ""
        lines.append(f"  {name}{sparkline(s, room, least, most)} {format_bytes(s.peak)}")
    return lines


def sparkline(memory: StageMemory, room: int, least: float, most: float) -> str:
    """The largest memory in each of `room` equal parts of the step, each as a character between `least` and `most`."""
    end, range_ = memory.times[-1] or 1.0, (most - least) or 1.0
    marks = []
    for i in range(room):
        first = max(0, bisect_right(memory.times, end * i / room) - 1)
        last = bisect_right(memory.times, end * (i + 1) / room * (1 - 1e-12))
        value = max(memory.bytes[first : max(first + 1, last)])
        marks.append(_LEVELS[min(len(_LEVELS) - 1, int((value - least) / range_ * len(_LEVELS)))])
    return "".join(marks)


def failure_lines(f: FailureReplay, step: float) -> list[str]:
    """Days of training with failures: goodput, and where the rest of the time goes."""
    days = f.seconds / 86400
    steps = counted(round(f.interval / step), "step")
    bound = f.write > max(step, save_interval(f.stall, f.mtbf))
    why = "as often as the storage takes them" if bound else "Young/Daly"
    rate = f" at {format_rate(f.storage)}" if f.storage else ""
    return [
        f"{days:g} days, a device fails every {format_seconds(f.mtbf)}: {f.failures} failures, "
        f"goodput {100 * f.goodput:.1f}% ({100 * f.expected:.1f}% expected)",
        f"  a save every {format_seconds(f.interval)} ({steps}, {why}) stalls {format_seconds(f.stall)}, is stored "
        f"{format_seconds(f.write)} later{rate}; a restart takes {format_seconds(f.restart)}",
        f"  lost: {_share(f.repeated, f)} repeated work, {_share(f.restarting, f)} restarts, "
        f"{_share(f.saving, f)} saves",
    ]


def _share(seconds: float, f: FailureReplay) -> str:
    return f"{format_seconds(seconds)} ({100 * seconds / f.seconds:.1f}%)"


def sweep_table(points: Sequence[ScalingPoint], width: int) -> RenderableType:
    """One plan on several numbers of devices."""
    wide = width >= NARROW
    table = borderless_table(gap=2)
    for head in ("devices", "dp", *(("batch",) if wide else ()), "step", "samples", "eff."):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for p in points:
        dp = next((part[3:] for part in p.plan.split(",") if part.startswith("dp=")), "1")
        row = [str(p.devices), dp, *([str(p.batch_size)] if wide else [])]
        if p.samples_per_second:
            rate = f"{format_count(p.samples_per_second)}/s"
            row += [format_seconds(p.step_seconds), rate, f"{100 * p.efficiency:.0f}%"]
        else:
            row += ["", "", ""]
        table.add_row(*row, p.lacks)
    return table
