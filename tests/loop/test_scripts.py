"""The loop from scripts and prompts: from a file, from standard input, with and without a `__main__` guard."""

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
    """Jobs of importable functions, functions that make a job, paths and lambdas reach the ranks."""
    calls = ["train(job())", "train(local_job)", 'train("script.py:local_job")', "train(local_job())"]
    assert script(tmp_path, calls, guarded=True) == ["3 steps"] * 4


def test_an_unguarded_script(tmp_path: Path) -> None:
    """Its functions are sent by value: nothing imports the script, so it needs no guard."""
    calls = ['train("job.py:local_job")', "train(job())", "train(local_job)"]
    calls.append('print(dl.verify(job, "dp=2", steps=2).passed)')
    calls.append("print(dl.spawn(lambda n: [len(data()), n], 7, ranks=2))")
    assert script(tmp_path, calls) == ["3 steps"] * 3 + ["True", "[[20, 7], [20, 7]]"]


def test_a_prompt_or_notebook(tmp_path: Path) -> None:
    """A job that was defined there runs on any number of ranks; results of classes defined there come back."""
    calls = ['train("job.py")', "train(job())", 'train(local_job(), "tp=2")', 'train(local_job(), "dp=1")']
    calls.append('print(dl.verify(local_job(), "dp=2,zero=1", steps=2).passed)')
    calls.append("P = type('P', (), {})")
    calls.append("print([type(p) is P for p in dl.spawn(lambda: P(), ranks=2)])")
    assert script(tmp_path, calls, stdin=True) == ["3 steps"] * 4 + ["True", "[True, True]"]


def test_objects_that_cannot_be_sent_are_named(tmp_path: Path) -> None:
    """A lock has no value to send: the job runs in this process, or is refused before a rank starts."""
    calls = ["import threading; lock = threading.Lock()"]
    calls.append("kept = dl.Job(lambda: lock and model(), F.cross_entropy, optimizer, data, 10, steps=3)")
    calls += ["train(kept)", 'train(kept, "dp=1")']
    _, refused, alone = ["", *script(tmp_path, calls, stdin=True)]
    assert refused.startswith("JobError: the variable 'lock' of Job.model cannot be sent to ranks: cannot pickle")
    assert "a plan of one rank" in refused
    assert alone == "3 steps"


def test_an_unguarded_script_that_is_its_own_job_file(tmp_path: Path) -> None:
    """Loading the job runs the script again: the second call is refused, and nothing recurses."""
    (tmp_path / "script.py").write_text(DEFINITIONS + 'dl.train("script.py", "dp=2", cluster=CLUSTER)\n')
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and done.stderr.count("drumline.core.errors.JobError: ") == 1, done.stderr
    assert "script.py runs the loop while it is loaded as a job" in done.stderr
    assert 'if __name__ == "__main__":' in done.stderr and done.stderr.count("script starts") == 2
    assert not (tmp_path / "runs").exists()
