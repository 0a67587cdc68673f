"""Bytes, operations, seconds and rates: parsed from text and formatted for reading."""

from __future__ import annotations

import math
import re

_SI = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0}
_NUMBER = re.compile(r"\s*([+-]?[0-9._]+(?:[eE][+-]?\d+)?)\s*(.*?)\s*\Z")


def parse_bytes(text: str | float) -> float:
    """`80GB`, `16 GiB`, `200Gb` (bits) or a plain number of bytes."""
    number, unit = _split(text, "a size such as 80GB, 16GiB or 1e9")
    return number * _byte_unit(unit, text)


def parse_bandwidth(text: str | float) -> float:
    """`400GB/s`, `200Gb/s`, `100Gbit/s`, or a plain number of bytes per second."""
    number, unit = _split(text, "a rate such as 400GB/s or 200Gb/s")
    if unit and not unit.endswith("/s") and not unit.endswith("ps"):
        raise ValueError(f"{text!r} is not a rate: write it per second, such as 400GB/s or 200Gb/s")
    return number * _byte_unit(re.sub(r"(/s|ps)\Z", "", unit), text)


def parse_flops(text: str | float) -> float:
    """`989TFLOP/s`, `15.7 TF`, or a plain number of operations per second."""
    number, unit = _split(text, "a rate such as 989TFLOP/s")
    match = re.fullmatch(r"([kKMGTPE]?)(?:F|FLOPs?|FLOPS|flops?)?(?:/s)?", unit)
    if not match:
        raise ValueError(f"{text!r} is not a rate of operations such as 989TFLOP/s")
    return number * _SI[match[1]]


def parse_seconds(text: str | float) -> float:
    """`3us`, `1.5ms`, `2min`, or a plain number of seconds."""
    number, unit = _split(text, "a time such as 3us or 1.5ms")
    if unit and unit not in _SECONDS:
        raise ValueError(f"{text!r} is not a time: the units are {', '.join(_SECONDS)}")
    return number * _SECONDS.get(unit, 1.0)


def parse_count(text: str | float) -> float:
    """`13T`, `300B`, `1.5M` or a plain number: a count."""
    number, unit = _split(text, "a number such as 13T, 300B or 1.5e12")
    scale = {**_SI, "B": 1e9}.get(unit)
    if scale is None:
        raise ValueError(f"{text!r} is not a number such as 13T, 300B or 1.5e12")
    return number * scale


def format_bytes(n: float) -> str:
    """`1.50 GiB`: binary units, three digits."""
    for unit, scale in (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10)):
        if abs(n) >= scale:
            return f"{_digits(n / scale)} {unit}"
    return f"{n:.0f} B"


def format_count(n: float, unit: str = "") -> str:
    """`6.74 G`, `989 TFLOP/s`: decimal prefixes, three digits."""
    for prefix, scale in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(n) >= scale:
            return f"{_digits(n / scale)} {prefix}{unit}"
    return f"{n:.0f} {unit}".rstrip() if n == int(n) else f"{_digits(n)} {unit}".rstrip()


def format_rate(bytes_per_second: float) -> str:
    """`450 GB/s`: decimal prefixes, as data sheets print it."""
    return format_count(bytes_per_second, "B/s")


def format_seconds(t: float) -> str:
    """`12.3 ms`: three digits in the unit that fits."""
    if t == 0:
        return "0 s"
    if abs(t) >= 3600:
        return f"{_digits(t / 3600)} h"
    if abs(t) >= 120:
        return f"{_digits(t / 60)} min"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(t) >= scale:
            return f"{_digits(t / scale)} {unit}"
    return f"{_digits(t / 1e-9)} ns"


def format_percent(fraction: float) -> str:
    """`+12.3%`: a signed share. What rounds to zero has no minus."""
    return f"{round(100 * fraction, 1) + 0.0:+.1f}%"


def counted(n: int, word: str) -> str:
    """`1 step`, `3 steps`."""
    return f"{n} {word}{'s' * (n != 1)}"


def _split(text: str | float, kind: str) -> tuple[float, str]:
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        raise ValueError(f"{text!r} is not {kind}")
    if isinstance(text, int | float):
        if not math.isfinite(text):
            raise ValueError(f"{text} is not {kind}")
        return float(text), ""
    match = _NUMBER.match(text)
    try:
        number = float(match[1]) if match else math.nan
    except ValueError:
        number = math.nan
    if not match or not math.isfinite(number):
        raise ValueError(f"{text!r} is not {kind}")
    return number, match[2]


def _byte_unit(unit: str, text: str | float) -> float:
    match = re.fullmatch(r"((?:[KMGTP]i)|[kKMGTPE]?)(B|bytes?|b|bit|bits)?", unit)
    if not match:
        raise ValueError(f"{text!r} has no known unit: write B or b (bits) with k, M, G, T or Ki, Mi, Gi, Ti")
    scale = _SI.get(match[1]) or _BINARY[match[1]]
    return scale / 8 if match[2] in ("b", "bit", "bits") else scale


def _digits(x: float) -> str:
    """Three significant digits, without an exponent and without trailing noise."""
    if abs(x) >= 100:
        return f"{x:.0f}"
    if abs(x) >= 10:
        return f"{x:.1f}"
    return f"{x:.2f}"
