"""`drumline plan --from` and `--emit` as a user types them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from command import here

from drumline.interop.tools import read_config
from drumline.plans import Plan

CONFIGS = Path(__file__).parents[1] / "interop" / "configs"
CLUSTER = ("--cluster", "dgx-h100", "--devices", "8")
JOB = """
import torch
import drumline as dl


def job():
    return dl.Job(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)), loss=torch.nn.functional.cross_entropy,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9), data=lambda: [(torch.zeros(8), 0)] * 64, batch_size=16, clip=2.0,
    )
"""


def test_from_then_emit_then_from_again(tmp_path: Path) -> None:
    """A Hugging Face config is completed, written and read back: the plan is the same."""
    done = here(
        "plan",
        "gpt:1.3b",
        *CLUSTER,
        "--batch",
        64,
        "--from",
        CONFIGS / "hf_zero3.json",
        "--emit",
        "deepspeed",
        "-o",
        tmp_path / "ds.json",
        "--json",
    )
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)
    assert value["plan"].startswith("dp=8,zero=3") and "precision=bf16" in value["plan"]
    assert value["fits"] and value["batch_size"] == 64 and value["candidates"] > 1
    assert "zero_optimization.overlap_comm" in value["no_effect"] and "bf16.enabled" in value["left_open"]
    assert value["emitted"]["text"] == (tmp_path / "ds.json").read_text()
    assert str(read_config(tmp_path / "ds.json", 8).plan) == value["plan"]
    again = here("plan", "gpt:1.3b", *CLUSTER, "--from", tmp_path / "ds.json", "-o", tmp_path / "plan.toml")
    assert again.returncode == 0, again.stderr
    assert again.stdout.startswith(f"plan {value['plan']}\n")
    assert str(Plan.load(tmp_path / "plan.toml")) == value["plan"]


def test_from_reports_what_became_of_each_key(tmp_path: Path) -> None:
    done = here("plan", "gpt:1.3b", *CLUSTER, "--from", CONFIGS / "ds_typos.json")
    assert done.returncode == 0, done.stderr
    assert "unknown key: zero_optimization.overlap_com. Did you mean 'overlap_comm'?" in done.stdout
    done = here("plan", "gpt:1.3b", *CLUSTER, "--from", CONFIGS / "ds_zero2_finetune.json")
    assert "no effect: zero_optimization.reduce_scatter (the plan's stage decides the collective)" in done.stdout


def test_the_best_plan_is_written_for_another_tool() -> None:
    done = here("plan", "gpt:1.3b", *CLUSTER, "--batch", 64, "--emit", "megatron")
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout.startswith("--tensor-model-parallel-size ") and "--num-layers 24 --hidden-size 2048" in done.stdout
    )
    assert "optimizer: " in done.stderr


def test_the_error_names_the_best_plan_that_the_tool_can_express() -> None:
    done = here("plan", "gpt:1.3b", *CLUSTER, "--batch", 60, "--emit", "torchtitan")
    assert done.returncode == 2
    assert (
        done.stderr.count("try:") == 1
        and "--plan dp=" in done.stderr
        and "the fastest that it can express" in done.stderr
    )


def test_a_given_plan_needs_no_machines(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    done = here("plan", "job.py", "--plan", "dp=2,zero=1", "--emit", "deepspeed", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    table = json.loads(done.stdout)
    assert (table["train_batch_size"], table["gradient_clipping"]) == (16, 2.0)
    assert table["optimizer"] == {"type": "SGD", "params": {"lr": 0.5, "weight_decay": 0.0, "momentum": 0.9}}
    done = here(
        "plan",
        "job.py",
        "--from",
        CONFIGS / "acc_deepspeed_zero2.yaml",
        "--emit",
        "accelerate",
        "--batch",
        64,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "zero_stage: 2" in done.stdout and "gradient_accumulation_steps: 4" in done.stdout


def test_the_error_lists_every_part_with_its_reason() -> None:
    done = here("plan", "gpt:1.3b", "--plan", "dp=2,zero=3,chunk=2,tile=2x2", "--emit", "fabric")
    assert done.returncode == 2
    assert "Fabric cannot express tile=2x2, chunk=2" in done.stderr
    assert "tile=2x2: it has no spatial parallelism; chunk=2: it does not tile layers" in done.stderr
    assert not done.stdout


def test_a_config_that_does_not_fit_ends_with_3() -> None:
    done = here("plan", "gpt:30b", *CLUSTER, "--from", CONFIGS / "ds_smallest.json")
    assert done.returncode == 3
    assert "the config's plan does not fit 8 x H100" in done.stderr and " > " in done.stderr
    assert done.stderr.startswith("plan dp=8\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--emit", "deepsped"), "Did you mean 'deepspeed'?"),
        (("--from", "x.json", "--plan", "dp=2"), "both set the plan"),
        (("--emit", "fabric", "--scaling"), "with another question"),
        (("--from", "not_there.json"), "no file not_there.json"),
        (("--from", CONFIGS / "ds_smallest.json", "--batch", 9), "--batch(9) != config(8)"),
        (("--from", CONFIGS / "acc_multi_node.yaml"), "num_processes(16) > devices(8)"),
    ],
)
def test_bad_input(arguments: tuple[object, ...], words: str) -> None:
    done = here("plan", "gpt:1.3b", *CLUSTER, *arguments)
    assert done.returncode == 2
    assert words in done.stderr


def test_no_torch() -> None:
    program = (
        "import sys; from drumline.cli import app; sys.argv = sys.argv[:1] + "
        f"['plan', 'gpt:1.3b', '--cluster', 'dgx-h100', '--devices', '8', '--from', {str(CONFIGS / 'hf_zero2.json')!r}, '--emit', 'accelerate']\n"
        "try:\n    app()\nexcept SystemExit as e:\n    assert not e.code\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
