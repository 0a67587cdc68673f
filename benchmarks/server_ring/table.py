"""The table of benchmarks/server_or_ring.py: measured and predicted seconds, and where servers and a ring cross."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from drumline.clusters import Link
from drumline.core.units import format_bytes, format_rate, format_seconds
from drumline.theory.collective_forms import ring_all_reduce_seconds
from drumline.theory.parameter_server import crossing_bytes, server_exchange_seconds

TINY = 8
"""Bytes that take no time on the wire."""
UNITS = {"kbit": 125.0, "mbit": 125e3, "gbit": 125e6}


def bytes_per_second(rate: str) -> float:
    """Of a rate as `tc` writes it."""
    for unit, factor in UNITS.items():
        if rate.endswith(unit):
            return float(rate.removesuffix(unit)) * factor
    raise SystemExit(f"--rate {rate}: a number and one of {', '.join(UNITS)}")


@dataclass(frozen=True, slots=True)
class StartUps:
    """Parameters of a prediction."""

    ring: Link
    """Link of the ring's messages."""
    calls: Link
    """Link of remote calls."""
    port: Link
    """Port of a server."""
    exchange: float
    """Seconds of an exchange without bytes."""

    def ring_seconds(self, p: int, m: float) -> float:
        """Predict the seconds of an all-reduce."""
        return ring_all_reduce_seconds(p, m, self.ring)

    def server_seconds(self, p: int, n: int, m: float) -> float:
        """Predict the seconds of an exchange with n servers."""
        return server_exchange_seconds(p, m, self.calls, servers=n, server_link=self.port, start_up=self.exchange)

    def crossing(self, p: int, n: int) -> float:
        """Predict the size in bytes below which servers are faster."""
        return crossing_bytes(
            p, self.calls, servers=n, server_link=self.port, ring_link=self.ring, start_up=self.exchange
        )


def start_ups(result: dict[str, Any], n: int) -> dict[str, StartUps]:
    """The three kinds of start-up times (see server_or_ring.py), for n servers."""
    long, t = result["long"], result["medians"]
    message, call = t[f"trip {TINY}"] / 2, t[f"call{n} {TINY}"]
    ring_rate = (long - TINY) / (t[f"trip {long}"] / 2 - message)
    call_rate = (long - TINY) / n / (t[f"call{n} {long}"] - call)  # of the first server's share

    def measured(alpha: float, s: str) -> StartUps:
        call = t[f"call{s}{n} {TINY}"]
        others = t[f"other{s}{n} {TINY}"] if n > 1 else 0.0
        port = Link(call / 2, call_rate)
        exchange = 2 * call + 2 * others + result["updates"][str(n)]
        return StartUps(Link(alpha, ring_rate), Link(call / 2, call_rate), port, exchange)

    alone = Link(message, ring_rate)
    return {
        "one alpha": StartUps(alone, alone, alone, 2 * message),
        "alone": measured(message, ""),
        "all at once": measured(t[f"shift {TINY}"], "s"),
    }


def measured_crossing(sizes: Sequence[int], servers: Sequence[float], ring: Sequence[float]) -> float:
    """The size above which the ring is faster, interpolated in the logarithms of sizes and seconds.

    0 if the ring is always faster, infinite if it is not faster even at the largest size.
    """
    ahead = [math.log(r / s) for s, r in zip(servers, ring, strict=True)]
    if ahead[-1] >= 0:
        return math.inf
    last = max((i for i, a in enumerate(ahead) if a >= 0), default=-1)
    if last < 0:
        return 0.0
    share = ahead[last] / (ahead[last] - ahead[last + 1])
    return float(math.exp(math.log(sizes[last]) + share * math.log(sizes[last + 1] / sizes[last])))


def table_lines(results: Sequence[dict[str, Any]]) -> list[str]:
    """Format the crossings of all cases, then the seconds of each."""
    head = ("rate", "workers", "servers", "measured", "one alpha", "alone", "all at once", "measured / all at once")
    lines = [f"| {' | '.join(head)} |", "|---" + "|---:" * (len(head) - 1) + "|"]
    for result in results:
        lines += [crossing_row(result, n) for n in result["servers"]]
    for result in results:
        lines += ["", *seconds_of(result)]
    return lines


def crossing_row(result: dict[str, Any], n: int) -> str:
    """Where n servers and the ring cross, measured and predicted."""
    p, sizes, t = result["workers"], result["sizes"], result["medians"]
    measured = measured_crossing(sizes, [t[f"server{n} {m}"] for m in sizes], [t[f"ring {m}"] for m in sizes])
    predicted = [kind.crossing(p, n) for kind in start_ups(result, n).values()]
    cells = [
        result["rate"],
        str(p),
        str(n),
        size_text(measured, sizes[0], sizes[-1]),
        *(size_text(x, 0, math.inf) for x in predicted),
        ratio_text(measured, predicted[-1], sizes[0], sizes[-1]),
    ]
    return f"| {' | '.join(cells)} |"


def ratio_text(measured: float, predicted: float, least: float, most: float) -> str:
    """Measured / predicted; a bound where the crossing is outside of the sizes, or that both are there."""
    if measured == 0:
        return "both below" if predicted < least else f"< {least / predicted:.2f}"
    if measured == math.inf:
        return "both above" if predicted > most else f"> {most / predicted:.2f}" if predicted else "none predicted"
    return f"{measured / predicted:.2f}" if predicted else "none predicted"


def size_text(size: float, least: float, most: float) -> str:
    """A crossing, or that there is none between two sizes."""
    if size == 0:
        return f"below {format_bytes(least)}" if least else "never"
    if size == math.inf:
        return f"above {format_bytes(most)}" if most < math.inf else "always"
    return format_bytes(size)


def seconds_of(result: dict[str, Any]) -> list[str]:
    """Seconds of every size, measured and predicted with the start-up times of all at once."""
    p, servers, t = result["workers"], result["servers"], result["medians"]
    kinds = {n: start_ups(result, n) for n in servers}
    names = [f"{n} server{'s' if n > 1 else ''}" for n in servers]
    head = ["bytes", *(cell for name in ("ring", *names) for cell in (name, "predicted", "error"))]
    priority = " (real-time priority)" if result["realtime"] else ""
    lines = [
        f"{p} workers, {result['rate']}, {result['rounds']} rounds, load average {result['load']:.1f}{priority}. "
        + links_text(result, kinds),
        "",
        f"| {' | '.join(head)} |",
        "|---:" * len(head) + "|",
    ]
    for m in result["sizes"]:
        pairs = [(t[f"ring {m}"], kinds[servers[0]]["all at once"].ring_seconds(p, m))]
        pairs += [(t[f"server{n} {m}"], kinds[n]["all at once"].server_seconds(p, n, m)) for n in servers]
        cells = [f"{m:,}"]
        for measured, predicted in pairs:
            cells += [format_seconds(measured), format_seconds(predicted), f"{predicted / measured - 1:+.0%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def links_text(result: dict[str, Any], kinds: dict[int, dict[str, StartUps]]) -> str:
    """The measured links, in words."""
    t, first = result["medians"], kinds[result["servers"][0]]["alone"]
    parts = [
        f"Message of the ring {format_seconds(first.ring.alpha)}, all at once {format_seconds(t[f'shift {TINY}'])}, "
        f"{format_rate(first.ring.bandwidth)}; remote calls {format_rate(first.calls.bandwidth)}"
    ]
    for n in result["servers"]:
        words = [f"{n} server{'s' if n > 1 else ''}: call {_both(t, f'call{{}}{n} {TINY}')}"]
        words += [f"calls to the others {_both(t, f'other{{}}{n} {TINY}')}"] if n > 1 else []
        parts.append(", ".join([*words, f"update {format_seconds(result['updates'][str(n)])}"]))
    return "; ".join(parts) + "."


def _both(times: dict[str, float], name: str) -> str:
    """Alone, and all at once."""
    alone, together = times[name.format("")], times[name.format("s")]
    return f"{format_seconds(alone)}, all at once {format_seconds(together)}"
