"""docs/cluster-file.md has every key of a cluster file, its shortest file is valid, and its errors are those printed."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from drumline.clusters import Cluster
from drumline.core.errors import ClusterError

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "cluster-file.md").read_text()
(SHORTEST,) = re.findall(r"```toml\n(.*?)```", PAGE, re.S)


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("paste_cluster_file", DOCS / "paste_cluster_file.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_key_has_a_row_with_a_meaning() -> None:
    paste = script()
    assert paste.pasted(PAGE) == PAGE, "run: python docs/paste_cluster_file.py"
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \| (.*?) \|$", PAGE, re.M)
    keys = [f.name for _, kind in paste.tables() for f in dataclasses.fields(kind)]
    assert sorted(name for name, *_ in rows) == sorted(keys) and len(keys) > 60
    assert [row for row in rows if not all(row)] == []


def test_the_shortest_file_has_only_what_is_required(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(SHORTEST)
    assert Cluster.load(path).devices == 8
    count = 0
    for number, line in enumerate(SHORTEST.splitlines()):
        if "=" not in line:
            continue
        lines = SHORTEST.splitlines()
        del lines[number]
        path.write_text("\n".join(lines))
        with pytest.raises(ClusterError, match="is missing"):
            Cluster.load(path)
        count += 1
    assert count == 11
    assert "network" in tomllib.loads(SHORTEST)
    path.write_text(SHORTEST.partition("[network]")[0])
    assert Cluster.load(path).devices == 4


def test_the_error_is_the_one_that_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = SHORTEST.replace("memory =", "memroy =").replace('launch = "5us"\n', "").replace('alpha = "3us", ', "")
    Path("mine.toml").write_text(text)
    with pytest.raises(ClusterError) as e:
        Cluster.load("mine.toml")
    assert f"```text\n{e.value}\n```" in PAGE
