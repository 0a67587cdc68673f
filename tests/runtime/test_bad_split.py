"""Plans that cannot split a model: refused with the rule, its numbers and a plan that works, or correct."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import bad_splits
import parity
import pytest
from command import here
from world import World

from drumline.core.errors import InputError, PlanError, TraceError

Worlds = Callable[[int], World]

NOT_TRACED = "its operators may depend on the shapes of its input, not on the values"
REFUSED = [
    (
        "heads",
        "tp=2",
        "PlanError",
        "tp=2 cannot share the 3 heads of block",
        "3 % 2 != 0",
        "tp=3, or on as many ranks dp=2",
    ),
    (
        "mlp",
        "pp=2,virtual=4,schedule=interleaved,micro=2",
        "PlanError",
        "8 stages for a model of 5 layers",
        "8 > 5",
        "pp x virtual = 5 or less",
    ),
    ("asking", "tp=2", "TraceError", "Asking cannot be traced", NOT_TRACED, "or dp=2, which runs the model as it is"),
    ("asking", "pp=2,micro=2", "TraceError", "Asking cannot be traced", NOT_TRACED, "or dp=2,micro=2, which runs"),
    (
        "mlp",
        "pp=2,virtual=2",
        "InputError",
        "1f1b with 2 stages per rank",
        "1f1b takes virtual=1",
        "schedule=interleaved",
    ),
    ("mlp", "pp=2,virtual=3,schedule=zero-bubble", "InputError", "zero-bubble with 3", "virtual=1 or 2", "interleaved"),
    ("mlp", "pp=2,split=blocks.9", "PlanError", "split=blocks.9", "modules that run", "'blocks.1'"),
    (
        "mlp",
        "pp=2,split=blocks.1+head",
        "PlanError",
        "makes 3 stages, and the plan has 2",
        "pp(2) x virtual(1) - 1 = 1",
        "dp=1,pp=2,split=blocks.1",
    ),
    (
        "mlp",
        "pp=2,split=head+blocks.1,virtual=2,schedule=interleaved",
        "PlanError",
        "makes 3 stages, and the plan has 4",
        "pp(2) x virtual(2) - 1 = 3",
        "dp=1,pp=2,virtual=2,schedule=interleaved",
    ),
    ("mlp", "tile=2x1", "PlanError", "tile for a batch without images", "axis splits this dim of the input", "dp=2"),
    ("groups", "cp=2", "PlanError", "cp=2 for 1 tokens", "every rank has a token", "cp=1"),
    ("lstm", "tp=2", "PlanError", "no layer of this model can be split over 2 ranks", "body.lstm", "dp or pp"),
    ("mlp", "tp=2,zero=3", "PlanError", "zero=3 with a split model", "captured graph", "zero=1 or 2"),
    ("mlp", "tp=2,micro=9", "PlanError", "micro=9 for batches of 7", "at least one sample", "micro=7 or less"),
    ("mlp", "virtual=2,tp=2", "PlanError", "without pp", "configure a pipeline", "pp=2 or more"),
    ("gpt", "tp=2,compile=true", "PlanError", "a split model with", "captured graph", "leave it out"),
]


def test_refusals(world: Worlds) -> None:
    """Every rank raises the same error, and the ranks continue."""
    cases = [(job, plan) for job, plan, *_ in REFUSED]
    for result in world(2).run(bad_splits.refusals, cases, timeout=120):
        for (job, plan, kind, *words), (error, *messages) in zip(REFUSED, result, strict=True):
            assert error == kind, (job, plan, messages)
            for word, text in zip(words, messages, strict=True):
                assert word in text, (job, plan)
    assert all(e.exit_code == 2 for e in (PlanError, TraceError, InputError))


def test_more_tiles_than_rows_and_more_ranks_than_heads(world: Worlds) -> None:
    result = world(4).run(
        bad_splits.refusals, [("cnn", "tile=1x4"), ("gpt", "cp=4"), ("gpt", "tp=4"), ("long", "tile=4x1")]
    )
    for runs, also, heads, tiles in result:
        assert runs[0] == also[0] == "runs"  # 4 columns, 5 tokens
        assert heads[1:] == (
            "tp=4 cannot share the 2 heads of blocks.0",
            "every rank has whole heads: 2 % 4 != 0",
            "tp=2, or on as many ranks dp=2,tp=2",
        )
        assert tiles[1:] == (
            "tile: 3 rows over 4 ranks",
            "every tile has a row and a column",
            "at most 3 tiles that way",
        )


@pytest.mark.slow
def test_unusual_splits_that_work(world: Worlds) -> None:
    """Tiles of two rows under kernels that reach further than the neighbour; a pipeline of one micro-batch."""
    for ranks, cases in {
        2: [
            ("mlp", "pp=2"),
            ("mlp", "pp=2,schedule=zero-bubble"),
            ("mlp", "pp=2,split=head"),
            ("lstm", "pp=2,micro=2"),
        ],
        4: [("wide", "tile=4x1"), ("wide", "tile=2x2"), ("gpt", "pp=4,micro=2")],
    }.items():
        for result in world(ranks).run(bad_splits.errors, cases, timeout=200)[0]:
            parity.check(result)


JOB = """
import sys
sys.path += {paths!r}
import bad_splits


def job():
    return bad_splits.make({name!r})
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    for name in ("heads", "asking", "mlp"):
        (tmp_path / f"{name}.py").write_text(JOB.format(paths=paths, name=name))
    return tmp_path


def drumline(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "drumline", *words], cwd=cwd, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize(
    ("verb", "job", "plan", "words"),
    [
        (
            "verify",
            "heads",
            "tp=2",
            ["cannot share the 3 heads of block", "rule:  every rank has whole heads: 3 % 2 != 0", "try:   tp=3"],
        ),
        ("train", "mlp", "pp=2,virtual=3,schedule=interleaved,micro=2", ["6 stages for a model of 5 layers", "6 > 5"]),
        ("verify", "asking", "pp=2", ["Asking cannot be traced", NOT_TRACED, "or dp=2, which runs the model as it is"]),
        (
            "train",
            "mlp",
            "pp=2,virtual=2",
            ["1f1b with 2 stages per rank", "try:   schedule=interleaved takes virtual=2"],
        ),
    ],
)
def test_from_the_command_line(folder: Path, verb: str, job: str, plan: str, words: list[str]) -> None:
    known = ["--cluster", "dgx-a100"] if verb == "train" else []  # or it would measure this machine first
    done = here(verb, f"{job}.py", "--plan", plan, *known, cwd=folder)
    assert done.returncode == 2, done.stderr
    assert all(word in done.stderr for word in words), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_split_models_from_the_command_line(folder: Path) -> None:
    done = drumline("verify", "mlp.py", "--plan", "pp=2,micro=2", "--steps", "2", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "passed: dp=1,pp=2,micro=2 computes what one device computes" in done.stdout
    done = drumline("train", "mlp.py", "--plan", "tp=2", "--steps", "3", "--cluster", "dgx-a100", cwd=folder)
    assert done.returncode == 0, done.stderr
