"""YAML of configs: read as PyYAML reads it, or refused with the line; written for readers of YAML 1.1 and 1.2."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from drumline.interop import yaml_text

CONFIGS = sorted((Path(__file__).parent / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_configs_are_read_as_pyyaml_reads_them(path: Path) -> None:
    assert yaml_text.parse(path.read_text()) == yaml.safe_load(path.read_text())


@pytest.mark.parametrize(
    "text",
    [
        "a: 1",
        "---\na: 1\n",
        "# x\n---\na: 1",
        "a:\n  b:\n    c: 1\n  d: 2\ne: 3",
        "a:\n- 1\n- x y\nb: 2",
        "a:\n  - 1\n  - 2",
        "a: []\nb: {}\nc: [1, 'a, b', x]",
        "a: {b: 1, c: [2, 3]}",
        "a: 'it''s'\nb: \"x\\ty\"\n'c d': 1",
        'a: "\\x41"',
        "a: # nothing\nb: ~\nc: null\nd:",
        "a: x # y\nb: 'x # y'\nc: x#y\nd: http://a:80/b",
        "a: yes\nb: No\nc: on\nd: TRUE",
        "a: 1.5\nb: .5\nc: 1.\nd: 1.0e-5\ne: -3\nf: +4\ng: 1_000",
        "",
        "# nothing",
        "a: 10.0.0.1\nb: 2.0.1\nc: ml.p3dn\nd: -x",
        "- 1\n- 2",
        "a b: c d",
        "{}",
        "a: -1\nb: '-1'",
        "\ta: 1".replace("\t", "  "),
    ],
)
def test_same_as_pyyaml(text: str) -> None:
    assert yaml_text.parse(text) == yaml.safe_load(text)


def test_a_number_with_an_exponent_is_a_number() -> None:
    """YAML 1.1 reads it as a string, which is never intended."""
    assert yaml_text.parse("a: 1e-5\nb: 5e8") == {"a": 1e-5, "b": 5e8}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\na: 2", "line 2: the key 'a' is given twice"),
        ("a:\n\tb: 1", "line 2: tabs are not indentation"),
        ("a: &x 1", "line 1: anchors, aliases and tags are not supported"),
        ("a: *x", "line 1: anchors"),
        ("a: !!python/object:os.system x", "line 1: anchors, aliases and tags"),
        ("a: &a [x]\nb: &b [*a, *a]\nc: &c [*b, *b]", "line 1: anchors, aliases"),
        ("<<: {a: 1}\nb: *x", "line 2: anchors, aliases"),
        ("a: |\n  x\n  y", "line 1: multi-line text is not supported"),
        ("a: >-\n  x", "line 1: multi-line text"),
        ("a: x\n  y", "line 2: a value is one line"),
        ("a: 1\n---\nb: 2", "line 2: a config is one document"),
        ("a: 1\n...\n", "line 2: a config is one document"),
        ("a: 1\n  b: 2", "line 2: a value is one line"),
        ("  a: 1\nb: 2", "line 2: expected '<document start>'"),
        ("a:\n    b: 1\n  c: 2", "line 3: "),
        ("just words", "line 1: a config is lines of `key: value`"),
        ("a: 1\nwords", "line 2: could not find expected ':'"),
        ("a: [1, 2", "line 1: expected ',' or '\\]'"),
        ("a: {b 1}", "line 1: a table is"),
        ("a: [1 2, , 3]", "line 1: expected the node content, but found ','"),
        ("a: [1] 2", "line 1: expected <block end>"),
        ("a: 'x", 'line 1: found unexpected end of stream, at "a: \'x"'),
        ("a: b: c", "line 1: mapping values are not allowed here"),
        ("a: 010", "line 1: 010 can be read as a number or as a word"),
        ("a: 1:30", "line 1: 1:30 can be read"),
        ("a: .inf", "line 1: .inf can be read"),
        ("a: 0x10", "line 1: 0x10 can be"),
        ("%YAML 1.2\n---\na: 1", "line 1: directives"),
        ("# x\n%YAML 1.1\n---\na: 1", "line 2: directives"),
        ("- a: 1\n  b: 2", "line 1: items of a list are single values"),
        ("1: x", "line 1: a key that is not a plain word"),
        ("a: {no: 1}", "line 1: a key that is not a plain word"),
        ("a: @x", "line 1: found character '@'"),
        ("a: " + "[" * 50, "line 1: nested too deeply"),
        ("a: " + "[" * 100_000, "line 1: nested too deeply"),
        ("\n".join(" " * i + "a:" for i in range(60)), "line 21: nested too deeply"),
        ('a: "\\q"', "line 1: found unknown escape character"),
    ],
)
def test_refused_with_the_line(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        yaml_text.parse(text)


words = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cs", "Cc", "Zl", "Zp", "Cn", "Co", "Cf"]), max_size=12
)
odd = st.sampled_from(
    [
        "no",
        "NO",
        "yes",
        "~",
        "null",
        "1e5",
        "1:30",
        "010",
        "-",
        "- x",
        "a: b",
        "#",
        "a #b",
        "'",
        '"',
        "[]",
        "{",
        "*a",
        "!b",
        "",
        " x ",
        "0x1f",
        "1_0",
        ".5",
        "=",
        "<<",
        "12",
        "on",
    ]
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(allow_nan=False, allow_infinity=False, width=32)
    | words
    | odd
)
tables = st.recursive(
    st.dictionaries(words | odd, scalars | st.lists(scalars, max_size=3), max_size=4),
    lambda inner: st.dictionaries(words | odd, inner | scalars, max_size=3),
    max_leaves=8,
)


@given(tables)
def test_written_text_is_read_back_by_us_and_by_pyyaml(table: dict[str, Any]) -> None:
    text = yaml_text.write(table)
    assert (yaml_text.parse(text) or {}) == table
    assert (yaml.safe_load(text) or {}) == table


@given(st.text(st.sampled_from("ab:- #\n'\"[]{},1.~|>&*!%\t"), max_size=30))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        yaml_text.parse(text)
    except ValueError as e:
        assert str(e).startswith("line ")


@given(st.text(st.sampled_from("ab:- \n'[]{},1"), max_size=16))
def test_accepted_text_is_read_as_pyyaml_reads_it(text: str) -> None:
    """Where both accept a text, they agree; differences are refused."""
    try:
        ours = yaml_text.parse(text)
    except ValueError:
        return
    with contextlib.suppress(yaml.YAMLError):  # theirs is stricter here
        assert ours == yaml.safe_load(text), text
