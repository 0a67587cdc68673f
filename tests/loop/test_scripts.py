"""The loop from scripts and prompts: with and without a `__main__` guard it works or gives one clear error, never hangs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
HELPERS = """
def train(job, plan="dp=2"):
    try:
        print(len(dl.train(job, plan, cluster=CLUSTER, output="run", overwrite=True).losses), "steps")
    except dl.DrumlineError as e:
        print(f"{type(e).__name__}: {e}".replace("\\n", " "))
"""


def script(folder: Path, calls: list[str], *, guarded: bool = False, stdin: bool = False) -> list[str]:
    """The lines that a script prints, run as a file or from standard input; it must run to its end, once."""
    (folder / "job.py").write_text(DEFINITIONS.replace("script starts", "job file"))
    body = "".join(f"{'    ' if guarded else ''}{call}\n" for call in calls)
    text = DEFINITIONS + HELPERS + ('if __name__ == "__main__":\n' if guarded else "") + body
    (folder / "script.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-" if stdin else "script.py"],
        input=text if stdin else None,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    if not guarded:
        assert done.stderr.count("script starts") == 1, done.stderr  # no rank has imported the script
    return done.stdout.splitlines()


def test_a_guarded_script(tmp_path: Path) -> None:
    """Jobs of importable functions, functions that make a job, and paths reach the ranks; lambdas do not."""
    calls = ["train(job())", "train(local_job)", 'train("script.py:local_job")', "train(local_job())"]
    *worked, refused = script(tmp_path, calls, guarded=True)
    assert worked == ["3 steps"] * 3
    assert refused.startswith("JobError: ranks cannot load this job: Job.model is a lambda or a local function")
    assert "give the function that makes the job, not its result" in refused


def test_an_unguarded_script(tmp_path: Path) -> None:
    """A job in another file needs no guard; a job of the script itself is refused before anything is started."""
    calls = ['train("job.py:local_job")', "train(job())", "train(job)"]
    calls.append('print(dl.verify("job.py", "dp=2", steps=2).passed)')
    trained, *refused, verified = script(tmp_path, calls)
    assert (trained, len(refused), verified) == ("3 steps", 2, "True")
    for line in refused:
        assert "script.py starts ranks without a guard" in line and 'if __name__ == "__main__":' in line
        assert "put the job in a file" in line


def test_a_prompt_or_notebook(tmp_path: Path) -> None:
    """Only jobs in files reach ranks; a job defined there runs on one rank, in the same process."""
    calls = ['train("job.py")', "train(job())", 'train(local_job(), "dp=1")']
    calls.append('print(dl.verify(local_job(), "dp=1", steps=2).passed)')
    in_file, refused, alone, verified = script(tmp_path, calls, stdin=True)
    assert (in_file, alone, verified) == ("3 steps", "3 steps", "True")
    assert "defined in a notebook or at a prompt" in refused and "put the job in a file" in refused
    assert "a plan of one rank" in refused


def test_an_unguarded_script_that_is_its_own_job_file(tmp_path: Path) -> None:
    """Loading the job runs the script again: the second call is refused, and nothing recurses."""
    (tmp_path / "script.py").write_text(DEFINITIONS + 'dl.train("script.py", "dp=2", cluster=CLUSTER)\n')
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and done.stderr.count("drumline.core.errors.JobError: ") == 1, done.stderr
    assert "script.py runs the loop while it is loaded as a job" in done.stderr
    assert 'if __name__ == "__main__":' in done.stderr and done.stderr.count("script starts") == 2
    assert not (tmp_path / "runs").exists()
