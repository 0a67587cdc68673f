"""Files of users and of programs: errors name file and key, without a traceback."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import ConfigDict

from drumline.core import files
from drumline.core.errors import CorruptFile, InputError, PlanError
from drumline.core.regular_files import LARGEST_FILE


@dataclass(frozen=True)
class Inner:
    """A table inside."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    size: int
    label: str = ""


@dataclass(frozen=True)
class Outer:
    """A description."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: str
    inner: Inner = field(default_factory=lambda: Inner(1))
    rows: tuple[Inner, ...] = ()
    rates: dict[str, float] = field(default_factory=dict)
    maybe: float | None = None


@dataclass(frozen=True)
class Box:
    """A table with a required table."""

    inner: Inner
    label: str


@dataclass(frozen=True)
class Shelf:
    """A file with a required table."""

    box: Box


VALUE = Outer("a", Inner(3, "x"), (Inner(4), Inner(5, "y")), {"fp32": 1.5}, 2.0)


def test_numbers_are_written_in_rows(tmp_path: Path) -> None:
    """A table of some thousand numbers is readable: one line per row, and lines of limited length."""
    table = {
        "rows": [[1.0, 2.5], [3.0, -4e-05]],
        "long": [0.123456789] * 40,
        "words": ["a", "[\n  1,\n]"],
        "none": [],
        "mixed": [1, "b"],
        "flags": [True, False],
    }
    files.write_toml(tmp_path / "a.toml", table)
    text = (tmp_path / "a.toml").read_text()
    assert files.read_toml(tmp_path / "a.toml") == table
    assert "    [1.0, 2.5],\n    [3.0, -4e-05],\n" in text and "flags = [true, false]\n" in text
    assert max(map(len, text.splitlines())) <= files.MAX_LINE and len(text.splitlines()) < 30


def test_toml_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.toml"
    files.write_toml(path, VALUE, "one\n\ntwo")
    assert path.read_text().startswith("# one\n#\n# two\n\nname")
    assert files.from_plain(Outer, files.read_toml(path), str(path)) == VALUE
    assert list(path.parent.iterdir()) == [path]  # no temporary file stays


def test_json_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    files.write_json(path, VALUE)
    assert files.from_plain(Outer, files.read_json(path), str(path)) == VALUE


def test_defaults_are_not_written() -> None:
    assert files.to_plain(Outer("a")) == {"name": "a"}
    assert files.to_plain({1: (2, [3])}) == {"1": [2, [3]]}


@pytest.mark.parametrize("x", [float("inf"), float("-inf"), float("nan")])
def test_infinities_have_no_file_form(x: float) -> None:
    with pytest.raises(ValueError, match="has no file form"):
        files.to_plain({"x": [x]})


@pytest.mark.parametrize(
    ("data", "what", "where", "fix"),
    [
        ({"nme": "a"}, "unknown key 'nme'", "f: nme", "Did you mean 'name'?"),
        ({"name": "a", "inner": {"sze": 1}}, "unknown key 'sze'", "f: inner.sze", "Did you mean 'size'?"),
        (
            {"name": "a", "rows": [{"size": 1, "lable": "x"}]},
            "unknown key 'lable'",
            "f: rows.0.lable",
            "Did you mean 'label'?",
        ),
        ({}, "key 'name' is missing", "f: name", ""),
        ({"name": "a", "inner": {}}, "key 'size' is missing", "f: inner.size", ""),
    ],
)
def test_keys(data: object, what: str, where: str, fix: str) -> None:
    with pytest.raises(PlanError) as caught:
        files.from_plain(Outer, data, "f", PlanError)
    assert (caught.value.what, caught.value.where, caught.value.fix) == (what, where, fix)


def test_all_wrong_keys_are_listed_at_once() -> None:
    with pytest.raises(PlanError) as caught:
        files.from_plain(Outer, {"nane": "a", "inner": {"lable": 3}, "rates": {"x": "fast"}, "odd": 1}, "f", PlanError)
    assert str(caught.value).splitlines() == [
        "5 keys are wrong or missing",
        "  where: f",
        "  rule:  [inner]: unknown key 'lable'; Did you mean 'label'?",
        "         [rates]: rates.x: Input should be a valid number, unable to parse string as a number; given 'fast'",
        "         unknown key 'nane'; Did you mean 'name'?",
        "         unknown key 'odd'",
        "         [inner]: key 'size' is missing",
    ]


def test_a_missing_table_says_what_it_needs() -> None:
    with pytest.raises(PlanError) as caught:
        files.from_plain(Shelf, {}, "f", PlanError)
    assert (caught.value.what, caught.value.rule) == ("key 'box' is missing", "box has the keys inner.size, label")


def test_a_long_list_of_problems_is_cut() -> None:
    with pytest.raises(InputError) as caught:
        files.from_plain(Outer, {"name": "a"} | {f"q{i}": 1 for i in range(500)}, "f")
    assert caught.value.rule.count("\n") == 20 and caught.value.rule.endswith("and 480 more")


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ({"name": 3}, "name"),
        ({"name": "a", "inner": {"size": "many"}}, "inner.size"),
        ({"name": "a", "rows": 3}, "rows"),
        ({"name": "a", "rates": {"x": "fast"}}, "rates.x"),
        ({"name": "a", "inner": {"size": 1.5}}, "inner.size"),
    ],
)
def test_wrong_types_name_the_key(data: object, key: str) -> None:
    with pytest.raises(InputError, match=key.replace(".", r"\.")) as caught:
        files.from_plain(Outer, data, "a.toml")
    assert caught.value.where == f"a.toml: {key}"
    assert "given" in caught.value.what


@pytest.mark.parametrize("data", [3, "text", None, [1]])
def test_not_a_table(data: object) -> None:
    with pytest.raises(CorruptFile):
        files.from_plain(Outer, data, "f", CorruptFile)


def test_no_such_file(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").touch()
    with pytest.raises(InputError, match=r"no file .*plam\.toml\n  try:   Did you mean 'plan\.toml'\?"):
        files.read_text(tmp_path / "plam.toml")
    with pytest.raises(InputError, match="no file"):
        files.read_text(tmp_path / "none" / "plam.toml")


def test_a_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a folder, not a file"):
        files.read_toml(tmp_path)


def test_a_file_in_place_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(InputError, match="cannot be read: Not a directory"):
        files.read_text(tmp_path / "a" / "b")
    with pytest.raises(InputError, match="cannot be written"):
        files.write_text(tmp_path / "a" / "b", "x")


def test_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"ok \xff")
    with pytest.raises(InputError, match="is not text\n  rule:  UTF-8; byte 3 is not"):
        files.read_text(tmp_path / "a")


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbfx = 1")
    assert files.read_toml(tmp_path / "a") == {"x": 1}


@pytest.mark.parametrize("text", ["x = ", "= 1", "x = 1\nx = 2", "[a", "\0"])
def test_not_toml(tmp_path: Path, text: str) -> None:
    (tmp_path / "a").write_text(text)
    with pytest.raises(PlanError, match="is not TOML") as caught:
        files.read_toml(tmp_path / "a", PlanError)
    assert caught.value.rule
    assert caught.value.where == str(tmp_path / "a")


def test_nested_too_deeply(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x = " + "[" * 100_000)
    with pytest.raises(InputError, match="is not TOML\n.*\n  rule:  nested too deeply"):
        files.read_toml(tmp_path / "a")
    (tmp_path / "b").write_text("[" * 100_000)
    with pytest.raises(CorruptFile, match="is damaged"):
        files.read_json(tmp_path / "b")


def test_damaged_json(tmp_path: Path) -> None:
    (tmp_path / "a").write_text('{"x": 1')
    with pytest.raises(CorruptFile, match="is damaged\n.*\n  rule:  JSON: Expecting"):
        files.read_json(tmp_path / "a")


def test_too_large(tmp_path: Path) -> None:
    with open(tmp_path / "a", "wb") as f:
        os.truncate(f.fileno(), LARGEST_FILE + 1)
    with pytest.raises(InputError, match="too large to be a description\n  rule:  at most 67108864 bytes"):
        files.read_text(tmp_path / "a")


def test_writing_is_all_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    files.write_json(path, {"x": 1})
    with pytest.raises(ValueError, match="has no file form"):
        files.write_json(path, {"x": float("nan")})
    assert json.loads(path.read_text()) == {"x": 1}
    assert path.stat().st_mode & 0o777 == 0o644


@dataclass(frozen=True, slots=True)
class Wheel:
    __pydantic_config__ = ConfigDict(extra="forbid")
    OLD_KEYS: ClassVar[dict[str, str]] = {"size": "diameter"}
    diameter: float


@dataclass(frozen=True, slots=True)
class Car:
    OLD_KEYS: ClassVar[dict[str, str]] = {"rollers": "wheels"}
    wheels: tuple[Wheel, ...]
    spare: Wheel | None = None
    named: dict[str, Wheel] = field(default_factory=dict)


def test_keys_of_earlier_releases_are_read_and_the_current_ones_written() -> None:
    old = {"rollers": [{"size": 1.0}, {"diameter": 2.0}], "spare": {"size": 3.0}, "named": {"size": {"size": 4.0}}}
    car = files.from_plain(Car, old, "car.toml")
    assert car == Car((Wheel(1.0), Wheel(2.0)), Wheel(3.0), {"size": Wheel(4.0)})
    new = files.to_plain(car)
    assert new["wheels"] == [{"diameter": 1.0}, {"diameter": 2.0}] and files.from_plain(Car, new, "car.toml") == car


def test_an_old_key_next_to_its_new_one_is_refused() -> None:
    with pytest.raises(InputError, match="unknown key 'size'"):
        files.from_plain(Wheel, {"size": 1.0, "diameter": 2.0}, "car.toml")
