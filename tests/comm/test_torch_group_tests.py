"""PyTorch's own tests of process groups on the backend `shm`, by the command that runs them all."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from drumline.comm.process_group.buffers import for_torch
from drumline.core.errors import DrumlineError, GaveUp, InputError

COMMAND = Path(__file__).parents[2] / "benchmarks" / "torch_group_tests.py"


def run(folder: Path, *arguments: str) -> dict[str, Any]:
    """The results that the command writes."""
    file = folder / "results.json"
    done = subprocess.run(
        [sys.executable, str(COMMAND), "--json", str(file), *arguments], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {**json.loads(file.read_text()), "words": done.stdout}


def words(*names: str) -> list[str]:
    return [part for name in names for part in ("-k", name)]


@pytest.mark.alone
@pytest.mark.slow
def test_a_few_of_torchs_tests_pass(tmp_path: Path) -> None:
    results = run(
        tmp_path,
        "-n",
        "2",
        *words(
            "test_all_reduce_sum_async",
            "test_broadcast_full_group",
            "test_batch_isend_irecv_gloo",
            "test_scatter_complex",
            "test_sparse_all_reduce_sum",
            "test_barrier_timeout_full",
            "test_ddp_create_graph",
            "test_get_future",
            "test_monitored_barrier_gloo_subgroup",
        ),
    )
    failed = {test["name"] for test in results["tests"] if test["result"] == "failed"}
    assert failed == {"test_monitored_barrier_gloo_subgroup"}
    assert "refuses every backend but gloo by name" in results["words"]
    assert results["passed"] >= 8 and results["total"] == results["passed"] + results["skipped"] + 1


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize(("p", "taken_for"), [(2, "gloo"), (3, "mpi"), (4, "gloo")])
def test_all_of_torchs_tests_pass_but_those_that_cannot(tmp_path: Path, p: int, taken_for: str) -> None:
    results = run(tmp_path, "-n", str(p), "--as", taken_for)
    assert results["passed"] > 80 and results["failed"] < 5


def test_failures_must_be_explained_and_explanations_needed() -> None:
    spec = importlib.util.spec_from_file_location("torch_group_tests", COMMAND)
    assert spec is not None and spec.loader is not None
    command = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = command  # where its dataclass looks up its module
    spec.loader.exec_module(command)
    known = {"b": "cannot", "c": "cannot either"}
    outcomes = [
        command.Outcome(*o, 0.1)
        for o in (("a", "failed", "x"), ("b", "failed", "y"), ("c", "passed", ""), ("d", "skipped", "no GPU"))
    ]
    assert [o.name for o in command.unexpected(outcomes, known)] == ["a", "c"]
    facts = {
        "torch": "2",
        "ranks": 2,
        "backend": "shm",
        "passed": 1,
        "failed": 2,
        "skipped": 1,
        "total": 4,
        "seconds": 3,
    }
    text = command.words_of(facts, outcomes, known)
    assert "1 of 3 tests pass, 2 fail, 1 of all 4 are skipped" in text and "skipped    1  no GPU" in text
    assert "failed  a: NOT EXPLAINED [x]" in text and "failed  b: cannot [y]" in text
    assert "passed  c, which the table says cannot" in text
    other = {"backend": "gloo", "ranks": 2, "passed": 2, "failed": 1, "tests": [{"name": "a", "result": "passed"}]}
    assert "1 tests differ\n  a: failed, gloo passed" in command.comparison(other, outcomes)


def test_errors_keep_their_text_and_are_runtime_errors() -> None:
    for kind in (InputError, GaveUp):
        given = kind("what", where="where", rule="rule", fix="fix")
        twin = for_torch(given)
        assert isinstance(twin, kind) and isinstance(twin, RuntimeError) and str(twin) == str(given)
        assert for_torch(twin) is twin
    assert isinstance(other := ValueError("x"), ValueError) and for_torch(other) is other


def errors_of_a_group() -> None:
    group = dist.new_group(backend="shm", timeout=timedelta(seconds=5))
    wrong = [
        lambda: dist.all_reduce(torch.ones(3 + dist.get_rank()), group=group),
        lambda: dist.all_reduce(torch.ones(3 + dist.get_rank()), group=group, async_op=True).wait(),
        lambda: dist.reduce(torch.eye(3).to_sparse(), group_dst=0, group=group),
    ]
    for call in wrong:
        with pytest.raises(RuntimeError) as caught:
            call()
        assert isinstance(caught.value, DrumlineError)
    if dist.get_rank() == 0:
        dist.send(torch.ones(3), group=group, group_dst=1)
    else:
        with pytest.raises(RuntimeError, match="sent 12 bytes, rank 1 expects 16"):
            dist.recv(torch.ones(4), group=group, group_src=0)
    dist.destroy_process_group(group)
    with pytest.raises(RuntimeError, match="was destroyed"):
        group.allreduce([torch.ones(3)])


def a_barrier_with_a_timeout() -> None:
    group = dist.new_group(backend="shm", timeout=timedelta(seconds=100))
    dist.barrier(group, timeout=timedelta(seconds=20))
    if dist.get_rank() == 0:
        begin = time.monotonic()
        with pytest.raises(GaveUp, match=r"rank 0 waited 0.3 s for rank 1\n  rule:  the timeout of this call"):
            dist.barrier(group, timeout=timedelta(seconds=0.3))
        assert time.monotonic() - begin < 3
    dist.barrier()  # of the other group: no rank leaves earlier
    dist.destroy_process_group(group)


@pytest.mark.alone  # waits for a timeout
def test_a_barriers_own_timeout_is_respected(world) -> None:
    world(2).run(a_barrier_with_a_timeout)


@pytest.mark.alone
def test_errors_of_a_group_are_runtime_errors(world) -> None:
    world(2).run(errors_of_a_group)
