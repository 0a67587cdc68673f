"""The loop as a library: every verb takes values, paths and names, and returns a value without printing."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

import drumline as dl
from drumline.clusters import Cluster, DeviceSpec, Link, Node, load
from drumline.core.errors import DoesNotFit, InputError, JobError
from drumline.models import zoo

ROOT = Path(__file__).parents[2]
JOB = """
import torch
import torch.nn.functional as F
import drumline as dl


def job():
    return dl.Job(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)),
        loss=F.cross_entropy,
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
        data=lambda: [(torch.full((8,), float(i % 4)), i % 4) for i in range(40)],
        batch_size=10,
        steps=6,
    )
"""
MACHINE = Cluster(
    "here",
    DeviceSpec("core", "cpu", 1e10, 1e10, {"fp32": 1e10}, 1e-5, threads=1),
    Node(2, Link(1e-4, 1e9)),
    origin={"": "measured", "device": "measured", "node": "measured"},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verbs")
    (folder / "tiny.py").write_text(JOB)
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> dl.Run:
    seen: list[dl.StepRecord] = []
    made = dl.train(folder / "tiny.py", "dp=2", cluster=MACHINE, output=folder / "run", on_step=seen.append)
    assert [r.loss for r in seen] == made.losses
    return made


def test_train_returns_the_run(run: dl.Run, folder: Path) -> None:
    assert run.folder == folder / "run" and len(run.losses) == 6 and run.losses[-1] < run.losses[0]
    assert run.step_seconds > 0 and run.predicted_step_seconds > 0 and str(run.plan) == "dp=2"
    assert run.command[0].startswith("drumline.train(") and run == dl.Run.load(folder / "run")


def test_a_given_plan_is_priced_and_not_searched(run: dl.Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run.answer is None and not (folder / "run" / "answer.json").exists()
    assert "no candidates to compare" in dl.report(run).read_text()
    compared = dl.train(folder / "tiny.py", "dp=1", steps=2, cluster=MACHINE, output=folder / "compared", compare=True)
    assert compared.answer is not None and (folder / "compared" / "answer.json").exists()

    def search(*_: object, **__: object) -> None:
        raise AssertionError("a given plan was searched for")

    monkeypatch.setattr("drumline.planner.search", search)
    dl.train(folder / "tiny.py", "dp=1", steps=2, cluster=MACHINE, output=folder / "priced")


def test_report_takes_a_run_or_its_folder(run: dl.Run, folder: Path, tmp_path: Path) -> None:
    page = dl.report(run)
    assert page == folder / "run" / "report.html" and "<svg" in page.read_text()
    other = dl.report(folder / "run", output=tmp_path / "page.html", trace=tmp_path / "trace.json")
    assert other == tmp_path / "page.html" and other.read_text() == page.read_text()
    assert "predicted rank 0" in (tmp_path / "trace.json").read_text()


def test_verify_returns_errors_and_the_first_divergence(folder: Path) -> None:
    result = dl.verify(f"{folder / 'tiny.py'}:job", dl.Plan(dp=2, zero=3), steps=2)
    assert result.passed and result.first_divergence is None and 0 <= result.errors["float64"] <= 1e-10


def test_plan_takes_names_values_and_files(folder: Path) -> None:
    by_name = dl.plan("gpt:1.3b", "dgx-h100", devices=4, batch=32)
    best = by_name.best
    assert isinstance(best, dl.Candidate) and isinstance(best.plan, dl.Plan) and best.fits
    by_value = dl.plan(zoo.profile("gpt:1.3b", batch_size=32), load("dgx-h100").with_devices(4))
    assert [(c.plan, c.step_seconds) for c in by_value.candidates] == [
        (c.plan, c.step_seconds) for c in by_name.candidates
    ]
    job = dl.Job.load(str(folder / "tiny.py"))
    traced = [dl.plan(x, MACHINE).best.plan for x in (job, folder / "tiny.py", dl.profile(job))]
    assert len(set(traced)) == 1
    assert dl.plan("gpt:1.3b", "dgx-h100", devices=4, objective="memory").best.memory_bytes <= best.memory_bytes


def test_plan_refuses_bad_arguments() -> None:
    for arguments, words in (
        ({"devices": 0}, "at least one device"),
        ({"batch": 0}, "from 1 to"),
        ({"precision": "fp31"}, "one of"),
        ({"objective": "tiem"}, "Did you mean 'time'?"),
        ({"memory": "4parsec"}, "no known unit"),
    ):
        with pytest.raises(InputError) as caught:
            dl.plan("gpt:1.3b", "dgx-h100", **arguments)  # type: ignore[arg-type]  # wrong on purpose
        assert words in str(caught.value)
    with pytest.raises(DoesNotFit):
        dl.plan("gpt:175b", "dgx-a100", devices=8)


def test_profile_of_a_job_a_function_and_the_zoo(folder: Path) -> None:
    job = dl.Job.load(str(folder / "tiny.py"))
    assert dl.profile(job, batch=20).batch_size == 20
    assert dl.profile(lambda: job).layers == dl.profile(job).layers
    assert dl.profile("gpt:125m").parameters == zoo.profile("gpt:125m").parameters
    with pytest.raises(InputError, match="it returns a drumline.Job"):
        dl.profile(lambda: 3)  # type: ignore[arg-type, return-value]  # wrong on purpose


def test_simulate_a_step_a_collective_and_a_pipeline() -> None:
    step = dl.simulate("gpt:1.3b", dl.Plan(dp=8), "dgx-a100")
    assert step.step_seconds == step.timeline.seconds > 0
    assert sum(step.parts.values()) == pytest.approx(step.step_seconds, rel=0.05) and step.estimate is not None
    ring = dl.simulate("all_reduce:ring", cluster="dgx-h100", ranks=4, size=4_000_000)
    assert ring.step_seconds == pytest.approx(6 * (3e-6 + 1e6 / 450e9)) and ring.schedule is not None
    pipeline = dl.simulate("pipeline:1f1b", ranks=4, micro=8)
    assert pipeline.bubble == pytest.approx(3 / 11) and pipeline.activations == 4 and pipeline.critical_path


def test_measure_writes_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drumline.loop.measure.measure_local", lambda ranks, **_: MACHINE)
    assert dl.measure(ranks=2, output=tmp_path / "here.toml") == MACHINE == Cluster.load(tmp_path / "here.toml")
    monkeypatch.setenv("DRUMLINE_CACHE", str(tmp_path))
    assert dl.measure() == MACHINE and len(list(tmp_path.glob("*.toml"))) == 2
    with pytest.raises(InputError, match="at least one rank"):
        dl.measure(ranks=0)


def test_nothing_is_printed(folder: Path, run: dl.Run, capsys: pytest.CaptureFixture[str]) -> None:
    dl.plan("gpt:125m", "dgx-h100", devices=2)
    dl.train(folder / "tiny.py", "dp=1", steps=2, cluster=MACHINE, output=folder / "silent")
    dl.report(run)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_warnings_are_logged_or_go_to_the_callback(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    MACHINE.save(tmp_path / "c.toml")
    (tmp_path / "c.corrections.json").write_text("{")
    with caplog.at_level(logging.WARNING, logger="drumline"):
        dl.plan(folder / "tiny.py", tmp_path / "c.toml")
    assert "is not used" in caplog.text
    heard: list[str] = []
    caplog.clear()
    dl.plan(folder / "tiny.py", tmp_path / "c.toml", notify=heard.append)
    assert "is not used" in heard[0] and not caplog.text


def test_zoo_models_need_no_torch() -> None:
    program = (
        "import sys, drumline as dl\n"
        "answer = dl.plan('gpt:1.3b', 'dgx-h100', devices=4)\n"
        "dl.simulate('gpt:1.3b', answer.best.plan, 'dgx-h100')\n"
        "dl.simulate('pipeline:1f1b')\n"
        "assert callable(dl.report) and callable(dl.profile)\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_zoo_model_cannot_be_trained() -> None:
    for verb in (dl.train, dl.verify):
        with pytest.raises(InputError, match="is not a job"):
            verb("gpt:7b", "dp=2")


def test_a_missing_job_names_the_nearest(folder: Path) -> None:
    with pytest.raises(JobError, match="tiny.py"):
        dl.profile(folder / "tine.py")
