"""`drumline bench` as a user types it: output, files, refusals."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from command import here

from drumline.cli.bench import parse_sizes
from drumline.clusters import Cluster, CollectiveTable, DeviceSpec, Link, Node
from drumline.comm import Communicator, Transport, run_threads
from drumline.core.errors import InputError, VerificationError
from drumline.measurement.bench import bench_threads
from drumline.measurement.bench_cases import CollectiveBench, CollectiveCase, whole_bytes
from drumline.measurement.bench_config import BenchConfig, BenchOutcome, parse_algorithm, tables, with_tables
from drumline.reports.bench_page import page
from drumline.reports.bench_results import BenchResult, summary, verdicts
from drumline.schedules import ALGORITHMS

CLUSTER = Cluster("here", DeviceSpec("core", "cpu", 1e9, 1e10, {"fp32": 1e10}, 1e-6), Node(2, Link(1e-5, 1e9)))


def drumline(*arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "drumline", "bench", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **env},
    )


def refused(*arguments: object) -> str:
    done = here("bench", *arguments)
    assert done.returncode == 2 and "Traceback" not in done.stderr and done.stdout == "", done.stderr
    return done.stderr


class TestCommand:
    def test_json(self, tmp_path: Path) -> None:
        """The keys of the design, both kinds of ranks, the saved tables and the picture, in one run."""
        file, picture = tmp_path / "here.toml", tmp_path / "bench.html"
        CLUSTER.save(file)
        done = here(
            "bench",
            "all_reduce",
            "latency",
            "bandwidth",
            "barrier",
            "--transports",
            "threads,gloo",
            "--sizes",
            "8,4KiB",
            "--seconds",
            2,
            "--save",
            file,
            "--picture",
            picture,
            "--json",
        )
        assert done.returncode == 0, done.stderr
        results = json.loads(done.stdout)
        rows = results["results"]
        keys = {"collective", "transport", "algorithm", "ranks", "bytes", "seconds", "predicted_seconds"}
        assert all(keys | {"segments", "algbw", "busbw", "spread"} <= set(row) for row in rows)
        assert {row["transport"] for row in rows} == {"threads", "gloo"} == set(results["links"])
        assert {row["collective"] for row in rows} == {"all_reduce", "latency", "bandwidth", "barrier"}
        assert {row["bytes"] for row in rows if row["collective"] == "all_reduce"} <= {8, 4096}
        assert all(row["seconds"] > 0 and row["ranks"] == 2 for row in rows)
        reduced = {row["algorithm"] for row in rows if row["collective"] == "all_reduce"}
        assert reduced >= {*ALGORITHMS["all_reduce"], "native", "auto"}
        for row in rows:
            priced = row["algorithm"] not in ("native", "auto") and row["collective"] != "bandwidth"
            assert row["predicted_seconds"] > 0 if priced else True
        assert results["auto"] and all(v["ratio"] >= 1 for v in results["auto"])
        saved = Cluster.load(file)
        made = {(t.transport, t.algorithm) for t in saved.collective if t.collective == "all_reduce"}
        assert made >= {("threads", "ring"), ("gloo", "ring"), ("gloo", "native")}
        assert "by drumline bench" in saved.origin_of("collective")
        text = picture.read_text()
        assert text.count("<section>") == 8 and "all_reduce over gloo" in text and "<script>" in text

    def test_text_fits_40_columns(self) -> None:
        done = drumline(
            "all_reduce", "--transports", "threads", "--sizes", "8..512", "--seconds", 2, "-n", 3, COLUMNS="40"
        )
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        start = lines.index("all_reduce over threads")
        table = lines[start : lines.index("", start)]
        assert max(map(len, table)) <= 40 and 3 <= len(table) <= 5
        assert table[1].split() == ["bytes", "best", "time", "auto"]
        assert "auto was within 10% of the best in" in done.stdout
        assert "measuring 8 B over threads" in done.stderr

    def test_cases_out_of_time_are_listed(self) -> None:
        done = here("bench", "all_reduce", "--transports", "threads", "--sizes", "8..1MiB:2", "--seconds", 0.02)
        assert done.returncode == 0, done.stderr
        assert "not measured, out of time: all_reduce of " in done.stdout and "(--seconds)" in done.stdout

    def test_named_algorithms_are_all_shown(self) -> None:
        done = here(
            "bench",
            "broadcast",
            "--transports",
            "threads",
            "--sizes",
            "64KiB",
            "--algorithms",
            "chain*4,flat",
            "--seconds",
            1,
        )
        assert done.returncode == 0, done.stderr
        assert "chain*4" in done.stdout and "flat" in done.stdout and "binomial" not in done.stdout

    def test_list(self) -> None:
        """Without torch, which takes longer to load than the list to write."""
        program = (
            "import sys; sys.argv = ['drumline', 'bench', 'all_reduce', '--list', '-n', '8']\n"
            "from drumline.cli import app\n"
            "app(standalone_mode=False)\n"
            "assert 'torch' not in sys.modules, 'torch was imported'\n"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        ring = next(line.split() for line in done.stdout.splitlines() if " ring " in line)
        assert ring == ["all_reduce", "ring", "14", "7/4", "m", "14", "1"]
        results = json.loads(drumline("--list", "--json").stdout)["algorithms"]
        assert len(results) == sum(map(len, ALGORITHMS.values()))

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            (["allreduce"], "unknown collective 'allreduce'"),
            (["all_reduce", "--algorithms", "rings"], "Did you mean 'ring'?"),
            (["all_reduce", "--algorithms", "ring*0"], "name*n for n segments"),
            (["--transports", "carrier"], "unknown transport 'carrier'"),
            (["--transports", "mpi"], "mpiexec -n 2 drumline bench --transports mpi"),
            (["--dtype", "float31"], "Did you mean 'float32'?"),
            (["--sizes", "8..."], "--sizes 8..."),
            (["--sizes", "0"], "1 <= first <= last"),
            (["--ranks", "0"], "at least one rank"),
            (["--cluster", "nowhere.toml"], "nowhere.toml"),
        ],
    )
    def test_wrong_arguments(self, arguments: list[str], text: str) -> None:
        assert text in refused(*arguments)


def test_sizes() -> None:
    assert parse_sizes("8..4KiB") == (8, 64, 512, 4096)
    assert parse_sizes("8..100:2") == (8, 16, 32, 64, 100)
    assert parse_sizes("1MiB,8,8") == (8, 2**20)
    assert parse_sizes("4KiB") == (4096,)
    assert parse_sizes("1..3:1.1") == (1, 2, 3)
    for bad in ("", "8..4", "8..16:1", "x", "8..1TiB"):
        with pytest.raises(InputError, match="--sizes"):
            parse_sizes(bad)
    assert parse_algorithm("ring*4") == ("ring", 4)


def test_sizes_are_whole_bytes() -> None:
    assert whole_bytes("all_reduce", 10, 3, 4) == 8
    assert whole_bytes("all_gather", 8, 3, 4) == 12
    assert whole_bytes("barrier", 8, 3, 4) == 0


def result(algorithm: str, seconds: float, size: int = 1000, **more: Any) -> BenchResult:
    return BenchResult("all_reduce", "gloo", algorithm, 4, size, seconds, 1e-4, **more)


def test_verdicts() -> None:
    rows = [
        result("ring", 2e-3),
        result("doubling", 1e-3),
        result("auto", 1.9e-3, chosen="ring"),
        result("ring", 1e-3, 2000),
        result("chain", 5e-4, 2000, segments=4),
        result("auto", 9e-4, 2000, chosen="chain*4"),
    ]
    first, second = verdicts(rows)
    assert (first.best.label, first.ratio) == ("doubling", 2.0)
    assert (second.best.label, second.ratio) == ("chain*4", 1.0)  # its own time counts, not that of auto's turn
    assert summary(rows).startswith("auto was within 10% of the best in 1 of 2 cases; at worst 2.00 times the best: ")
    assert summary(rows[:2]) == ""
    assert rows[0].bus == 1.5 * rows[0].algorithmic == 1.5 * 5e5


def test_tables_replace_those_of_the_same_collective() -> None:
    old = CollectiveTable("all_reduce", "gloo", 4, (8.0,), (1.0,))
    kept = CollectiveTable("all_reduce", "gloo", 2, (8.0,), (1.0,))
    cluster = dataclasses.replace(CLUSTER, collective=(old, kept))
    rows = [result("ring", 2e-3, 2000), result("ring", 1e-3), result("auto", 1e-3), result("ring", 3e-3, segments=4)]
    results = with_tables(cluster, BenchOutcome(rows), "measured now").collective
    assert results == (
        kept,
        CollectiveTable("all_reduce", "gloo", 4, (1000.0, 2000.0), (1e-3, 2e-3), "ring"),
        CollectiveTable("all_reduce", "gloo", 4, (1000.0,), (3e-3,), "ring", 4),
    )
    assert tables(rows) == results[1:]


def test_every_collective_is_measured_and_auto_follows_the_tables() -> None:
    """auto chooses from measured tables: it runs the best algorithm for the same sizes."""
    config = BenchConfig(tuple(ALGORITHMS), (64, 4096), ("all",), ("threads",), seconds=3.0)
    outcome = bench_threads(lambda event: None, config, 3)
    assert {r.collective for r in outcome.results} == set(ALGORITHMS)
    cluster = with_tables(CLUSTER, outcome, "now")

    def body(transport: Transport) -> dict[tuple[str, int], str]:
        comm = Communicator(transport, cluster=cluster)
        return {
            (v.best.collective, v.best.bytes): comm.choose(v.best.collective, v.best.bytes).algorithm
            for v in verdicts(outcome.results)
        }

    chosen = run_threads(body, 3)[0]
    assert chosen == {(v.best.collective, v.best.bytes): v.best.algorithm for v in verdicts(outcome.results)}


def test_pairs() -> None:
    config = BenchConfig(("latency",), (8,), ("all",), ("threads",), seconds=1.0, pairs=True)
    outcome = bench_threads(lambda event: None, config, 3)
    assert [(p.src, p.dst) for p in outcome.pairs] == [(0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1)]
    assert with_tables(CLUSTER, outcome, "now").rank_link == tuple(outcome.pairs)


@pytest.mark.parametrize("collective", [c for c in ALGORITHMS if c != "barrier"])
def test_a_wrong_result_is_not_timed(collective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(Communicator, collective)

    def wrong(self: Communicator, *arguments: Any, **options: Any) -> Any:
        got = right(self, *arguments, **options)
        return got + 1 if got is not None else None

    monkeypatch.setattr(Communicator, collective, wrong)

    def body(transport: Transport) -> None:
        comm = Communicator(transport)
        bench = CollectiveBench(comm, collective, 64, torch.float32, torch.device("cpu"))
        bench.check(CollectiveCase(collective, next(iter(ALGORITHMS[collective]))))

    with pytest.raises(VerificationError, match=rf"{collective} by \w+ gave a wrong result on rank"):
        run_threads(body, 2)


def test_the_page_is_escaped_and_self_contained() -> None:
    text = page([result("<ring>", 1e-3)], title="<b>", notes=["a & b"])
    assert "&lt;ring&gt;" in text and "<b></b>" not in text and "a &amp; b" in text
    assert "http" not in text.replace("http-equiv", "")
