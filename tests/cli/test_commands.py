"""The commands as a user types them: output, files, exit codes."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command import here

from drumline.clusters import Cluster, DeviceSpec, Link, Node

MACHINE = Cluster(
    "here",
    DeviceSpec("core", "cpu", 1e10, 1e10, {"fp32": 1e10}, 1e-5, threads=1),
    Node(2, Link(1e-4, 1e9)),
    origin={"": "measured", "device": "measured", "node": "measured"},
)
ROOT = Path(__file__).parents[2]
TINY = """
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
BROKEN = """
import torch
import torch.distributed as dist
import drumline as dl


class Twist(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * 1.01 if dist.is_initialized() and dist.get_rank() == 1 else g


class Bad(torch.nn.Linear):
    def forward(self, x):
        return super().forward(Twist.apply(x))


def job():
    return dl.Job(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), Bad(4, 4), torch.nn.Linear(4, 2)),
        loss=torch.nn.functional.mse_loss,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        data=lambda: [(torch.arange(4.0) + i, torch.ones(2) * i) for i in range(20)],
        batch_size=8,
    )
"""


def drumline(*arguments: object, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "drumline", *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, **env},
    )


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    (tmp_path / "tiny.py").write_text(TINY)
    return tmp_path


def refused(code: int, *arguments: object, cwd: Path | None = None, run: Any = here) -> str:
    """Refused, by default by a command in this process."""
    done = run(*arguments, cwd=cwd)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    return done.stderr


def refused_after_start(code: int, *arguments: object, cwd: Path) -> str:
    """Refused, perhaps after some lines, but before any step."""
    done = here(*arguments, cwd=cwd)
    assert done.returncode == code and "Traceback" not in done.stderr
    assert "step 1/" not in done.stdout
    return done.stderr


class TestPlan:
    def test_json(self) -> None:
        done = here("plan", "gpt:7b", "--cluster", "dgx-h100", "--devices", 64, "--json")
        document = json.loads(done.stdout)
        assert {"plans", "candidates", "seconds", "explanation"} <= set(document)
        best, *others = document["plans"]
        assert {"plan", "step_seconds", "memory_bytes", "fits", "reason"} <= set(best)
        faster = [o for o in others if o["fits"] and o["step_seconds"] < best["step_seconds"]]
        assert best["fits"] and all(o["tie"] or o["in_reserve"] for o in faster) and faster
        assert all(o["reason"] for o in others)

    def test_writes_the_plan(self, tmp_path: Path) -> None:
        out = tmp_path / "plan.toml"
        done = here("plan", "llama:8b", "--cluster", "dgx-h100", "--devices", 8, "-o", out, "--json")
        from drumline.plans import Plan

        assert str(Plan.load(out)) == json.loads(done.stdout)["plans"][0]["plan"]

    def test_traced_job(self, tiny: Path) -> None:
        document = json.loads(here("plan", "tiny.py", "--cluster", "dgx-h100", "--json", cwd=tiny).stdout)
        assert document["plans"][0]["plan"].startswith("dp=1")  # a light model on one rank wins

    def test_narrow_terminal(self) -> None:
        done = drumline("plan", "gpt:7b", "--cluster", "dgx-h100", "--devices", 8, COLUMNS="40")
        table = done.stdout.split("\n\n")[1]
        assert max(map(len, table.splitlines())) <= 40

    def test_does_not_fit(self) -> None:
        text = refused(3, "plan", "gpt:175b", "--cluster", "dgx-a100", "--devices", 8, run=drumline)
        assert "no plan for gpt:175b fits 8 x A100" in text
        assert "--devices 16" in text  # with all states in host memory

    def test_closed_pipe(self) -> None:
        plan = f"{sys.executable} -m drumline plan gpt:7b --cluster dgx-h100 --devices 8"
        command = f"{plan} | head -1; exit ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
        assert "Traceback" not in done.stderr and done.returncode == 0


class TestBadInput:
    def test_unknown_plan_key(self, tiny: Path) -> None:
        text = refused(2, "train", "tiny.py", "--plan", "dp=2,zer0=3", cwd=tiny, run=drumline)
        assert "unknown key 'zer0'" in text and "Did you mean 'zero'?" in text

    def test_unknown_key_in_a_plan_file(self, tiny: Path) -> None:
        (tiny / "p.toml").write_text("dp = 2\nmicor = 4\n")
        text = refused(2, "verify", "tiny.py", "--plan", "p.toml", cwd=tiny)
        assert "unknown key 'micor'" in text and "p.toml" in text and "'micro'" in text

    def test_wrong_number_of_ranks(self, tiny: Path) -> None:
        for verb in ("train", "verify"):
            assert "dp(3) != 4 ranks" in refused(2, verb, "tiny.py", "--plan", "dp=3", "--ranks", 4, cwd=tiny)

    def test_job_that_raises(self, tmp_path: Path) -> None:
        (tmp_path / "bad.py").write_text("def job():\n    raise ValueError('no data here')\n")
        text = refused(2, "plan", "bad.py", "--cluster", "dgx-h100", cwd=tmp_path)
        assert "bad.py: job() raised ValueError: no data here" in text and "line 2" in text

    def test_model_that_cannot_be_traced(self, tmp_path: Path) -> None:
        model = "class M(torch.nn.Linear):\n    def forward(self, x):\n        y = super().forward(x)\n"
        model += "        return y if y.sum() > 0 else -y\n"
        text = TINY.replace("def job", model + "\n\ndef job")
        text = text.replace(
            "torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))", "M(8, 4)"
        )
        (tmp_path / "m.py").write_text(text)
        text_of_error = refused(2, "profile", "m.py", cwd=tmp_path)
        assert (
            "M cannot be traced" in text_of_error and "y.sum() > 0" in text_of_error and "torch.where" in text_of_error
        )

    @pytest.mark.parametrize(
        ("old", "new", "words"),
        [
            ('bandwidth = "450GB/s"', "bandwidth = 0", ["node.link.bandwidth", "greater than 0"]),
            ('alpha = "3us"', 'alpha = "-3us"', ["node.link.alpha", "greater than or equal to 0"]),
            ('alpha = "3us"', 'alpha = "3GB"', ["node.link.alpha", "not a time"]),
            ("launch", "lunch", ["unknown key 'lunch'", "'launch'"]),
        ],
    )
    def test_cluster_file(self, tmp_path: Path, old: str, new: str, words: list[str]) -> None:
        good = (ROOT / "src/drumline/clusters/catalogue/dgx-h100.toml").read_text()
        assert old in good
        (tmp_path / "c.toml").write_text(good.replace(old, new, 1))
        text = refused(2, "plan", "gpt:7b", "--cluster", "c.toml", cwd=tmp_path)
        assert all(w in text for w in [*words, "c.toml"]), text

    def test_unsupported_plan(self, tiny: Path) -> None:
        assert "precision=fp8 does not run on this device" in refused(
            2, "verify", "tiny.py", "--plan", "precision=fp8", cwd=tiny
        )

    def test_misspelled_or_missing_arguments(self, tiny: Path) -> None:
        assert "Did you mean 'gpt:7b'?" in refused(2, "plan", "gtp:7b")
        assert "Did you mean 'dgx-h100'?" in refused(2, "plan", "gpt:7b", "--cluster", "dgx-h10")
        assert "at least one device" in refused(2, "plan", "gpt:7b", "--cluster", "dgx-h100", "--devices", 0)
        assert "Did you mean 'tiny.py'?" in refused(2, "plan", "tin.py", cwd=tiny)
        assert "no known unit" in refused(2, "plan", "gpt:7b", "--cluster", "dgx-h100", "--memory", "4parsec")
        assert "no run at" in refused(2, "report", "nowhere", cwd=tiny)
        assert "zoo models can only be planned" in refused(2, "train", "gpt:7b")
        assert "at least one rank" in refused(2, "measure", "--ranks", 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Jobs, and a machine with invented numbers; test_readme.py measures the real one."""
    folder = tmp_path_factory.mktemp("loop")
    (folder / "tiny.py").write_text(TINY)
    (folder / "broken.py").write_text(BROKEN)
    MACHINE.save(folder / "here.toml")
    return folder


class TestLoop:
    """Measure, verify, train and report."""

    def test_measure_writes_a_file(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[int] = []
        module = importlib.import_module("drumline.loop.measure")
        monkeypatch.setattr(module, "measure_local", lambda ranks, **_: asked.append(ranks) or MACHINE)
        document = json.loads(here("measure", "--ranks", 2, "-o", "measured.toml", "--json", cwd=folder).stdout)
        assert asked == [2] and document["path"] == "measured.toml" and document["cluster"]["device"]["name"] == "core"
        assert Cluster.load(folder / "measured.toml") == MACHINE
        assert "written to again.toml" in here("measure", "-o", "again.toml", cwd=folder).stdout

    def test_verify_json(self, folder: Path) -> None:
        done = here("verify", "tiny.py", "--plan", "dp=2,zero=3", "--json", cwd=folder)
        document = json.loads(done.stdout)
        assert done.returncode == 0 and document["passed"] and document["ranks"] == 2
        assert 0 <= document["errors"]["float64"] <= 1e-10 and 0 <= document["errors"]["float32"] <= 1e-3
        assert document["first_divergence"] is None and document["plan"] == "dp=2,zero=3"

    def test_verify_what_train_would_choose(self, folder: Path) -> None:
        asked = ("tiny.py", "--plan", "auto", "--cluster", "here.toml", "--json")
        done = here("verify", *asked, "--steps", 2, cwd=folder)
        assert done.returncode == 0, done.stderr
        trained = json.loads(here("train", *asked, "-o", "chosen", cwd=folder).stdout)
        assert json.loads(done.stdout)["plan"] == trained["plan"]

    def test_verify_fails_and_names_the_module(self, folder: Path) -> None:
        done = here("verify", "broken.py", "--plan", "dp=2", "--steps", 2, "--json", cwd=folder)
        document = json.loads(done.stdout)
        assert done.returncode == 4 and not document["passed"]
        assert document["first_divergence"] == "2" and document["phase"] == "backward"
        assert "diverges from the reference in '2'" in done.stderr

    def test_train_and_report(self, folder: Path) -> None:
        arguments = ("train", "tiny.py", "--plan", "auto", "--ranks", 2, "--cluster", "here.toml", "-o", "run")
        done = here(*arguments, "--json", cwd=folder)
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
        assert len(document["losses"]) == document["steps"] == 6
        assert document["losses"][-1] < document["losses"][0]
        keys = ("step_seconds", "predicted_step_seconds", "peak_bytes", "predicted_peak_bytes")
        assert all(document[key] > 0 for key in keys)
        done = here("report", "run", "--trace", "trace.json", cwd=folder)
        assert done.returncode == 0 and "Predicted" in done.stdout
        assert "<svg" in (folder / "run" / "report.html").read_text()
        assert json.loads((folder / "trace.json").read_text())["traceEvents"]

    def test_plain_lines_when_not_a_terminal(self, folder: Path) -> None:
        done = here("train", "tiny.py", "--plan", "dp=2,micro=2", "--cluster", "here.toml", "-o", "r2", cwd=folder)
        lines = [line for line in done.stdout.splitlines() if line.startswith("step ")]
        assert any("step 6/6  loss" in line and "grad" in line and "samples/s" in line for line in lines), done.stdout
        assert "step time: predicted" in done.stdout and "peak memory: predicted" in done.stdout

    def test_run_folder_is_checked_before_training(self, folder: Path) -> None:
        arguments = ("train", "tiny.py", "--plan", "dp=1", "--cluster", "here.toml", "-o")
        assert "already contains a run" in refused_after_start(2, *arguments, "run", cwd=folder)
        assert "cannot be a run folder" in refused_after_start(2, *arguments, "tiny.py", cwd=folder)

    def test_more_micro_batches_than_samples(self, folder: Path) -> None:
        text = refused(2, "verify", "tiny.py", "--plan", "micro=11", cwd=folder)
        assert "micro=11 for batches of 10" in text

    def test_damaged_run(self, folder: Path) -> None:
        path = folder / "run" / "profile.json"
        good = path.read_text()
        path.write_text(good[: len(good) // 2])
        done = here("report", "run", cwd=folder)
        assert done.returncode == 0 and "profile.json is damaged" in done.stderr
        assert "profile.json is damaged" in (folder / "run" / "report.html").read_text()
        path.write_text(good)

    def test_run_a_script(self, folder: Path) -> None:
        (folder / "s.py").write_text(
            'import os, sys\nsys.stdout.write(f\'{os.environ["RANK"]} {os.environ["WORLD_SIZE"]} {sys.argv[1]}\\n\')\n'
        )
        done = drumline("run", "-n", 3, "s.py", "--flag", cwd=folder)
        assert sorted(done.stdout.split("\n")[:3]) == [f"{r} 3 --flag" for r in range(3)]
        done = drumline("run", "-n", 2, "s.py", "--ranks", cwd=folder)  # what follows the script is the script's
        assert sorted(done.stdout.split("\n")[:2]) == ["0 2 --ranks", "1 2 --ranks"]
        (folder / "f.py").write_text(
            "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(7)\ntime.sleep(60)\n"
        )
        assert "rank 1 ended with exit code 7" in refused(5, "run", "-n", 2, "f.py", cwd=folder, run=drumline)


def test_simulate() -> None:
    done = here("simulate", "pipeline:1f1b", "--ranks", 4, "--micro", 8, "--json")
    assert json.loads(done.stdout)["bubble"] == pytest.approx(3 / 11)
    done = here("simulate", "pipeline:zero-bubble", "--ranks", 4, "--micro", 8, "--virtual", 2, "--json")
    assert json.loads(done.stdout)["step_seconds"] == pytest.approx(25.5) and json.loads(done.stdout)["held"] == 4
    orders = json.loads(here("simulate", "pipeline", "--ranks", 4, "--micro", 8, "--json").stdout)["orders"]
    assert [row["step_seconds"] for row in orders if row["virtual"] == 1] == pytest.approx([96, 33, 33, 27, 24, 24])
    assert "gpipe takes virtual=1" in refused(2, "simulate", "pipeline:gpipe", "--virtual", 2)
    done = here("simulate", "all_reduce:ring", "--ranks", 4, "--bytes", "4MB", "--cluster", "dgx-h100", "--json")
    assert json.loads(done.stdout)["step_seconds"] == pytest.approx(6 * (3e-6 + 1e6 / 450e9))
    done = here("simulate", "gpt:7b", "--plan", "dp=8,zero=3,micro=64", "--cluster", "dgx-h100", "--json")
    document = json.loads(done.stdout)
    assert (
        document["step_seconds"] == pytest.approx(sum(document["parts"].values()), rel=0.1)
        and document["critical_path"]
    )
    assert "Did you mean" in refused(2, "simulate", "all_reduce:rign", "--cluster", "dgx-h100")
    done = json.loads(here("simulate", "gpt:7b", "--plan", "tp=8", "--cluster", "dgx-h100", "--json").stdout)
    alone = json.loads(here("simulate", "gpt:7b", "--plan", "dp=1", "--cluster", "dgx-h100", "--json").stdout)
    assert 1 / 8 < done["parts"]["forward"] / alone["parts"]["forward"] < 1 / 7 and done["parts"]["communication"] > 0
    piped = here("simulate", "gpt:7b", "--plan", "pp=4,micro=8", "--cluster", "dgx-h100", "--json")
    assert json.loads(piped.stdout)["parts"]["bubble"] > 0
    assert "zero=3 with a split" in refused(2, "simulate", "gpt:7b", "--plan", "tp=8,zero=3", "--cluster", "dgx-h100")
    assert "tp divides the heads" in refused(2, "simulate", "gpt:7b", "--plan", "tp=3", "--cluster", "dgx-h100")
    assert "does not fit" in here("simulate", "gpt:7b", "--cluster", "dgx-h100").stdout
