"""The loop from scripts and prompts: with and without a `__main__` guard it works or gives one clear error, never hangs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DEFINITIONS = """
import sys
import torch
import torch.nn.functional as F
import drumline as dl
from drumline.clusters import Cluster, DeviceSpec, Link, Node

sys.stderr.write("script starts\\n")
CLUSTER = Cluster("here", DeviceSpec("core", "cpu", 1e10, 1e10, {"fp32": 1e10}, 1e-5, threads=1), Node(2, Link(1e-4, 1e9)))


def model():
    return torch.nn.Linear(8, 4)


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def data():
    return [(torch.full((8,), float(i % 4)), i % 4) for i in range(20)]


def job():
    return dl.Job(model=model, loss=F.cross_entropy, optimizer=optimizer, data=data, batch_size=10, steps=3)


def local_job():
    return dl.Job(
        model=lambda: torch.nn.Linear(8, 4), loss=F.cross_entropy, optimizer=optimizer, data=data, batch_size=10, steps=3
    )
"""
TRAIN = 'print(len(dl.train({job}, "{plan}", cluster=CLUSTER, output="{folder}").losses), "steps")\n'


def script(
    tmp_path: Path, text: str, name: str = "script.py", *, stdin: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a script as a file, or from standard input."""
    (tmp_path / name).write_text(text)
    arguments = ["-"] if stdin else [name]
    return subprocess.run(
        [sys.executable, *arguments],
        input=text if stdin else None,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=150,
    )


def call(job: str, plan: str = "dp=2", folder: str = "run") -> str:
    return TRAIN.format(job=job, plan=plan, folder=folder)


def guarded(line: str) -> str:
    return f'if __name__ == "__main__":\n    {line}'


def started(done: subprocess.CompletedProcess[str]) -> int:
    """How often the script ran: in this process and on ranks."""
    return done.stderr.count("script starts")


@pytest.mark.parametrize("job", ["job()", "job", "local_job"])
def test_a_guarded_script(tmp_path: Path, job: str) -> None:
    """Jobs of importable functions, and functions that make a job, reach the ranks."""
    done = script(tmp_path, DEFINITIONS + guarded(call(job)))
    assert done.returncode == 0 and done.stdout == "3 steps\n", done.stderr


@pytest.mark.parametrize("stdin", [False, True])
def test_a_job_in_a_file_needs_no_guard(tmp_path: Path, stdin: bool) -> None:
    (tmp_path / "job.py").write_text(DEFINITIONS.replace("script starts", "job file"))
    lines = call('"job.py"') + call('"job.py:local_job"', "dp=1", "other")
    lines += 'print(dl.verify("job.py", "dp=2", steps=2).passed)\n'
    done = script(tmp_path, DEFINITIONS + lines, stdin=stdin)
    assert done.returncode == 0 and done.stdout == "3 steps\n3 steps\nTrue\n", done.stderr
    assert started(done) == 1  # ranks do not import the script


def refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """Exactly one error, raised in the script's own process."""
    assert done.returncode == 1 and not done.stdout, done.stdout + done.stderr
    assert done.stderr.count("drumline.core.errors.JobError: ") == 1 and started(done) <= 2
    assert all(word in done.stderr for word in words), done.stderr


def test_an_unguarded_script_with_its_own_job(tmp_path: Path) -> None:
    for job in ("job()", "job"):
        done = script(tmp_path, DEFINITIONS + call(job))
        refused(done, "script.py starts ranks without a guard", 'if __name__ == "__main__":', "put the job in a file")
        assert not (tmp_path / "run").exists() and started(done) == 1


def test_an_unguarded_script_that_is_its_own_job_file(tmp_path: Path) -> None:
    done = script(tmp_path, DEFINITIONS + call('"script.py"'))
    refused(done, "script.py runs the loop while it is loaded as a job", 'if __name__ == "__main__":')


def test_a_guarded_script_that_is_its_own_job_file(tmp_path: Path) -> None:
    done = script(tmp_path, DEFINITIONS + guarded(call('"script.py:local_job"')))
    assert done.returncode == 0 and done.stdout == "3 steps\n", done.stderr


def test_lambdas_cannot_be_sent_to_ranks(tmp_path: Path) -> None:
    done = script(tmp_path, DEFINITIONS + guarded(call("local_job()")))
    refused(done, "Job.model is a lambda or a local function", "give the function that makes the job, not its result")


def test_a_prompt_or_notebook(tmp_path: Path) -> None:
    """A job defined there cannot be imported by a rank; one rank runs in the same process."""
    done = script(tmp_path, DEFINITIONS + call("job()"), stdin=True)
    refused(done, "defined in a notebook or at a prompt", "put the job in a file", "a plan of one rank")
    lines = call("local_job()", "dp=1") + 'print(dl.verify(local_job(), "dp=1", steps=2).passed)\n'
    done = script(tmp_path, DEFINITIONS + lines, stdin=True)
    assert done.returncode == 0 and done.stdout == "3 steps\nTrue\n", done.stderr
