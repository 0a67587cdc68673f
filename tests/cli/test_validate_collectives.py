"""`drumline validate` recognises a file of collectives by its columns."""

from __future__ import annotations

import json
from pathlib import Path

from command import here

from drumline.costs.networks.rows import REQUIRED_COLUMNS

GOOD = "a,all_reduce,8,8,NVLink3+NVSwitch 600 GB/s bidir,,1000000000,7800,"
BARE = "a,all_reduce,16,8,NVLink3+NVSwitch 600 GB/s bidir,not stated,1000000000,7800,"


def made(folder: Path, *lines: str, head: str = ",".join(REQUIRED_COLUMNS)) -> Path:
    path = folder / "mine.csv"
    path.write_text("\n".join([head, *lines]) + "\n")
    return path


def test_errors_by_level_and_skipped_rows(tmp_path: Path) -> None:
    path = made(tmp_path, GOOD, BARE)
    done = here("validate", path)
    assert done.returncode == 0, done.stderr
    assert "1 rows predicted, 1 skipped" in done.stdout
    assert "inside (1 rows)" in done.stdout
    assert "not read: inter_link is not stated (lines 3)" in done.stdout
    document = json.loads(here("validate", path, "--json").stdout)
    assert document["rows"] == 1
    assert document["skipped"] == [{"line": 3, "source": "a", "reason": "inter_link is not stated"}]
    assert 0 < document["levels"]["inside"]["mean"] < 0.2
    assert document["left_out"] == {}
    again = json.loads(here("validate", path, "--json", "--loso").stdout)
    assert again["left_out"]["inside"]["rows"] == 1


def test_bad_files(tmp_path: Path) -> None:
    done = here("validate", made(tmp_path, GOOD.replace("7800", "fast")))
    assert done.returncode == 2
    assert "mine.csv, line 2: time_us" in done.stderr and "'fast' is not a number" in done.stderr
    done = here("validate", made(tmp_path, GOOD, head=",".join(REQUIRED_COLUMNS).replace("inter_link", "interlink")))
    assert done.returncode == 2
    assert "column 'inter_link' is missing" in done.stderr and "line 1" in done.stderr
    done = here("validate", made(tmp_path, GOOD, head=",".join(REQUIRED_COLUMNS).replace("collective", "what")))
    assert "column 'collective' is missing" in done.stderr
    assert here("validate", made(tmp_path, GOOD), "--picture", "x.svg").returncode == 2
