"""docs/pipelines.md shows what the code draws and counts; the table of orders is narrow."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rich.console import Console

from drumline.clusters import load
from drumline.costs.collectives import flops_per_byte
from drumline.costs.pipeline_clock import idle_seconds
from drumline.plans import Plan
from drumline.reports.schedule_text import draw_pipeline, order_rows, orders_table
from drumline.schedules import ORDERS, pipeline_order, prove_pipeline

PAGE = (Path(__file__).parents[2] / "docs" / "pipelines.md").read_text()
BLOCKS = re.findall(r"<!-- (orders|picture|unequal) ?(.*?) ?-->\n(.*?)\n<!-- end -->", PAGE, re.S)
PICTURES = [(words.split(), text) for kind, words, text in BLOCKS if kind == "picture"]


def block(kind: str) -> list[list[str]]:
    """The cells of a table of the page, without its header."""
    (text,) = [text for block, _, text in BLOCKS if block == kind]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]


@pytest.mark.parametrize(("words", "text"), PICTURES, ids=[" ".join(words) for words, _ in PICTURES])
def test_drawings_match_the_code(words: list[str], text: str) -> None:
    name, p, m, v = words
    drawn = draw_pipeline(pipeline_order(name, int(p), int(m), int(v)), width=100)
    assert text.splitlines() == [f"    {line}" for line in drawn.splitlines()]


def test_every_order_has_its_picture() -> None:
    assert {words[0] for words, _ in PICTURES} == set(ORDERS)


def test_the_table_matches_the_code() -> None:
    rows = order_rows(4, 8)
    assert block("orders") == [
        [r.name, str(r.virtual), f"{r.seconds:g}", f"{100 * r.bubble:.1f}%", f"{r.activations:g}"] for r in rows
    ]
    assert [name for name in ORDERS if name not in {r.name for r in rows}] == []


def test_the_table_of_unequal_times() -> None:
    for row in block("unequal"):
        f, b, w = map(float, row[0].split(", "))
        orders = (("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1), ("zero-bubble", 2))
        assert row[1:] == [f"{idle_seconds(name, 4, 8, v, f, b, w) / (f + b + w):.2f}" for name, v in orders]


def test_the_table_of_exchange_rates() -> None:
    plans = ("pp=2", "pp=2,precision=bf16", "dp=8,pp=2,precision=bf16")
    rows = re.findall(r"^\| (dgx-\w+) \| (\d+) \| (\d+) \| (\d+) \|$", PAGE, re.M)
    assert len(rows) == 3
    for name, *shown in rows:
        machines = [load(name).with_devices(Plan.parse(p).ranks) for p in plans]
        assert shown == [f"{flops_per_byte(Plan.parse(p), c):.0f}" for p, c in zip(plans, machines, strict=True)]


def test_the_program_prints_what_it_says() -> None:
    order = pipeline_order("zero-bubble", ranks=4, micros=8, virtual=2)
    assert f"# {order}\n" in PAGE
    assert f"# {prove_pipeline(order).activations}\n" in PAGE


def test_the_table_reads_in_forty_columns() -> None:
    console = Console(width=40, no_color=True)
    with console.capture() as captured:
        console.print(orders_table(order_rows(8, 16)))
    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= 40
    assert len(lines) == 1 + len(order_rows(8, 16))
    assert lines[1].split() == ["naive", "1", "384", "87.5%", "1"]


@pytest.mark.parametrize("name", ORDERS)
def test_every_order_is_drawn_in_forty_columns(name: str) -> None:
    for p in (1, 2, 5):
        for v in ORDERS[name].virtual or (2, 3):
            order = pipeline_order(name, p, 7, v)
            text = draw_pipeline(order)
            assert max(map(len, text.splitlines())) <= 40
            drawn = re.findall(r"\b[FBWU]\d+(?:@\d+)?(?= |$)", text, re.M)
            assert sorted(drawn) == sorted(order.label(a) for lane in order.lanes for a in lane)
