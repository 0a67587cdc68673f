"""Words on the screen: throughput, money, failures, idle devices, completion, and the command without a verb."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command import here

from drumline.cli.completion import complete_cluster, complete_job, complete_plan
from drumline.cli.welcome import next_steps
from drumline.clusters.catalogue import load
from drumline.core.money import Money
from drumline.costs.estimate import Throughput
from drumline.models import zoo
from drumline.plans import Plan
from drumline.theory.checkpoint_interval import FailureRate

SMALL = ("plan", "gpt:125m", "--cluster", "dgx-a100", "--devices", 8, "--top", 1)

# -- throughput


def test_throughput_of_all_devices_and_of_one() -> None:
    profile, cluster, plan = zoo.profile("gpt:125m", batch_size=16), load("dgx-a100"), Plan.parse("dp=4,precision=bf16")
    t = Throughput.of(profile, plan, cluster, 0.5)
    assert t is not None and (t.samples_per_second, t.tokens_per_second) == (32, 32 * 2048)
    flops = profile.flops().at(16) / 0.5 / 4
    assert t.flops_per_device == pytest.approx(flops) and t.mfu == pytest.approx(flops / cluster.device.peak["bf16"])
    assert "32 samples/s, 65.5 k tokens/s over 4 devices; per device 16.4 k tokens/s, " in str(t)
    assert Throughput.of(profile, plan, cluster, 0.0) is None


def test_an_unknown_peak_gives_no_mfu() -> None:
    cluster = load("dgx-a100")
    cluster = dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, peak={"bf16": 1e14}))
    t = Throughput.of(zoo.profile("resnet50", batch_size=8), Plan.parse("dp=1,precision=fp16"), cluster, 0.5)
    assert t is not None and t.mfu is None and str(t).endswith("MFU N/A") and "tokens" not in str(t)


# -- plan


def test_idle_devices_come_first_and_the_given_plan_is_explained() -> None:
    done = here(*SMALL, "--batch", 6, "--plan", "dp=2,zero=1,precision=bf16", "--price", "2.5EUR", "--tokens", "1B")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[1].startswith("2 of 8 devices stay idle: on 8, ")
    assert done.stdout.count("stay idle") == 1
    assert any(line.startswith("throughput ") and "MFU" in line for line in lines)
    own = done.stdout.partition("Your plan dp=2,zero=1,precision=bf16: ")[2]
    assert (
        "dp=2,zero=1,precision=bf16 takes " in own and "It is bound by " in own and "Optimizer state is sharded" in own
    )
    assert " EUR at 2.50 EUR each" in own


def test_the_json_document_has_the_same() -> None:
    document = json.loads(here(*SMALL, "--batch", 6, "--plan", "dp=2,precision=bf16", "--json").stdout)
    assert document["idle"] and document["explanation"].startswith(document["idle"])
    assert document["throughput"]["devices"] == 6 and document["given"]["throughput"]["devices"] == 2
    assert document["given"]["explanation"].startswith("dp=2,precision=bf16 takes ")
    whole = json.loads(here(*SMALL, "--batch", 64, "--json").stdout)
    assert whole["idle"] == "" and 0 < whole["throughput"]["mfu"] < 1


# -- money and failures


@pytest.mark.parametrize(
    ("text", "shown"),
    [("2.5", "2.50"), ("2.5EUR", "2.50 EUR"), ("EUR 2.50", "2.50 EUR"), ("$2", "$2.00"), ("1,200 JPY", "1,200.00 JPY")],
)
def test_money_keeps_its_currency(text: str, shown: str) -> None:
    money = Money.parse(text)
    assert str(money) == shown and str(money.of(0.5)) == shown.replace(f"{money.amount:,.2f}", "0.50")


@pytest.mark.parametrize("text", ["", "EUR", "2,5", "2.5.1", "$2EUR", "two"])
def test_what_is_no_amount_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not an amount"):
        Money.parse(text)


def test_failures_of_a_device_or_of_the_run() -> None:
    assert FailureRate.parse("50000h").of_run(100) == FailureRate.parse("500h/run").of_run(100) == 500 * 3600
    assert FailureRate.parse("50000h/device") == FailureRate.parse("50000h")
    assert FailureRate.parse(3600.0).of_run(2) == 1800
    with pytest.raises(ValueError, match="as in 24h"):
        FailureRate.parse("24")


def test_the_same_failures_in_all_verbs() -> None:
    saving = json.loads(here(*SMALL, "--batch", 64, "--mtbf", "8000h", "--json").stdout)["saving"]
    whole = json.loads(here(*SMALL, "--batch", 64, "--mtbf", "1000h/run", "--json").stdout)["saving"]
    assert saving["mtbf"] == whole["mtbf"] == 1000 * 3600 and saving["interval"] == whole["interval"] > 60
    refused = here(*SMALL, "--mtbf", "24")
    assert refused.returncode == 2 and "a time has a unit, as in 24h" in refused.stderr and "/run" in refused.stderr
    assert all("of one device (50000h), or of the" in " ".join(here(v, "--help").stdout.split()) for v in VERBS)


VERBS = ("plan", "train", "simulate")

# -- completion


def test_plans_models_and_clusters_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").touch()
    (tmp_path / "mine.toml").touch()
    assert complete_plan("dp=2,ze") == [f"dp=2,zero={i}" for i in range(4)]
    assert complete_plan("schedule=z") == ["schedule=zero-bubble"]
    assert complete_plan("p") == ["pp=", "precision="] and complete_plan("pp=2,p")[0] == "pp=2,precision=fp32"
    assert complete_plan("au") == ["auto"] and complete_plan("mi") == ["mine.toml", *complete_plan("mic")]
    assert complete_plan("nonsense=") == []
    assert complete_job("gpt:1") == [f"gpt:{size}" for size in ("125m", "1.3b", "13b", "175b", "1t")]
    assert (
        complete_job("mi")[0] == "mine.py"
        and complete_job("min") == ["mine.py"]
        and complete_cluster("dgx-h") == ["dgx-h100", "dgx-h200"]
    )
    assert complete_cluster("mi")[0] == "mine.toml"


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes_inside_words(tmp_path: Path) -> None:
    """Bash cuts words at `=` and `:`, and replaces the last piece only."""
    command = tmp_path / "drumline"
    command.write_text(f"#!{sys.executable}\nfrom drumline.cli import main\n\nmain()\n")
    command.chmod(0o755)
    script = """
eval "$(_DRUMLINE_COMPLETE=source_bash drumline)"
ask() { COMP_CWORD=$1; shift; COMP_WORDS=("$@"); _drumline_completion drumline; echo "${COMPREPLY[*]}" | tr '\\n' ' '; echo; }
ask 4 drumline plan gpt : 17
ask 8 drumline train x.py --plan dp = 2,zero =
ask 7 drumline train x.py --plan dp = 2,schedule=zero
ask 5 drumline plan x.py --cluster = dgx-h
"""
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=tmp_path, env=env, timeout=120)
    rows = [line.split() for line in done.stdout.splitlines()]
    assert rows[:2] == [["175b"], ["0", "1", "2", "3"]], done.stderr
    assert rows[2] == ["zero-bubble"] and rows[3] == ["dgx-h100", "dgx-h200"]


# -- drumline alone


def test_the_command_alone_says_what_is_next(tmp_path: Path) -> None:
    empty = here(cwd=tmp_path, DRUMLINE_CACHE=str(tmp_path / "cache"))
    assert empty.returncode == 0 and "no job in this folder, no runs yet" in empty.stdout
    assert "not measured yet" in empty.stdout and "drumline demo" in empty.stdout and "Commands:" in empty.stdout
    (tmp_path / "broken.py").write_bytes(b"\xff\xfe")
    (tmp_path / "mine.py").write_text("import drumline as dl\n\ndef job():\n    return dl.Job()\n")
    (tmp_path / "runs" / "mine-1").mkdir(parents=True)
    (tmp_path / "runs" / "mine-1" / "run.json").write_text("{}")
    there = "\n".join(next_steps(tmp_path))
    assert f"a job in {tmp_path.as_posix()}/mine.py" in there and "drumline report" in there
    assert there.index("drumline plan") < there.index("drumline verify") < there.index("drumline train")
    text = here(cwd=tmp_path).stdout
    assert "drumline train mine.py" in text and "the newest run is runs/mine-1" in text
