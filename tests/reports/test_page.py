"""The report page: its text, and that it is inert and self-contained."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import math
import re
from pathlib import Path

import pytest
from fake_run import EVIL, MIB, make_answer, make_bare_run, make_profile, make_run, make_timeline
from page_reader import Reader

from drumline.core.timeline import Span, Timeline
from drumline.reports import Run, StepRecord
from drumline.reports.markup import cut, escape, tag
from drumline.reports.page import page, write_page
from drumline.reports.page_style import STYLE
from drumline.reports.prediction_error import memory_in_words, time_in_words, verdict
from drumline.reports.split_summary import SplitSummary
from drumline.reports.step_parts import idle_share, parts_of, phase_of, short_name
from drumline.reports.svg_heatmap import LEVELS
from drumline.reports.svg_timeline import MOST_BYTES, timelines


def text_of(run: Run) -> str:
    return Reader(page(run)).text


# ---- what it says


def test_the_verdict() -> None:
    assert verdict(make_run()) == "Predicted 41.2 ms a step, measured 44.0 ms: 6.8% slower than predicted."
    assert verdict(dataclasses.replace(make_run(), step_seconds=0.0)) == (
        "Predicted 41.2 ms a step; nothing was measured."
    )
    assert time_in_words(0.25) == "20.0% faster than predicted"
    assert time_in_words(1.5) == "2.5 times as fast as predicted"
    assert time_in_words(1 / 2.5 - 1) == "2.5 times as long as predicted"
    assert time_in_words(-1.0) == "nothing was predicted"
    assert time_in_words(-0.0001) == memory_in_words(0.0001) == "as predicted, to 0.1%"
    assert (
        memory_in_words(-0.076) == "8.2% more than predicted" and memory_in_words(0.25) == "20.0% less than predicted"
    )
    assert memory_in_words(-0.6) == "2.5 times as much as predicted"


def test_the_order_of_the_page() -> None:
    text = text_of(make_run())
    order = [
        "Predicted 41.2",
        "Command",
        "Predicted and measured",
        "One step, rank by rank",
        "Memory of the fullest rank",
        "Loss and step time",
        "The plan, and why it won",
        "The model",
        "The cluster",
        "torch 2.13.0",
    ]
    places = [text.index(x) for x in order]
    assert places == sorted(places)
    for word in (
        "12 January 2026, 14:03 UTC",
        "2 x Intel Xeon",
        "examples/gpt.py:job",
        "6.8% slower than predicted",
        "8.2% more than predicted",
        "within the stated error of ±12%",
        "accuracy 0.4821",
        "rates measured on this machine",
    ):
        assert word in text


def test_rows_of_parts_add_up_to_the_error() -> None:
    text = text_of(make_run())
    rows = text[text.index("in ms") : text.index("Communication is")]
    shares = [float(x) for x in re.findall(r"([+-][\d.]+)%", rows)]
    assert len(shares) == 6
    assert sum(shares[:-1]) == pytest.approx(shares[-1], abs=0.3)
    assert shares[-1] == 6.8


def test_a_far_limit_is_named_and_a_near_one_drawn() -> None:
    run = make_run()
    assert "4.00 GiB is 24.0 times the larger bar" in text_of(run)
    assert "limit 4.00 GiB" not in text_of(run).replace("; limit 4.00 GiB.", "")
    tight = dataclasses.replace(run, estimate=dataclasses.replace(run.estimate, memory_limit=180 * MIB))
    assert "limit 180 MiB" in text_of(tight).replace("; limit 180 MiB.", "")
    assert "9.00 MiB above the larger bar: it fits" in text_of(tight)
    over = dataclasses.replace(run, estimate=dataclasses.replace(run.estimate, memory_limit=160 * MIB))
    assert "11.0 MiB below the larger bar: it does not fit" in text_of(over)


def test_host_memory_is_shown_if_something_is_offloaded() -> None:
    run = make_run()
    assert "host memory" not in text_of(run)
    there = dataclasses.replace(run.estimate, host_bytes=3 * MIB, host_limit=64 * MIB)
    assert "Predicted host memory: 3.00 MiB of 64.0 MiB per rank." in text_of(dataclasses.replace(run, estimate=there))


def test_thirty_candidates_and_the_count_of_the_rest() -> None:
    run = make_run()
    text = text_of(dataclasses.replace(run, answer=make_answer(str(run.plan), 75)))
    assert (
        "75 candidates in 370 ms; 60 of them fit. 45 more are in answer.json. This run's plan is highlighted." in text
    )
    assert "bucket= 29000000" in text.replace("bucket=", "bucket= ") and "bucket=31000000" not in text


def test_a_plan_far_down_the_list_is_still_shown() -> None:
    run = make_run()
    answer = make_answer("dp=2", 75)
    low = answer.candidates[50].plan
    answer = dataclasses.replace(
        answer,
        candidates=tuple(dataclasses.replace(c, plan=low) if i == 50 else c for i, c in enumerate(answer.candidates)),
    )
    text = page(dataclasses.replace(run, plan=low, answer=answer))
    marked = re.search(r'<tr class="marked">.*?</tr>', text)
    assert marked and ">51<" in marked[0]
    assert "44 more are in answer.json" in text


def test_equal_layers_are_one_row() -> None:
    text = text_of(make_run())
    assert "blocks.0 … blocks.5 \u00d7 6" in text
    assert "10,646,784" in text
    block = dataclasses.replace(make_profile().layers[1], repeats=6)
    folded = dataclasses.replace(make_profile(), layers=(block,))
    assert "blocks.0 … blocks.5 \u00d7 6" in text_of(dataclasses.replace(make_run(), profile=folded))


def test_a_loss_that_is_not_finite_is_reported() -> None:
    steps = tuple(StepRecord(i, math.nan if i > 7 else 1.0 / i, 1.0, 0.04, 16) for i in range(1, 12))
    text = page(dataclasses.replace(make_run(), steps=steps))
    assert "The loss is not finite from step 8 on: nan." in text
    none = tuple(StepRecord(i, math.inf, 1.0, 0.04, 16) for i in range(1, 3))
    assert "Loss over the steps: no finite value." in text_of(dataclasses.replace(make_run(), steps=none))


def test_a_step_off_the_scale_is_marked() -> None:
    text = page(make_run())
    assert text.count("▲") == 1
    assert "longest: step 1, 310 ms" in text


def test_a_call_of_the_library_is_shown_as_it_is() -> None:
    """Only commands of a shell are quoted as such."""
    call = "drumline.train('job.py', 'dp=2')"
    assert call in text_of(dataclasses.replace(make_run(), command=(call,)))


def test_an_empty_run_has_a_page() -> None:
    run = make_run()
    zero = dataclasses.replace(run.estimate, step_seconds=0.0, parts={}, memory_bytes=0.0, memory_parts={})
    empty = dataclasses.replace(
        run,
        estimate=zero,
        steps=(),
        step_seconds=0.0,
        peak_bytes=0.0,
        memory_parts={},
        answer=None,
        predicted=Timeline("predicted"),
        measured=Timeline("measured"),
        evaluation={},
    )
    text = text_of(empty)
    for word in (
        "nothing was measured",
        "No step was taken",
        "Nothing was recorded on either timeline",
        "Memory was neither predicted nor measured",
        "given, not searched for",
    ):
        assert word in text


# ---- parts of a recorded step


def test_parts_of_a_timeline_add_up_and_exclude_hidden_communication() -> None:
    spans = (
        Span(0, "compute", "forward a", 1.0, 3.0),
        Span(0, "compute", "backward a", 3.0, 7.0),
        Span(0, "compute", "recompute a", 3.0, 4.0),
        Span(0, "communication", "all_reduce", 6.0, 9.0),
        Span(0, "compute", "optimizer", 9.5, 11.0),
    )
    assert parts_of(Timeline("measured", spans)) == pytest.approx(
        {"forward": 2.0, "backward": 3.0, "recompute": 1.0, "communication": 2.0, "optimizer": 1.5, "overhead": 0.5}
    )
    real = make_timeline("measured", slow=1.1, jitter=0.1)
    assert sum(parts_of(real).values()) == pytest.approx(real.seconds)
    assert parts_of(Timeline("measured")) == {}
    assert idle_share(Timeline("measured", spans)) == pytest.approx(0.25)
    assert idle_share(Timeline("measured")) == 0.0


@pytest.mark.parametrize(
    ("name", "phase", "short"),
    [
        ("forward blocks.3", "forward", "blocks.3"),
        ("F3", "forward", "F3"),
        ("bwd: head", "backward", "head"),
        ("AdamW.step", "optimizer", "step"),
        ("optimizer", "optimizer", "optimizer"),
        ("W0", "backward", "W0"),
        ("forwarder", "overhead", "forwarder"),
        ("Forward", "forward", "Forward"),
        ("zero grads", "overhead", "zero grads"),
    ],
)
def test_names_of_spans(name: str, phase: str, short: str) -> None:
    assert phase_of("compute", name) == phase
    assert phase_of("communication", name) == "communication"
    assert short_name(name) == short


# ---- inert, self-contained, small


@pytest.mark.parametrize("run", [make_run(), make_bare_run()], ids=["full", "bare"])
def test_nothing_is_fetched_and_only_our_script_runs(run: Run) -> None:
    text = page(run)
    read = Reader(text)
    assert read.tags.count("script") == 1 and not {"img", "iframe", "object", "embed", "base", "form"} & set(read.tags)
    assert not [x for x in read.attributes if x[1].startswith("on") or x[1] in ("src", "srcset", "action")]
    assert {v[0] if v.startswith("#") else v for _, k, v in read.attributes if k == "href"} == {"#", "data:,"}
    assert not re.search(r"(?i)@import|url\((?!#idle)", text)
    policy = next(v for _, k, v in read.attributes if k == "content" and "default-src" in v)
    script = re.search(r"<script>(.*?)</script>", text, re.S)
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy
    assert "unsafe" not in policy.replace("style-src 'unsafe-inline'", "")


def test_markup_in_names_is_text() -> None:
    text = page(make_bare_run())
    assert "<script>alert" not in text and "<img" not in text
    assert Reader(text).text.count(EVIL) >= 10
    assert "\u202e" not in text and "\x00" not in text


def test_ids_are_unique_and_tables_have_headers() -> None:
    read = Reader(page(make_run()))
    ids = [v for _, k, v in read.attributes if k == "id"]
    assert len(ids) == len(set(ids))
    assert {v[1:] for _, k, v in read.attributes if k == "href" and v.startswith("#")} <= set(ids)
    assert read.tags.count("table") == read.tags.count("thead") == read.tags.count("caption") == 12
    pictures = [x for x in read.attributes if x == ("svg", "role", "img")]
    assert len(pictures) == read.tags.count("desc") == 7
    assert read.tags.count("details") == read.tags.count("summary") == 5


def test_the_page_is_deterministic() -> None:
    assert page(make_run()) == page(make_run())


def test_a_large_run_makes_a_small_page() -> None:
    run = make_run()
    spans = tuple(
        Span(r, lane, f"forward layer.{i} with a rather long name", i * 1e-4, i * 1e-4 + 9e-5, 1e6)
        for r in range(64)
        for lane in ("compute", "communication")
        for i in range(500)
    )
    steps = tuple(StepRecord(i, 1 + 1 / i, 1.0, 0.04, 16) for i in range(1, 20_001))
    many = make_profile().layers * 60
    layers = tuple(dataclasses.replace(x, name=f"x.{i}", parameters=i) for i, x in enumerate(many))
    large = dataclasses.replace(
        run,
        predicted=Timeline("predicted", spans),
        measured=Timeline("measured", spans),
        steps=steps,
        profile=dataclasses.replace(run.profile, layers=layers),
    )
    text = page(large)
    assert len(text.encode()) < 1_000_000
    assert re.search(r"\d of 64 predicted ranks are drawn", text) and "drawn as one" in text and "440 more rows" in text


def drawn_areas(drawing: str, kind: str) -> list[float]:
    """Width times height of what is drawn of a kind, in lanes of full width."""
    boxes = re.findall(rf'class="s k-{kind}[^>]* width="([\d.]+)%" height="([\d.]+)"', drawing)
    return [float(w) / 100 * float(h) / 20 for w, h in boxes]


def test_sparse_messages_are_not_joined_to_one() -> None:
    """Where spans of one kind cannot be joined without hiding that a lane is idle, their height says how busy it is."""
    spans = tuple(
        Span(r, lane, name, i + start, i + start + length)
        for r in range(16)
        for i in range(600)
        for lane, name, start, length in (("compute", f"F{i}", 0.0, 0.4), ("communication", f"to stage {r}", 0.5, 0.01))
    )
    drawn = timelines(Timeline("predicted", spans))
    assert len(drawn) <= MOST_BYTES * 1.01
    assert "8 of 16 predicted ranks are drawn" in drawn and "their heights are their shares of the time" in drawn
    assert sum(drawn_areas(drawn, "forward")) == pytest.approx(8 * 0.4, rel=0.02)
    assert sum(drawn_areas(drawn, "communication")) == pytest.approx(8 * 0.01, rel=0.1)


def test_at_least_eight_stages_of_a_long_pipeline_are_drawn() -> None:
    """Forward and backward alternate, so neighbours of one kind cannot be joined."""
    spans = tuple(
        Span(48 * stage, lane, f"{name} m{i}", stage + 3 * i + start, stage + 3 * i + start + length, 1.0)
        for stage in range(64)
        for i in range(512)
        for lane, name, start, length in (
            ("compute", f"forward stage {stage}", 0.0, 0.9),
            ("compute", f"backward stage {stage}", 1.0, 1.8),
            ("communication", f"F to stage {stage + 1}", 0.9, 0.2),
        )
    )
    drawn = timelines(Timeline("predicted", spans, rank_counts=dict.fromkeys(range(0, 48 * 64, 48), 48)))
    assert len(drawn) <= MOST_BYTES * 1.01
    assert "8 of 64 predicted ranks are drawn" in drawn
    whole = (63 + 3 * 512) * 1.005
    assert sum(drawn_areas(drawn, "forward")) == pytest.approx(8 * 512 * 0.9 / whole, rel=0.02)
    assert sum(drawn_areas(drawn, "backward")) == pytest.approx(8 * 512 * 1.8 / whole, rel=0.02)
    tips = re.findall(r"<title>(backward stage 63 m\d+ and \d+ more)\n(\d+)% of ([\d.]+ \w+) from", drawn)
    assert len(tips) > 20 and all(50 <= int(share) <= 70 for _, share, _ in tips[1:-1])


def test_how_spans_and_notes_of_a_timeline_are_written() -> None:
    """The gradient of weights is backward, a pass of a pipeline has its phase as name, and a note is a sentence."""
    spans = (
        Span(0, "compute", "forward (model)", 0.0, 1.0),
        Span(0, "compute", "backward stage 0 m0", 1.0, 2.0),
        Span(0, "compute", "weights stage 0 m0", 2.0, 3.0),
    )
    drawn = timelines(Timeline("measured", spans, ("step 2, recorded under the profiler",)))
    assert ">forward</text>" in drawn and "(model)</text>" not in drawn and "other work" not in drawn
    assert drawn.count('class="s k-backward') == 2 and "Step 2, recorded under the profiler." in drawn


def test_the_measured_curves_of_a_cluster_are_folded() -> None:
    text = page(make_run())
    folded = text[text.index("3 measured curves and tables") :]
    assert "matmul, fp32: 3 sizes" in folded and "all_reduce of 2 ranks over gloo" in folded
    assert "matmul, fp32" not in text[: text.index("3 measured curves and tables")]


def test_long_names_are_cut_with_the_whole_in_a_tooltip() -> None:
    name = "a" * 30 + "<b>" + "z" * 30
    assert cut(name, 11) == f'<span class="cut" title="{escape(name)}">aaaaa…zzzzz</span>'
    assert cut("short", 11) == "short"
    assert tag("p", "<b>", title='"') == '<p title="&quot;">&lt;b&gt;</p>'
    run = dataclasses.replace(make_run(), job="examples/" + "deep/" * 60 + "gpt.py:job")
    assert f'title="{run.job}"' in page(run)


def test_write_page_takes_a_file_or_a_folder(tmp_path: Path) -> None:
    assert write_page(make_run(), tmp_path) == tmp_path / "report.html"
    other = write_page(make_run(), tmp_path / "new" / "a.html")
    assert other == tmp_path / "new" / "a.html"
    for path in (other, tmp_path / "report.html"):
        assert path.read_text(encoding="utf-8") == page(make_run())


# ---- colours


def _contrast(a: str, b: str) -> float:
    def light(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    high, low = sorted((light(a), light(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read(scheme: str) -> None:
    parts = STYLE.split("prefers-color-scheme")
    first, second = (
        dict(re.findall(r"--([\w-]+): (#\w{6});", part)) for part in (parts[0], parts[1].partition("\n}\n")[0])
    )
    colours = first if scheme == "light" else first | second
    for text in ("ink", "soft", "link", "good", "fair", "poor"):
        assert _contrast(colours[text], colours["paper"]) >= 4.5, text
    for kind in ("forward", "communication", "activations", "parameters", "overhead", "other", "recompute", "data"):
        assert _contrast(colours["on-light"], colours[kind]) >= 4.5, kind
    for kind in ("backward", "gradients", "optimizer"):
        assert _contrast(colours["on-dark"], colours[kind]) >= 4.5, kind
    for level in range(LEVELS):
        assert _contrast(colours[f"heat-ink{level}"], colours[f"heat{level}"]) >= 4.5, level


def test_the_bubble_and_unsplit_parts_are_shown() -> None:
    bubble = {"predicted": 0.2, "measured": 0.25, "order": 0.21}
    division = SplitSummary(gathered={"rows": {"aten.cumsum.default": ("body",)}}, stages=("b",), bubble=bubble)
    text = page(dataclasses.replace(make_run(), division=division))
    assert "Pipeline bubble" in text and "25.0%" in text and "predicted 20.0%" in text
    assert "21.0% if messages took no time" in text and "tile rows gathers tensors for cumsum (body)." in text
    assert "Pipeline bubble" not in page(make_run())
