"""The benchmark of parameter servers against a ring: its tables from made-up numbers, and a short run on real hosts."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from drumline.clusters import Link
from drumline.theory.collective_forms import ring_all_reduce_seconds
from drumline.theory.parameter_server import crossing_bytes, server_exchange_seconds

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SIZES = [1 << i for i in range(8, 20)]
LONG = 1 << 20


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from server_ring import table

    return table


def recorded(p: int = 8, n: int = 1) -> dict[str, Any]:
    """A run that went as the formula says: calls take 0.5 ms if all call, rounds of the ring 0.4 ms, updates 0.3 ms."""
    ring, calls = Link(1e-4, 1e7), Link(6e-5, 1.1e7)
    times = {"trip 8": 2 * ring.alpha, f"trip {LONG}": 2 * (ring.alpha + (LONG - 8) * ring.beta), "shift 8": 4e-4}
    times |= {f"call{n} 8": 2 * calls.alpha, f"call{n} {LONG}": 2 * calls.alpha + (LONG - 8) / n * calls.beta}
    times |= {f"calls{n} 8": 5e-4, f"other{n} 8": 2e-4, f"others{n} 8": 6e-4}
    start_up = 2 * 5e-4 + (2 * 6e-4 if n > 1 else 0.0) + 3e-4
    for m in SIZES:
        times[f"ring {m}"] = ring_all_reduce_seconds(p, m, Link(4e-4, 1e7))
        times[f"server{n} {m}"] = server_exchange_seconds(p, m, calls, servers=n, server_link=calls, start_up=start_up)
    return {
        "rate": "100mbit",
        "workers": p,
        "servers": [n],
        "sizes": SIZES,
        "long": LONG,
        "medians": times,
        "updates": {str(n): 3e-4},
        "rounds": 3,
        "realtime": False,
        "load": 0.5,
    }


@pytest.mark.parametrize("n", [1, 4])
def test_a_run_as_the_formula_says(table: Any, n: int) -> None:
    lines = table.table_lines([recorded(n=n)])
    cells = [cell.strip() for cell in lines[2].strip("|").split("|")]
    assert cells[:3] == ["100mbit", "8", str(n)] and float(cells[-1]) == pytest.approx(1.0, abs=0.05)
    exact = table.start_ups(recorded(n=n), n)["all at once"].crossing(8, n)
    assert exact == pytest.approx((14 * 4e-4 - (1.3e-3 if n == 1 else 2.5e-3)) / slope(n), rel=1e-6)
    assert table.start_ups(recorded(n=n), n)["one alpha"].crossing(8, n) == pytest.approx(
        crossing_bytes(8, Link(1e-4, 1e7), servers=n)
    )
    rows = [line for line in lines if line.startswith("| 1,024 |")]
    assert len(rows) == 1 and rows[0].count("+0%") + rows[0].count("-0%") == 2


def slope(n: int) -> float:
    """Seconds by which a byte of eight workers takes longer than in a ring."""
    return 2 * 8 / n / 1.1e7 - 2 * 7 / 8 / 1e7


def test_the_crossing_is_interpolated_in_logarithms(table: Any) -> None:
    sizes = [1024, 4096, 16384]
    assert table.measured_crossing(sizes, [1.0, 2.0, 4.0], [2.0, 2.0, 2.0]) == pytest.approx(4096)
    assert table.measured_crossing(sizes, [1.0, 1.0, 4.0], [2.0, 2.0, 2.0]) == pytest.approx(8192)
    assert table.measured_crossing(sizes, [3.0, 1.0, 4.0], [2.0, 2.0, 2.0]) == pytest.approx(8192), (
        "the last one counts"
    )
    assert table.measured_crossing(sizes, [3.0, 3.0, 3.0], [2.0, 2.0, 2.0]) == 0.0
    assert table.measured_crossing(sizes, [1.0, 1.0, 1.0], [2.0, 2.0, 2.0]) == math.inf
    assert table.size_text(0.0, 1024, 16384) == "below 1.00 KiB" and table.size_text(0.0, 0, math.inf) == "never"
    assert table.size_text(math.inf, 1024, 16384) == "above 16.0 KiB"


def test_crossings_outside_of_the_sizes_are_bounds(table: Any) -> None:
    assert table.ratio_text(3000.0, 1500.0, 256, 65536) == "2.00"
    assert table.ratio_text(0.0, 0.0, 256, 65536) == "both below"
    assert table.ratio_text(0.0, 512.0, 256, 65536) == "< 0.50"
    assert table.ratio_text(math.inf, 1e6, 256, 65536) == "both above"
    assert table.ratio_text(math.inf, 32768.0, 256, 65536) == "> 2.00"
    assert table.ratio_text(3000.0, 0.0, 256, 65536) == "none predicted"


def test_rates(table: Any) -> None:
    assert table.bytes_per_second("100mbit") == 12.5e6 and table.bytes_per_second("1gbit") == 125e6
    with pytest.raises(SystemExit, match="--rate 5: a number and one of kbit, mbit, gbit"):
        table.bytes_per_second("5")


def test_the_page_has_its_marks() -> None:
    text = (BENCHMARKS.parent / "docs" / "log" / "asynchronous.md").read_text(encoding="utf-8")
    for mark in ("server or ring", "stragglers"):
        assert text.index(f"<!-- {mark} -->\n") < text.index(f"<!-- /{mark} -->")


def namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listed.splitlines()}


@pytest.mark.slow
def test_a_short_run_and_an_interrupted_one(tmp_path: Path) -> None:
    """Every exchange is checked by the processes: sums of the ring, and weights after all updates."""
    command = [sys.executable, str(BENCHMARKS / "server_or_ring.py"), "--workers", "2", "--servers", "1,2"]
    command += ["--rate", "200mbit", "--rounds", "1", "--most", "4096", "--record", str(tmp_path / "numbers.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    if done.returncode == 1 and "not run: " in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    [result] = json.loads((tmp_path / "numbers.json").read_text())
    assert result["sizes"] == [2**k for k in range(4, 13)] and all(t > 0 for t in result["medians"].values())
    assert done.stdout.count("| 200mbit | 2 | ") == 2
    before = namespaces()
    with subprocess.Popen([*command, "--rounds", "1000"], stderr=subprocess.DEVNULL, start_new_session=True) as run:
        while not (mine := namespaces() - before):
            assert run.poll() is None
            time.sleep(0.05)
        time.sleep(1.0)
        os.killpg(run.pid, signal.SIGINT)  # as Ctrl-C does
        assert run.wait(60) != 0
    token = next(iter(mine)).rpartition("-")[0]
    assert not any(name.startswith(token) for name in namespaces())
