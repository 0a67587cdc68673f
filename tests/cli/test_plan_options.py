"""Options of `drumline plan` as a user types them: text, JSON, 40 columns, refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from command import here

FOUR = ("--cluster", "dgx-h100", "--devices", 4)
SMALL = ("plan", "gpt:1.3b", "--batch", 16, *FOUR)


def asked(*arguments: object) -> dict[str, Any]:
    done = here(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def refused(code: int, *arguments: object) -> str:
    done = here(*arguments)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_json_has_every_answer() -> None:
    document = asked(
        *SMALL,
        "--formula",
        "--pareto",
        "--fit",
        "--what-if",
        "link=50GB/s",
        "--tokens",
        "26B",
        "--price",
        2,
        "--mtbf",
        "12h",
        "--tuned-batch",
        4,
    )
    assert {"families", "bounds", "unfit", "fit", "what_if", "formula", "pareto", "training", "saving", "rates"} <= set(
        document
    )
    assert document["objective"] == "time" and document["interrupted"] is False
    assert sum(document["bounds"].values()) == pytest.approx(1)
    names = [f["name"] for f in document["families"]]
    assert {"data", "sharded", "tensor", "pipeline", "context", "tiles", "offload"} <= set(names)
    assert all({"plan", "slower", "lacks_bytes", "reason", "wins_if"} <= set(f) for f in document["families"])
    assert document["formula"][0]["name"] == "step"
    assert document["formula"][0]["value"] == pytest.approx(document["plans"][0]["step_seconds"])
    assert document["training"]["price"] == pytest.approx(2 * document["training"]["device_hours"])
    assert document["rates"]["linear"] == 4 and document["rates"]["root"] == 2
    assert document["what_if"]["before"]["plan"] == document["plans"][0]["plan"] == document["pareto"][0]["plan"]


def test_text_has_every_answer() -> None:
    text = here(*SMALL, "--formula", "--what-if", "batch=32", "--top", 2).stdout
    assert "It is bound by " in text and "of the peak" in text
    assert "The best of each family:" in text and "becomes the fastest" in text
    assert "step = forward" in text and "before" in text and "Throughput changes by a factor of" in text


def test_fit_in_text() -> None:
    text = here("plan", "gpt:7b", "--batch", 32, *FOUR, "--fit", "--top", 1).stdout
    head = text.splitlines()[0]
    assert head.startswith("dp=4,precision=bf16 does not fit: ") and " too much" in head
    assert (
        "Single changes that make it fit (+) or do not (-):" in text
        and "\n  + offload=all" in text
        and "\n  - zero=1" in text
    )


def test_fit_when_nothing_fits() -> None:
    done = here("plan", "gpt:175b", "--batch", 8, *FOUR, "--fit")
    assert (
        done.returncode == 3
        and "No single change makes it fit" in done.stdout
        and "no plan for gpt:175b" in done.stderr
    )
    document = json.loads(here("plan", "gpt:175b", "--batch", 8, *FOUR, "--fit", "--json").stdout)
    assert document["plans"] == [] and document["fit"]["fits"] is False


@pytest.mark.parametrize("option", [("--scaling",), ("--what-if", "link=9GB/s"), ("--fit",), ("--pareto",)])
def test_40_columns(option: tuple[str, ...]) -> None:
    done = here(*SMALL, *option, "--top", 2, COLUMNS="40")
    assert done.returncode == 0, done.stderr
    rows = {"--scaling": ("devices", "      1", "      4"), "--what-if": ("devices", "memory", "communication")}
    for row in rows.get(option[0], ()):
        lines = [line for line in done.stdout.splitlines() if line.startswith(row) and ":" not in line]
        assert lines and all(len(line) <= 40 for line in lines), done.stdout


def test_scaling() -> None:
    points = asked(*SMALL, "--scaling")["scaling"]
    assert [p["devices"] for p in points] == [1, 2, 4] and points[0]["efficiency"] == 1
    assert "#" in here(*SMALL, "--scaling").stdout


def test_objectives() -> None:
    times = {o: asked(*SMALL, "--objective", o)["plans"][0] for o in ("time", "memory", "cost")}
    assert times["memory"]["memory_bytes"] <= times["time"]["memory_bytes"]
    assert times["time"]["step_seconds"] <= min(x["step_seconds"] for x in times.values())


def test_the_users_own_plan() -> None:
    document = asked(*SMALL, "--plan", "dp=4,zero=1,micro=2,precision=bf16")
    assert document["given"]["plan"] == "dp=4,zero=1,micro=2,precision=bf16"
    assert document["given"]["step_seconds"] >= document["plans"][0]["step_seconds"]
    assert "Your plan dp=4,precision=bf16" in here(*SMALL, "--plan", "dp=4", "--precision", "bf16").stdout
    full = asked(*SMALL, "--plan", "dp=4")
    assert full["given"]["plan"] == "dp=4" and "precision" not in full["plans"][0]["plan"], (
        "as the notation reads: fp32"
    )


def test_epochs_of_a_job(tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(
        "import torch\nimport drumline as dl\n\ndef job():\n"
        "    return dl.Job(model=lambda: torch.nn.Linear(8, 4), loss=torch.nn.functional.cross_entropy,\n"
        "        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),\n"
        "        data=lambda: [(torch.zeros(8), 1)] * 40, batch_size=10)\n"
    )
    done = here("plan", "tiny.py", "--cluster", "dgx-h100", "--devices", 2, "--epochs", 3, "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["training"]["steps"] == 12, done.stderr


class TestBadInput:
    def test_no_device(self) -> None:
        assert "at least one device" in refused(2, "plan", "gpt:1.3b", "--cluster", "dgx-h100", "--devices", 0)

    def test_more_tensor_parallelism_than_heads(self) -> None:
        text = refused(
            2, "plan", "gpt:125m", "--cluster", "dgx-h100", "--devices", 24, "--plan", "tp=24,precision=bf16"
        )
        assert "12 heads" in text and "24" in text, text

    def test_a_batch_smaller_than_the_replicas(self) -> None:
        text = refused(2, "plan", "gpt:125m", *FOUR, "--batch", 3, "--plan", "dp=4")
        assert "dp(4) x micro(1) = 4 > 3 samples" in text and "--batch 4" in text

    def test_more_ranks_than_devices(self) -> None:
        assert "dp(8) = 8 > 4 devices" in refused(2, *SMALL, "--plan", "dp=8")

    def test_a_plan_that_the_engine_refuses(self) -> None:
        assert "zero=3 with a split model" in refused(2, *SMALL, "--plan", "tp=2,dp=2,zero=3")

    def test_a_layer_larger_than_every_device(self) -> None:
        text = refused(
            3,
            "plan",
            "mlp:2x65536",
            "--cluster",
            "dgx-h100",
            "--devices",
            1,
            "--batch",
            1,
            "--memory",
            "4GiB",
            "--set",
            "device.host.memory=1GB",
        )
        assert "the largest layer" in text and "more than the" in text and "smaller or pruned model" in text

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (("--objective", "tiem"), "Did you mean 'time'?"),
            (("--tokens", "13X"), "not a number such as 13T"),
            (("--tokens", "0"), "more than 0"),
            (("--epochs", "-1"), "more than 0"),
            (("--mtbf", "3GB"), "not a time"),
            (("--tokens", "1B", "--epochs", "2"), "use one of them"),
            (("--price", "-2"), "not negative"),
            (("--epochs", "2"), "--samples"),
            (("--what-if", "link"), "KEY=VALUE"),
            (("--samples", "0"), "more than 0"),
            (("--what-if", "nod.link.alpha=1us"), "Did you mean 'node.link.alpha'?"),
        ],
    )
    def test_options(self, arguments: tuple[str, ...], words: str) -> None:
        assert words in refused(2, *SMALL, *arguments)


def test_ctrl_c_prints_the_best_so_far(tmp_path: Path) -> None:
    """A real process gets a real signal in the middle of a slowed-down search."""
    program = tmp_path / "slow.py"
    program.write_text(
        "import signal, sys, time\nfrom drumline.costs.fitted import FittedCostModel\nfrom drumline.cli import main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the shell ignores it\n"
        "whole, seen = FittedCostModel.estimate, []\n"
        "def estimate(self, plan):\n"
        "    seen.append(plan)\n"
        "    if len(seen) == 40:\n        print('now', file=sys.stderr, flush=True)\n        time.sleep(30)\n"
        "    return whole(self, plan)\n"
        "FittedCostModel.estimate = estimate\n"
        "sys.argv = ['drumline', 'plan', 'gpt:1.3b', '--cluster', 'dgx-h100', '--devices', '4', '--json']\n"
        "main()\n"
    )
    process = subprocess.Popen(
        [sys.executable, str(program)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None and process.stderr.readline().strip() == "now"
        time.sleep(0.2)
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130 and "Traceback" not in err, err
    document = json.loads(out)
    assert document["interrupted"] and document["finalists"] == 39 and document["plans"][0]["fits"]


def test_a_traced_model_on_8_devices_is_answered_in_seconds() -> None:
    """Tracing included; CPU time of this process, so that other load does not count."""
    job = Path(__file__).parents[2] / "examples" / "gpt.py"
    start = time.process_time()
    document = asked("plan", job, "--cluster", "dgx-h100", "--devices", 8)
    assert document["candidates"] > 300
    assert time.process_time() - start < 10.0
