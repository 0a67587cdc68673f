"""The page of a search: its sections, its numbers, and what it shows of an answer alone."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest
from fake_predictions import GIB, make_plan_report
from fake_run import EVIL, make_bare_run, make_cluster, make_profile
from page_reader import Reader

import drumline as dl
from drumline.clusters import load
from drumline.core.errors import InputError
from drumline.models.zoo import profile as zoo_profile
from drumline.planner import search
from drumline.planner.strategy_map import candidate_maps, strategy_maps
from drumline.plans.plan import Plan
from drumline.reports.plan_page import plan_page, write_plan_page
from drumline.reports.plan_report import PlanReport
from drumline.reports.roofline_section import operator_rates, roofline_section
from drumline.reports.svg_heatmap import HeatCell, heat_level, heat_map
from drumline.reports.svg_scatter import ChartAxis, ScatterPoint, ScatterSeries, scatter_chart
from drumline.theory.roofline import Roofline

sys.path.insert(0, str(Path(__file__).parents[1]))
from command import here

SECTIONS = [
    "The best plan",
    "Why this one, and why the alternatives lose",
    "The strategy space",
    "Time against memory",
    "More and fewer devices",
    "Memory of the fullest device",
    "The operators under the roofline",
    "The candidates",
    "The model",
    "The cluster",
]


# ---- the page


def test_the_order_of_the_page() -> None:
    text = Reader(plan_page(make_plan_report())).text
    places = [text.index(x) for x in SECTIONS]
    assert places == sorted(places)
    best = make_plan_report().answer.best
    assert f"116 ms a step: {best.reason}." in text and "36 plans in 420 ms" in text
    assert "becomes the fastest if the link is faster than 9 GB/s" in text
    assert "From 2 to 8 devices, a device keeps" in text


def test_every_picture_has_a_title_a_description_and_a_table() -> None:
    read = Reader(plan_page(make_plan_report()))
    ids = [v for _, k, v in read.attributes if k == "id"]
    assert len(ids) == len(set(ids))
    assert {v[1:] for _, k, v in read.attributes if k == "href" and v.startswith("#")} <= set(ids)
    pictures = [x for x in read.attributes if x == ("svg", "role", "img")]
    # parts, two maps, Pareto front, scaling, memory, roofline; the parts of two plans are a table that is not folded
    assert len(pictures) == read.tags.count("desc") == 7
    assert read.tags.count("details") == 6 + 1  # and the measured curves of the cluster


def test_the_users_plan_is_next_to_the_best() -> None:
    text = Reader(plan_page(make_plan_report())).text
    assert "Yours" in text and "yours" in text
    assert "yours" not in Reader(plan_page(dataclasses.replace(make_plan_report(), given=None))).text


def test_an_answer_alone() -> None:
    answer = make_plan_report().answer
    text = Reader(plan_page(PlanReport.of_answer(answer))).text
    for title in ("The strategy space", "Time against memory", "The candidates", SECTIONS[1]):
        assert title in text
    for title in ("The cluster", "The model", "Memory of the fullest device", "More and fewer devices"):
        assert title not in text


def test_one_plan_has_no_maps_and_no_front() -> None:
    report = make_plan_report()
    one = dataclasses.replace(report.answer, candidates=report.answer.candidates[:1], families=())
    text = Reader(plan_page(PlanReport.of_answer(one))).text
    assert "The strategy space" not in text and "Time against memory" not in text


def test_names_that_are_markup_stay_text() -> None:
    bare = make_bare_run()
    answer = dataclasses.replace(make_plan_report().answer, explanation=EVIL * 20, scored_by=EVIL)
    page = plan_page(dataclasses.replace(make_plan_report(), answer=answer, profile=bare.profile, cluster=bare.cluster))
    assert "<script>alert" not in page and "<img" not in page and page.count("<script>") == 1


def test_it_writes_a_file_or_into_a_folder(tmp_path: Path) -> None:
    assert write_plan_page(make_plan_report(), tmp_path) == tmp_path / "plan.html"
    assert write_plan_page(make_plan_report(), tmp_path / "new" / "p.html").exists()


# ---- the map of the strategy space


def test_a_cell_is_the_fastest_that_fits_else_the_smallest() -> None:
    plans = [
        (Plan.parse("dp=4"), 1.0, 3.0, True),
        (Plan.parse("dp=4,recompute=full"), 2.0, 2.0, True),
        (Plan.parse("dp=2,tp=2"), 1.5, 9.0, False),
        (Plan.parse("dp=2,tp=2,recompute=full"), 2.5, 5.0, False),
        (Plan.parse("dp=2,pp=2"), 1.2, 2.0, True),
    ]
    (cells,) = candidate_maps(plans)
    assert (cells.column_key, cells.row_key) == ("tp", "pp")
    assert [(c.column, c.row, c.step_seconds, c.memory_bytes, c.fits) for c in cells.cells] == [
        (1, 1, 1.0, 3.0, True),
        (2, 1, 2.5, 5.0, False),
        (1, 2, 1.2, 2.0, True),
    ]
    assert cells.best is not None and cells.best.plan == "dp=4"


def test_rows_are_powers_of_two_and_the_winners() -> None:
    rows = [(Plan.parse(f"dp=2,zero={z},micro={m}"), m + z / 4, 1.0, True) for m in (6, 1, 2, 3, 4, 5) for z in (0, 1)]
    (cells,) = candidate_maps(rows)
    assert sorted({c.row for c in cells.cells}) == [1, 2, 4, 6]


def test_the_map_of_the_whole_space_agrees_with_the_search() -> None:
    """Where a search keeps finalists only, the space is scored again: no cell may beat the winner."""
    profile, cluster = zoo_profile("gpt:1.3b"), load("dgx-a100").with_devices(8)
    answer, estimates = search(profile, cluster)
    ranked = [(c.plan, estimates[str(c.plan)]) for c in answer.candidates]
    maps = strategy_maps(profile, cluster, answer.best.plan.precision, ranked)
    assert len(maps) == 2
    for m in maps:
        fastest = min(c.step_seconds for c in answer.candidates if c.fits and not c.in_reserve)
        assert m.best is not None and fastest * (1 - 1e-6) <= m.best.step_seconds
        assert m.best.step_seconds <= answer.best.step_seconds * (1 + 1e-6)
        assert str(answer.best.plan) in {c.plan for c in m.cells}
        assert {c.column for c in m.cells} == ({1, 2, 4, 8} if m.column_key == "tp" else {0, 1, 2, 3})
        for c in m.cells:
            plan = Plan.parse(c.plan)
            assert (getattr(plan, m.column_key), getattr(plan, m.row_key)) == (c.column, c.row)


# ---- drawings


def test_heat_levels_are_relative_to_the_least() -> None:
    assert [heat_level(x, 1.0) for x in (1.0, 1.04, 1.1, 1.3, 1.7, 2.4, 4.9, 50)] == [0, 0, 1, 2, 3, 4, 5, 6]
    drawn = heat_map(
        "map",
        [
            HeatCell("1", "1", 1.0, "1 s", "tip", best=True),
            HeatCell("2", "1", 3.0, "3 s", "tip"),
            HeatCell("1", "2", 0.5, "9 GiB", "tip", fails=True),
        ],
        columns="tp",
        rows="pp",
    )
    assert drawn.count('class="best"') == 1 and drawn.count("s hatch") == 1 and "s heat h0" in drawn
    assert "s heat h5" in drawn  # 3 times the least that fits: what fails does not count


def test_a_scatter_chart_leaves_out_what_a_logarithm_cannot_show() -> None:
    axis = ChartAxis("x", lambda v: f"{v:g}", base=10)
    points = [
        ScatterPoint(1, 10, "a"),
        ScatterPoint(0, 10, "b"),
        ScatterPoint(1000, float("nan"), "c"),
        ScatterPoint(50, 20),
    ]
    drawn = scatter_chart("chart", [ScatterSeries("dots", points, "k-forward")], x=axis, y=axis)
    assert drawn.count("<circle") == 2 and "dots: 2 points" in drawn
    assert "nothing to draw" in scatter_chart("chart", [ScatterSeries("dots", [], "k-forward")], x=axis, y=axis)


def test_axes_have_two_labels_or_more() -> None:
    for low, high in ((1.0, 1.02), (25.0, 40.0), (1e-6, 1e3), (3.0, 5e4), (7.0, 7.0)):
        for base in (0.0, 2.0, 10.0):
            axis = ChartAxis("x", lambda v: f"{v:.6g}", base=base)
            drawn = scatter_chart(
                "chart", [ScatterSeries("s", [ScatterPoint(low, low), ScatterPoint(high, high)], "")], x=axis, y=axis
            )
            labels = re.findall(r'text-anchor="(?:start|middle|end)">([\d.e+-]+)<', drawn)
            assert 2 <= len(set(labels)) <= 20, (low, high, base, labels)


# ---- the roofline


def test_operators_are_below_the_roofline() -> None:
    profile, plan, cluster = zoo_profile("gpt:1.3b"), Plan.parse("dp=8,precision=bf16"), load("dgx-a100")
    roof = Roofline.of(cluster.device, "bf16")
    operators = operator_rates(profile, plan, cluster.device, profile.batch_size)
    assert operators[0].seconds == max(o.seconds for o in operators)
    for o in operators:
        if o.flops:
            assert o.rate <= roof.rate(o.intensity) * (1 + 1e-9), o
    work = profile.flops().at(profile.batch_size / 8)
    assert sum(o.flops for o in operators) == pytest.approx(work)


def test_tensor_parallelism_halves_the_work_of_a_rank() -> None:
    profile, device = zoo_profile("gpt:1.3b"), load("dgx-a100").device
    whole, half = (
        {(o.name, o.phase): o for o in operator_rates(profile, Plan.parse(p), device, 8)}
        for p in ("dp=1,precision=bf16", "tp=2,precision=bf16")
    )
    largest = max(whole.values(), key=lambda o: o.flops)
    assert half[largest.name, largest.phase].flops == pytest.approx(largest.flops / 2, rel=0.2)


def test_no_roofline_without_operators_or_rates() -> None:
    cluster, profile = make_cluster(), make_profile()
    plan = Plan.parse("dp=1")
    assert roofline_section(profile, plan, cluster.device, 16) is not None
    assert roofline_section(make_bare_run().profile, plan, cluster.device, 16) is None
    assert roofline_section(profile, Plan.parse("dp=1,precision=fp16"), cluster.device, 16) is None


# ---- as a verb and as a command


def test_the_command(tmp_path: Path) -> None:
    words = ("plan", "resnet50", "--cluster", "dgx-a100", "--devices", "4", "--batch", "64", "--top", "1")
    done = here(*words, "--page", "p.html", cwd=tmp_path)
    assert done.returncode == 0 and "page: p.html" in done.stdout, done.stderr
    text = Reader((tmp_path / "p.html").read_text(encoding="utf-8")).text
    assert [t for t in SECTIONS if t not in text] == []
    assert (tmp_path / "p.html").stat().st_size < 10**6
    done = here(*words, "--page", str(tmp_path), "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["page"] == str(tmp_path / "plan.html")


def test_refused_with_other_tools(tmp_path: Path) -> None:
    done = here("plan", "resnet50", "--cluster", "dgx-a100", "--emit", "deepspeed", "--page", "p.html", cwd=tmp_path)
    assert done.returncode == 2 and "--from and --emit with another question" in done.stderr


def test_as_a_verb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    answer = dl.plan("resnet50", "dgx-a100", devices=2, batch=32, page="p.html")
    assert "The cluster" in Reader((tmp_path / "p.html").read_text(encoding="utf-8")).text
    assert dl.report(answer) == Path("plan.html") and Path("plan.html").exists()
    with pytest.raises(InputError, match="only runs and simulations have a timeline"):
        dl.report(answer, trace="t.json")
    with pytest.raises(InputError, match="compares several runs"):
        dl.report(answer, loss=1.0)


def test_memory_is_shown_in_binary_units() -> None:
    text = plan_page(make_plan_report())
    assert GIB == 2**30 and ">2 GiB<" in text and "18.6 GiB" not in text
