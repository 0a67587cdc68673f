"""Corrections: fitted to runs, combined over runs, models and plans, and applied to estimates."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from drumline.clusters import Cluster, load
from drumline.clusters.corrections import LEAST, MOST, CorrectionFactor, Corrections
from drumline.core.errors import CorruptFile, InputError
from drumline.costs import Estimate, estimate
from drumline.costs.correction_fit import fit_corrections
from drumline.costs.corrections import Corrector, model_digest, plan_kind
from drumline.costs.observed_runs import (
    KEPT_RUNS,
    LENGTH_POWER,
    REFERENCE_SECONDS,
    ObservedRun,
    add_run,
    cluster_digest,
    corrections_file,
    observed_run,
    read_runs,
    remove_runs,
    usable_runs,
)
from drumline.models import Profile, zoo
from drumline.planner import search
from drumline.plans import Plan

MADE = ObservedRun(
    when="2026-01-01T00:00:00",
    job="a",
    name="a",
    kind="replicas",
    ranks=2,
    precision="fp32",
    torch="2",
    measurement="m",
    steps=20,
    predicted={"forward": 1.0, "backward": 2.0, "communication": 0.5, "optimizer": 0.5},
    measured={"forward": 1.5, "backward": 3.0, "optimizer": 0.5},
    step_seconds=6.0,
)


def run(job: str = "a", when: int = 0, factor: float = 1.0, **changes: object) -> ObservedRun:
    """A run that took `factor` times its prediction, in every part."""
    predicted = dict(MADE.predicted)
    measured = {k: factor * v for k, v in predicted.items() if k != "communication"}
    made = dataclasses.replace(
        MADE, job=job, when=f"2026-01-{when + 1:02d}", measured=measured, step_seconds=factor * sum(predicted.values())
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]  # fields by name


def short(job: str = "a", when: int = 0, factor: float = 1.0, **changes: object) -> ObservedRun:
    """The same with steps of some hundredths of a second: all of it takes less than a second."""
    one = run(job, when, factor, **changes)
    predicted, measured = ({k: v / 100 for k, v in parts.items()} for parts in (one.predicted, one.measured))
    return dataclasses.replace(one, predicted=predicted, measured=measured, step_seconds=one.step_seconds / 100)


def total(corrections: Corrections, job: str, kind: str = "replicas", ranks: int = 2, part: str = "forward") -> float:
    """The product of the matching factors for one part."""
    matching = [
        f.value
        for f in corrections.factor
        if f.part == part and f.job in ("", job) and (f.kind, f.ranks) in (("", 0), (kind, ranks))
    ]
    return math.prod(matching)


class TestOneRun:
    """Ratios by part."""

    def test_separate_parts_add_up(self) -> None:
        ratios = MADE.ratios()
        assert ratios["forward"] == pytest.approx(1.5) and ratios["optimizer"] == pytest.approx(1.0)
        assert ratios["communication"] == pytest.approx(2.0)  # what remains of the step
        assert sum(s * ratios[p] for p, s in MADE.predicted.items()) == pytest.approx(6.0)

    def test_parts_that_cannot_be_separated_share_a_ratio(self) -> None:
        split = dataclasses.replace(MADE, kind="split by tp").ratios()
        assert split["forward"] == split["optimizer"] == split["communication"] == pytest.approx(1.5)
        sharded = dataclasses.replace(MADE, kind="fully sharded").ratios()
        assert sharded["forward"] == sharded["communication"] == pytest.approx(5.5 / 3.5)
        assert sharded["optimizer"] == pytest.approx(1.0)

    def test_an_unpredicted_part_is_distributed(self) -> None:
        alone = dataclasses.replace(
            MADE,
            kind="one",
            ranks=1,
            predicted={"forward": 1.0, "backward": 1.0},
            measured={"forward": 1.0, "backward": 1.0},
            step_seconds=2.2,
        )
        ratios = alone.ratios()
        assert ratios["forward"] == ratios["backward"] == pytest.approx(1.1)

    @pytest.mark.parametrize("factor", [1e-3, 1e3])
    def test_bounds(self, factor: float) -> None:
        wild = run(factor=factor)
        assert all(LEAST <= r <= MOST for r in wild.ratios().values())
        fitted = fit_corrections([wild, run("b", 1, factor=factor)])
        assert all(LEAST <= f.value <= MOST for f in fitted.factor)


class TestCombined:
    """Several runs."""

    def test_the_next_run_of_the_same_job_is_nearly_exact(self) -> None:
        assert total(fit_corrections([run(factor=1.6)]), "a") == pytest.approx(1.6, rel=0.02)

    def test_another_job_moves_in_the_same_direction_but_less(self) -> None:
        fitted = fit_corrections([run(factor=1.6)])
        assert 1.2 < total(fitted, "b") < 1.6
        more = fit_corrections([run(job, i, factor=1.6) for i, job in enumerate("cdefg")])
        assert total(fitted, "b") < total(more, "b") < 1.6

    def test_other_plans_move_too(self) -> None:
        """Otherwise a plan would look fast because it has never been tried."""
        fitted = fit_corrections([run(factor=1.6)])
        for job in "ab":
            for kind, ranks in (("sharded", 2), ("one", 1), ("split by tp", 2)):
                assert total(fitted, job, kind, ranks) == pytest.approx(total(fitted, job), rel=0.03)
        assert 1.0 < total(fitted, "a", kind="sharded", part="communication") < total(fitted, "a", part="communication")

    def test_a_difference_between_kinds_is_fitted(self) -> None:
        """Two kinds of plans, one off by 2 and the other exact, in two models: a third model gets the difference too."""
        runs = [
            run(job, i, f, kind=k) for job in "ab" for i, (k, f) in enumerate((("replicas", 2.0), ("sharded", 1.0)))
        ]
        fitted = fit_corrections(runs)
        assert total(fitted, "x", "replicas") > 1.4 * total(fitted, "x", "sharded")
        assert total(fitted, "a", "replicas") == pytest.approx(2.0, rel=0.1)
        assert total(fitted, "a", "sharded") == pytest.approx(1.0, rel=0.1)

    def test_a_step_of_mostly_communication_says_less_about_compute(self) -> None:
        most = {"forward": 0.5, "backward": 0.5, "communication": 3.0}
        few = {"forward": 2.0, "backward": 1.9, "communication": 0.1}
        sure, unsure = (
            total(
                fit_corrections([run(predicted=p, measured={}, step_seconds=8.0, kind="fully sharded")]), "a", "one", 1
            )
            for p in (few, most)
        )
        assert 1.0 < unsure < 1.4 < sure

    def test_newer_runs_count_more(self) -> None:
        rising, falling = ([run(when=i, factor=f) for i, f in enumerate(x)] for x in ((1.0, 1.2, 1.4), (1.4, 1.2, 1.0)))
        assert total(fit_corrections(falling), "a") < 1.2 < total(fit_corrections(rising), "a")
        assert fit_corrections(rising) == fit_corrections(rising[::-1])  # by their time, not by their place

    def test_short_runs_count_less(self) -> None:
        long, short = run("b", 0, 1.5), run("b", 0, 1.5, steps=3)
        assert 1.0 < total(fit_corrections([short]), "c") < total(fit_corrections([long]), "c")

    def test_noisy_runs_correct_less(self) -> None:
        steady, unsteady = (total(fit_corrections([short("b", 0, 1.5, spread=s)]), "b") for s in (0.0, 0.04))
        assert steady == pytest.approx(1.5, rel=0.01)
        assert 1.4 < unsteady < 0.99 * steady
        many = total(fit_corrections([short("b", i, 1.5, spread=0.04) for i in range(6)]), "b")
        assert unsteady < many < steady  # the more of them, the surer
        long = total(fit_corrections([short("b", 0, 1.5, spread=0.04, steps=20 * 25)]), "b")
        assert unsteady < long < steady  # so does one that takes longer than the pace of a machine lasts
        assert short().noise_share == 1.0 and run(steps=20).noise_share == pytest.approx(
            (REFERENCE_SECONDS / 80) ** LENGTH_POWER
        )
        moved, longer = (total(fit_corrections([short("b", 0, 1.5, drift=0.2, steps=n)]), "b") for n in (20, 500))
        assert moved < longer < 1.5  # and what looks saw of the pace is gone sooner

    def test_runs_with_a_large_spread_count_less(self) -> None:
        calm, uneasy = run("b", 0, 1.5), run("b", 0, 1.5, spread=0.4)
        assert 1.0 < total(fit_corrections([uneasy]), "c") < total(fit_corrections([calm]), "c")
        assert total(fit_corrections([run("b", 0, 1.1), run("b", 1, 1.5, spread=0.8)]), "b") < 1.2

    def test_one_outlier_does_not_decide(self) -> None:
        calm = [run(job, i, 1.2) for i, job in enumerate("abcd")]
        wild = [*calm, run("e", 9, 5.0)]
        assert total(fit_corrections(wild), "x") < 1.1 * total(fit_corrections(calm), "x")

    def test_a_job_with_many_runs_counts_once(self) -> None:
        once, often = ([run("a", 0, 1.5), *[run("b", i + 1, 1.0) for i in range(n)]] for n in (1, 9))
        assert total(fit_corrections(often), "x") == pytest.approx(total(fit_corrections(once), "x"), rel=0.03)

    def test_precisions_are_separate(self) -> None:
        fitted = fit_corrections([run(factor=1.5), run(factor=0.5, precision="bf16")])
        assert {f.precision for f in fitted.factor if f.value > 1} == {"fp32"}
        assert {f.precision for f in fitted.factor if f.value < 1} == {"bf16"}

    def test_no_runs_give_no_corrections(self) -> None:
        assert not fit_corrections([])


def errors(runs: Sequence[ObservedRun], others: bool) -> list[float]:
    """Relative errors of the step of each job: with corrections from the other jobs, or without."""
    off = []
    for r in runs:
        known = fit_corrections([x for x in runs if x.job != r.job] if others else [])
        step = sum(s * total(known, r.job, r.kind, r.ranks, p) for p, s in r.predicted.items())
        off.append(abs(step / r.step_seconds - 1))
    return off


@pytest.mark.parametrize("seed", range(5))
def test_corrections_from_some_jobs_help_others(seed: int) -> None:
    """Six models whose parts are off by a factor of the machine, of the kind of plan, and of their own; leave one out."""
    rng = random.Random(seed)
    machine = {"forward": 1.3, "backward": 1.2, "optimizer": 0.7, "communication": 1.0}
    runs = []
    for i, job in enumerate("abcdef"):
        for kind, ranks, message in (("one", 1, 1.0), ("replicas", 2, 2.0), ("sharded", 4, 1.5)):
            predicted = {p: rng.uniform(0.1, 2.0) for p in machine if ranks > 1 or p != "communication"}
            own = rng.lognormvariate(0.0, 0.06)
            true = {p: s * machine[p] * own * (message if p == "communication" else 1.0) for p, s in predicted.items()}
            seen = {p: s for p, s in true.items() if p != "communication"}
            runs.append(
                run(job, i, kind=kind, ranks=ranks, predicted=predicted, measured=seen, step_seconds=sum(true.values()))
            )
    raw, helped = errors(runs, others=False), errors(runs, others=True)
    assert sum(helped) < 0.5 * sum(raw)


def test_an_accurate_prediction_is_hardly_corrected() -> None:
    """Noise alone gives almost no corrections."""
    rng = random.Random(1)
    runs = [run(job, i, rng.lognormvariate(0.0, 0.05)) for i, job in enumerate("abcdef")]
    assert total(fit_corrections(runs), "x") == pytest.approx(1.0, abs=0.06)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return zoo.profile("gpt:125m", batch_size=16)


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return load("dgx-h100").with_devices(8)


class TestEstimate:
    """Estimates on a cluster that has corrections."""

    def corrected(self, cluster: Cluster, *factors: CorrectionFactor) -> Cluster:
        return dataclasses.replace(cluster, corrections=Corrections(factors))

    def test_parts_are_multiplied_and_the_raw_time_is_kept(self, profile: Profile, cluster: Cluster) -> None:
        plan = Plan.parse("dp=8,precision=bf16")
        raw = estimate(profile, plan, cluster)
        assert raw.raw_seconds == 0 and raw.correction == "" and raw.uncorrected_seconds == raw.step_seconds
        known = self.corrected(
            cluster,
            CorrectionFactor("forward", 2.0, "bf16", runs=3),
            CorrectionFactor("forward", 1.5, "bf16", "replicas", 8, runs=2),
        )
        e = estimate(profile, plan, known)
        assert e.parts["forward"] == pytest.approx(3 * raw.parts["forward"])
        assert e.parts["backward"] == raw.parts["backward"] and e.memory_parts == raw.memory_parts
        assert e.step_seconds == pytest.approx(sum(e.parts.values())) and e.raw_seconds == raw.step_seconds
        factor = e.step_seconds / raw.step_seconds
        assert e.correction == f"corrected by 3 runs on this machine, none of this job (x{factor:.2f})"
        assert e.at_speed(0.5).uncorrected_seconds == pytest.approx(2 * raw.step_seconds)

    def test_only_matching_factors_apply(self, profile: Profile, cluster: Cluster) -> None:
        plan = Plan.parse("dp=8,precision=bf16")
        others = (
            CorrectionFactor("forward", 2.0, "fp32"),
            CorrectionFactor("forward", 2.0, "bf16", "replicas", 4),
            CorrectionFactor("forward", 2.0, "bf16", job="another"),
            CorrectionFactor("forward", 2.0, "bf16", "sharded", 8),
        )
        assert estimate(profile, plan, self.corrected(cluster, *others)) == estimate(profile, plan, cluster)
        own = CorrectionFactor("forward", 2.0, "bf16", "replicas", 8, model_digest(profile))
        assert "1 of them of this job" in estimate(profile, plan, self.corrected(cluster, own)).correction

    def test_combined_factors_are_bounded(self, profile: Profile, cluster: Cluster) -> None:
        wild = self.corrected(
            cluster, *(CorrectionFactor("forward", 4.0, "bf16", job=j) for j in ("", model_digest(profile)))
        )
        plan = Plan.parse("precision=bf16")
        factor = estimate(profile, plan, wild).parts["forward"] / estimate(profile, plan, cluster).parts["forward"]
        assert factor == pytest.approx(MOST)

    def test_corrections_change_the_ranking(self, profile: Profile, cluster: Cluster) -> None:
        raw, _ = search(profile, cluster, precision="bf16")
        first = raw.candidates[0].plan
        slow = [
            CorrectionFactor(p, MOST, "bf16", plan_kind(first), first.ranks)
            for p in ("forward", "backward", "communication", "optimizer")
        ]
        again, _ = search(profile, self.corrected(cluster, *slow), precision="bf16")
        assert plan_kind(again.candidates[0].plan) != plan_kind(first)

    def test_a_plan_does_not_win_because_it_was_not_tried(self, profile: Profile, cluster: Cluster) -> None:
        """Every run takes 1.5 times its prediction: the winner ran, and still wins."""
        cluster = dataclasses.replace(
            cluster, origin={**cluster.origin, "device.peak": "measured"}
        )  # as those with runs
        raw, estimates = search(profile, cluster, precision="bf16")
        plan = raw.candidates[0].plan
        e = estimates[str(plan)]
        phases = {p: 1.5 * e.parts[p] for p in ("forward", "backward", "optimizer")}
        seen = observed_run(
            profile,
            plan,
            e,
            step_seconds=1.5 * e.step_seconds,
            phases=[phases],
            each=[1.0] * 20,
            when="",
            torch="",
            measurement="",
        )
        again, corrected = search(
            profile, dataclasses.replace(cluster, corrections=fit_corrections([seen])), precision="bf16"
        )
        best = min((corrected[str(c.plan)] for c in again.candidates), key=lambda e: e.step_seconds)
        assert best.step_seconds > 1.35 * e.step_seconds
        assert best.uncorrected_seconds == pytest.approx(e.step_seconds, rel=0.03)  # the same, or as good

    def test_parts_that_no_run_had_are_corrected_alike(self, profile: Profile, cluster: Cluster) -> None:
        plan = Plan.parse("dp=8,recompute=full,precision=bf16")
        known = self.corrected(cluster, CorrectionFactor("backward", 1.5, "bf16"))
        raw, e = estimate(profile, plan, cluster), estimate(profile, plan, known)
        assert e.parts["recompute"] == pytest.approx(1.5 * raw.parts["recompute"])

    def test_file_forms(self, profile: Profile, cluster: Cluster, tmp_path: Path) -> None:
        known = self.corrected(cluster, CorrectionFactor("forward", 1.25, "bf16", "replicas", 8, "j", 2))
        known.save(tmp_path / "c.toml")
        assert Cluster.load(tmp_path / "c.toml") == known
        e = estimate(
            profile,
            Plan.parse("dp=8,precision=bf16"),
            self.corrected(cluster, CorrectionFactor("forward", 1.5, "bf16")),
        )
        e.save(tmp_path / "e.json")
        assert Estimate.load(tmp_path / "e.json") == e and e.raw_seconds > 0

    def test_digests_of_models(self, profile: Profile, tmp_path: Path) -> None:
        profile.save(tmp_path / "p.json")
        assert model_digest(Profile.load(tmp_path / "p.json")) == model_digest(profile)
        assert model_digest(dataclasses.replace(profile, batch_size=3)) == model_digest(profile)
        assert model_digest(zoo.profile("gpt:350m", batch_size=16)) != model_digest(profile)

    @pytest.mark.parametrize(
        ("plan", "kind"),
        [
            ("dp=1", "one"),
            ("micro=4", "one"),
            ("dp=2", "replicas"),
            ("dp=2,zero=1", "sharded"),
            ("dp=2,zero=2", "sharded"),
            ("dp=2,zero=3", "fully sharded"),
            ("tp=2", "split by tp"),
            ("dp=2,pp=2,tp=2", "split by pp, tp"),
            ("compile=true", "one with compile"),
            ("dp=2,compress=fp16,offload=optimizer", "replicas with fp16, offload"),
        ],
    )
    def test_kinds(self, plan: str, kind: str) -> None:
        assert plan_kind(Plan.parse(plan)) == kind

    def test_from_a_run_and_back(self, profile: Profile, cluster: Cluster) -> None:
        """A run that took longer than predicted is predicted exactly the next time, part by part."""
        plan = Plan.parse("dp=8,precision=bf16")
        raw = estimate(profile, plan, cluster)
        phases = {
            "forward": 1.4 * raw.parts["forward"],
            "backward": 1.1 * raw.parts["backward"],
            "optimizer": raw.parts["optimizer"],
        }
        seen = observed_run(
            profile,
            plan,
            raw,
            step_seconds=1.3 * raw.step_seconds,
            phases=[phases, phases],
            each=[1.0] * 20,
            when="2026-01-01",
            torch="2",
            measurement="m",
        )
        assert seen.steps == 20 and seen.spread == 0.0
        e = Corrector(fit_corrections([seen]), profile, "bf16")(raw, plan)
        assert e.step_seconds == pytest.approx(1.3 * raw.step_seconds, rel=0.03)
        assert e.parts["forward"] == pytest.approx(1.4 * raw.parts["forward"], rel=0.05)


class TestFile:
    """The file of runs next to the cluster file."""

    def test_runs_are_added_and_removed(self, tmp_path: Path) -> None:
        path = corrections_file(tmp_path / "here-2.toml")
        assert path.name == "here-2.corrections.json" and read_runs(path) == ()
        assert [add_run(path, run(when=i)) for i in range(3)] == [1, 2, 3]
        assert read_runs(path) == tuple(run(when=i) for i in range(3))
        assert usable_runs((run(), run(torch="3"), run(measurement="n")), measurement="m", torch="2") == (run(),)
        assert add_run(path, run(measurement="n")) == 1  # the machine was measured anew
        assert remove_runs(path) and not remove_runs(path) and not path.exists()

    def test_old_runs_are_dropped(self, tmp_path: Path) -> None:
        path = tmp_path / "x.corrections.json"
        for i in range(KEPT_RUNS + 3):
            add_run(path, run(str(i)))
        assert len(read_runs(path)) == KEPT_RUNS and read_runs(path)[-1].job == str(KEPT_RUNS + 2)

    @pytest.mark.parametrize(
        ("text", "rule"),
        [
            ("{", "JSON"),
            ("[]", "dictionary"),
            ('{"format": 1}', "'runs' is missing"),
            ('{"format": 1, "runs": [{"job": 1}]}', "[runs.0]"),
        ],
    )
    def test_a_damaged_file_is_refused(self, tmp_path: Path, text: str, rule: str) -> None:
        path = tmp_path / "x.corrections.json"
        path.write_text(text)
        with pytest.raises(CorruptFile) as e:
            read_runs(path)
        assert str(path) in e.value.what and rule in f"{e.value.rule} {e.value.where}"
        assert add_run(path, run()) == 1 and read_runs(path) == (run(),)

    def test_impossible_numbers(self, tmp_path: Path) -> None:
        path = tmp_path / "x.corrections.json"
        add_run(path, run())
        document = json.loads(path.read_text())
        document["runs"][0]["step_seconds"] = -1.0
        path.write_text(json.dumps(document))
        with pytest.raises(CorruptFile, match="damaged"):
            read_runs(path)

    def test_a_later_version_is_not_touched(self, tmp_path: Path) -> None:
        path = tmp_path / "x.corrections.json"
        path.write_text('{"format": 2, "other": 1}')
        for action in (lambda: read_runs(path), lambda: add_run(path, run())):
            with pytest.raises(InputError, match="later drumline"):
                action()
        assert json.loads(path.read_text())["format"] == 2

    def test_a_path_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(InputError, match="cannot be written"):
            add_run(tmp_path / "file" / "x.corrections.json", run())
        (tmp_path / "x.corrections.json").mkdir()
        with pytest.raises(InputError, match="is a folder"):
            add_run(tmp_path / "x.corrections.json", run())
        with pytest.raises(InputError, match="cannot be removed"):
            remove_runs(tmp_path / "x.corrections.json")

    def test_a_measurement_has_a_digest(self, tmp_path: Path) -> None:
        (tmp_path / "a.toml").write_text("a")
        before = cluster_digest(tmp_path / "a.toml")
        (tmp_path / "a.toml").write_text("b")
        assert cluster_digest(tmp_path / "a.toml") != before
        with pytest.raises(InputError, match="no file"):
            cluster_digest(tmp_path / "none.toml")
