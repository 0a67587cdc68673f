"""`drumline validate` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

from command import here
from run_rows import table

from drumline.costs.fitted import load_constants


def test_json(tmp_path: Path) -> None:
    path = table(
        tmp_path, {}, {"source": "b", "memory_gb_per_gpu": "30", "memory_kind": "GiB peak allocated"}, {"heads": ""}
    )
    done = here("validate", path, "--json", "--loso")
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)
    assert value["rows"] == 2 and value["skipped"] == [
        {"line": 4, "source": "a page", "name": "row 1", "key": "heads", "reason": "heads is empty"}
    ]
    assert set(value["time"]) == set(value["memory"]) == {"rows", "mean", "median", "p90", "worst", "bias"}
    assert value["time"]["rows"] == 2 and value["memory"]["rows"] == 1
    assert value["sources"]["a page"]["memory"] is None and value["sources"]["b"]["time"]["rows"] == 1
    assert value["groups"]["count"] == 0 and set(value["loso"]) == {"time", "memory", "sources", "groups"}


def test_output_in_40_columns(tmp_path: Path) -> None:
    rows = [
        {
            "source": "owner/repository with a long name, table 5",
            "tp": str(t),
            "dp": str(8 // t),
            "iteration_time_s": str(2 + t),
        }
        for t in (1, 2, 4, 8)
    ]
    path = table(
        tmp_path,
        *rows,
        {"tp": "1", "micro_batch": "8", "iteration_time_s": "9", "source": rows[0]["source"]},
        {"vocab": ""},
    )
    done = here("validate", path, "--loso", COLUMNS="40")
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 40, done.stdout
    assert "5 of 6 rows read" in done.stdout and "line 7: vocab is empty" in done.stdout and "table 5" in done.stdout
    assert "each source left out" in done.stdout and "rank correlation" in done.stdout
    wide = here("validate", path, COLUMNS="120").stdout
    assert "median" in wide and "P90" in wide and "regret" in wide


def test_plot_and_fitted_constants(tmp_path: Path) -> None:
    path = table(tmp_path, {}, {"micro_batch": "8", "iteration_time_s": "2.1"})
    done = here("validate", path, "--fit", tmp_path / "mine.toml", "--picture", tmp_path / "all.svg")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "all.svg").read_text().startswith("<svg")
    text = (tmp_path / "mine.toml").read_text()
    assert (
        "drumline validate" in text.splitlines()[0] and load_constants(tmp_path / "mine.toml").device["A100"].rows == 2
    )
    again = here("validate", path, "--profiles", tmp_path / "mine.toml")
    assert again.returncode == 0 and "2 times of 1 sources" in again.stdout


def test_refused_arguments(tmp_path: Path) -> None:
    path = table(tmp_path, {"layers": "ten"})
    done = here("validate", path)
    assert done.returncode == 2 and f"{path}: line 2: layers" in done.stderr
    done = here("validate", table(tmp_path, {"layers": ""}))
    assert (
        done.returncode == 2
        and "no row can be predicted: layers is empty" in done.stderr
        and "line 2: layers" in done.stderr
    )
    assert here("validate", table(tmp_path, {}), "--picture", "x.png").returncode == 2
    assert here("validate", table(tmp_path, {}), "--fit", "a.toml", "--profiles", "b.toml").returncode == 2
    assert here("validate", tmp_path / "none.csv").returncode == 2
    done = here("validate", table(tmp_path, {"gpu": "TPU v4"}))
    assert done.returncode == 2 and "unknown GPU 'TPU v4'" in done.stderr and "line 2: gpu" in done.stderr
