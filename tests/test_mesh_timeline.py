"""Meshes: axes, coordinates and groups. Timelines: the file form and the form that Perfetto opens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline import Mesh, Span, Timeline
from drumline.core.errors import CorruptFile

MESH = Mesh((("pp", 2), ("shard", 3), ("tp", 2)))
meshes = st.lists(st.integers(1, 4), max_size=4).map(lambda ns: Mesh(tuple((f"a{i}", n) for i, n in enumerate(ns))))


def test_coordinates() -> None:
    assert MESH.size == 12
    assert (MESH.length("shard"), MESH.length("cp")) == (3, 1)
    assert MESH.coordinate(0) == {"pp": 0, "shard": 0, "tp": 0}
    assert MESH.coordinate(9) == {"pp": 1, "shard": 1, "tp": 1}
    assert MESH.rank(pp=1, shard=1, tp=1) == 9
    assert MESH.rank(shard=2) == 4


def test_groups() -> None:
    assert MESH.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert MESH.groups("shard") == [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11]]
    assert MESH.groups("pp") == [[0, 6], [1, 7], [2, 8], [3, 9], [4, 10], [5, 11]]
    assert MESH.groups("cp") == [[r] for r in range(12)]


def test_text_form() -> None:
    assert str(MESH) == "pp(2) x shard(3) x tp(2)"
    assert str(Mesh(())) == "one rank"
    assert Mesh(()).size == 1


@given(meshes)
def test_ranks_and_coordinates_are_inverse(mesh: Mesh) -> None:
    assert [mesh.rank(**mesh.coordinate(r)) for r in range(mesh.size)] == list(range(mesh.size))
    for axis, n in mesh.axes:
        groups = mesh.groups(axis)
        assert sorted(r for g in groups for r in g) == list(range(mesh.size))
        assert {len(g) for g in groups} == {n}


TIMELINE = Timeline(
    "measured",
    (
        Span(0, "compute", "forward", 1.0, 1.5),
        Span(0, "communication", "all-reduce", 1.25, 2.0, bytes=8.0),
        Span(3, "compute", "forward", 1.0, 1.75),
    ),
    ("a note",),
)


def test_sums() -> None:
    assert TIMELINE.seconds == 1.0
    assert TIMELINE.ranks == (0, 3)
    assert TIMELINE.busy_seconds(0, "compute") == 0.5
    assert TIMELINE.busy_seconds(1, "compute") == 0
    assert str(TIMELINE) == "measured timeline: 3 spans, 1.00 s"
    assert Timeline("predicted").seconds == 0.0


def test_file_round_trip(tmp_path: Path) -> None:
    TIMELINE.save(tmp_path / "t.json")
    assert Timeline.load(tmp_path / "t.json") == TIMELINE


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is damaged"),
        ("{}", "key 'origin' is missing"),
        ('{"origin": "x", "spans": [{"rank": "a"}]}', "spans.0"),
        ('{"origin": "x", "spanz": []}', "unknown key 'spanz'\n.*\n  try:   Did you mean 'spans'"),
    ],
)
def test_a_damaged_file(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(CorruptFile, match=words):
        Timeline.load(tmp_path / "t.json")


def test_chrome() -> None:
    document = json.loads(TIMELINE.to_chrome())
    spans = [e for e in document["traceEvents"] if e["ph"] == "X"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in document["traceEvents"] if e["ph"] == "M"}
    assert [(e["name"], e["pid"], e["ts"], e["dur"]) for e in spans] == [
        ("forward", 0, 1e6, 5e5),
        ("all-reduce", 0, 1.25e6, 7.5e5),
        ("forward", 3, 1e6, 7.5e5),
    ]
    assert [names[e["pid"], e["tid"]] for e in spans] == ["compute", "communication", "compute"]
    assert {e["cat"] for e in spans} == {"measured"}
    assert spans[1]["args"] == {"bytes": 8.0}
