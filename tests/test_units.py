"""Units: text is parsed, formatted text is parsed back, invalid text is refused by name."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.core import units


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [
        ("80GB", 80e9),
        ("16 GiB", 16 * 2**30),
        ("200Gb", 25e9),
        ("1e9", 1e9),
        (5, 5.0),
        ("1 byte", 1.0),
        ("8bit", 1.0),
        (" 2.5 kB ", 2500.0),
        ("3KB", 3000.0),
        ("1_000B", 1000.0),
        ("-1B", -1.0),
        ("1Pi", 2.0**50),
        ("1EB", 1e18),
    ],
)
def test_bytes(text: str | float, bytes_: float) -> None:
    assert units.parse_bytes(text) == bytes_


@pytest.mark.parametrize(
    ("text", "rate"),
    [("400GB/s", 400e9), ("200Gb/s", 25e9), ("100Gbit/s", 12.5e9), ("100Gbps", 12.5e9), (7, 7.0), ("1GiB/s", 2.0**30)],
)
def test_bandwidth(text: str | float, rate: float) -> None:
    assert units.parse_bandwidth(text) == rate


@pytest.mark.parametrize(
    ("text", "rate"),
    [("989TFLOP/s", 989e12), ("15.7 TF", 15.7e12), ("2 PFLOPS", 2e15), (1e12, 1e12), ("3Gflops", 3e9), ("4T", 4e12)],
)
def test_flops(text: str | float, rate: float) -> None:
    assert units.parse_flops(text) == rate


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("3us", 3e-6), ("1.5ms", 1.5e-3), ("2min", 120.0), ("1h", 3600.0), ("5 ns", 5e-9), ("7µs", 7e-6), (0.5, 0.5)],
)
def test_seconds(text: str | float, seconds: float) -> None:
    assert units.parse_seconds(text) == pytest.approx(seconds, rel=1e-15)


@pytest.mark.parametrize(
    "text", ["", "GB", "abc", "1..2GB", "nan", "inf", "1e999", True, None, [1], math.inf, math.nan]
)
def test_not_a_number(text: object) -> None:
    for parse, kind in [
        (units.parse_bytes, "a size such as"),
        (units.parse_bandwidth, "a rate such as"),
        (units.parse_flops, "a rate such as"),
        (units.parse_seconds, "a time such as"),
    ]:
        with pytest.raises(ValueError, match=f"is not {kind}"):
            parse(text)  # type: ignore[arg-type]  # that is the point


@pytest.mark.parametrize(
    ("parse", "text", "words"),
    [
        (units.parse_bytes, "5 apples", "no known unit: write B or b"),
        (units.parse_bandwidth, "400GB", "is not a rate: write it per second"),
        (units.parse_bandwidth, "4 apples/s", "no known unit"),
        (units.parse_flops, "3 apples", "not a rate of operations such as 989TFLOP/s"),
        (units.parse_seconds, "3 weeks", "is not a time: the units are s, ms"),
    ],
)
def test_unknown_units(parse: object, text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse(text)  # type: ignore[operator]  # a function of the table


@pytest.mark.parametrize(
    ("printed", "text"),
    [
        (units.format_bytes(1.5 * 2**30), "1.50 GiB"),
        (units.format_bytes(12), "12 B"),
        (units.format_bytes(300 * 2**20), "300 MiB"),
        (units.format_count(6.74e9), "6.74 G"),
        (units.format_count(989e12, "FLOP/s"), "989 TFLOP/s"),
        (units.format_count(5), "5"),
        (units.format_count(0.5), "0.50"),
        (units.format_rate(450e9), "450 GB/s"),
        (units.format_seconds(0.0123), "12.3 ms"),
        (units.format_seconds(0), "0 s"),
        (units.format_seconds(7200), "2.00 h"),
        (units.format_seconds(180), "3.00 min"),
        (units.format_seconds(2e-8), "20.0 ns"),
        (units.format_percent(0.123), "+12.3%"),
        (units.format_percent(-1), "-100.0%"),
    ],
)
def test_formatting(printed: str, text: str) -> None:
    assert printed == text


@given(st.floats(1e-9, 1e17))
def test_formatted_text_is_parsed_back(x: float) -> None:
    assert units.parse_seconds(units.format_seconds(x)) == pytest.approx(x, rel=0.0051)
    if x >= 1:
        assert units.parse_bytes(units.format_bytes(x)) == pytest.approx(x, rel=0.0051, abs=0.5)
        assert units.parse_bandwidth(units.format_rate(x)) == pytest.approx(x, rel=0.0051)
        assert units.parse_flops(units.format_count(x, "FLOP/s")) == pytest.approx(x, rel=0.0051)


@pytest.mark.parametrize(
    ("text", "number"), [("13T", 13e12), ("300B", 3e11), ("1.5e12", 1.5e12), ("40k", 4e4), (7, 7.0)]
)
def test_counts(text: str | int, number: float) -> None:
    assert units.parse_count(text) == number


@pytest.mark.parametrize("text", ["13X", "many", "3GB", ""])
def test_not_a_count(text: str) -> None:
    with pytest.raises(ValueError, match="not a number such as 13T"):
        units.parse_count(text)


def test_shares_and_numbers_of_things() -> None:
    assert [units.format_percent(x) for x in (0.1234, -0.05, -1e-6, 0.0)] == ["+12.3%", "-5.0%", "+0.0%", "+0.0%"]
    assert [units.counted(n, "step") for n in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]
