"""Values in a notebook: sound HTML, pictures as images, no name of a user becomes markup, numbers as in the text."""

from __future__ import annotations

import base64
import dataclasses
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

import drumline as dl
from drumline.clusters import load
from drumline.core.errors import InputError

EVIL = '<script>alert("&")</script>'


class Balanced(HTMLParser):
    """Counts what is open; notes scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.scripts += tag == "script"
        if tag not in ("img", "wbr", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def shown(value: object) -> str:
    html = value._repr_html_()  # type: ignore[attr-defined]
    assert isinstance(html, str) and len(html) < 1_000_000
    reader = Balanced()
    reader.feed(html)
    assert reader.open == [] and reader.scripts == 0
    for data in re.findall(r"base64,([A-Za-z0-9+/=]+)", html):
        ElementTree.fromstring(base64.b64decode(data))
    return html


CLUSTER = dataclasses.replace(load("dgx-h100"), name=EVIL)


def test_a_cluster_a_plan_and_a_profile() -> None:
    assert "&lt;script&gt;" in shown(CLUSTER)
    assert "on 4 ranks, exact" in shown(dl.Plan.parse("dp=2,tp=2"))
    profile = dataclasses.replace(dl.profile("resnet50"), name=EVIL)
    assert "25,557,032 parameters" in shown(profile)
    deep = dataclasses.replace(profile, layers=profile.layers * 5)
    assert f"and {len(deep.layers) - 12} more" in shown(deep)


def test_an_answer_and_its_estimate() -> None:
    answer = dl.plan("resnet50", cluster=CLUSTER, devices=4)
    html = shown(answer)
    assert str(answer.best.plan) in re.sub("<[^>]*>", "", html) and "fits" in html
    simulation = dl.simulate("resnet50", "dp=4", cluster=CLUSTER)
    assert shown(simulation).count("<img ") == 1
    assert simulation.estimate is not None
    assert "fits into" in shown(simulation.estimate) and shown(simulation.estimate).count("<img ") == 1
    assert shown(simulation.timeline).count("<img ") == 1


def test_spans_with_the_names_of_a_user() -> None:
    timeline = dl.Timeline("measured", (dl.Span(0, "compute", EVIL, 0.0, 1.0),))
    html = shown(timeline)
    assert base64.b64decode(re.findall(r"base64,([A-Za-z0-9+/=]+)", html)[0]).count(b"<script") == 0
    assert "nothing was recorded" in shown(dl.Timeline("measured"))


@pytest.mark.parametrize("passed", [True, False])
def test_a_verification(passed: bool) -> None:
    result = dl.Verification(passed, "dp=2", 2, 3, {"fp32": 1e-7}, {"fp32": 1e-5}, None if passed else EVIL, "backward")
    html = shown(result)
    assert ("passed" in html) == passed and "1.0e-07" in html


def test_an_error_is_its_message() -> None:
    error = InputError("what", rule="rule", fix="fix")
    assert error._render_traceback_() == ["InputError: what\n  rule:  rule\n  try:   fix"]
