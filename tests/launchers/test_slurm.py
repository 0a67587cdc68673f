"""`drumline` under a real Slurm of two nodes: srun, sbatch with the script that `launch --emit` wrote, preemption."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launched import document, run, same_weights, train
from slurm_cluster import NoSlurm, SlurmCluster, slurm_cluster

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    try:
        with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
            yield cluster
    except NoSlurm as e:
        pytest.skip(str(e))


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A run on local ranks, and its losses."""
    folder = tmp_path_factory.mktemp("local")
    words = train("dp=2,backend=gloo", "run", "--save-every", "5")
    return folder / "run", document(run([sys.executable, "-m", "drumline", *words], folder))["losses"]


def test_srun(cluster: SlurmCluster, local: tuple[Path, list[float]], tmp_path: Path) -> None:
    """With srun's variables alone."""
    words = train("dp=2,backend=gloo", "run", "--save-every", "5")
    done = cluster.run("srun", "-N1", "-n2", sys.executable, "-m", "drumline", *words, cwd=tmp_path)
    assert document(done)["losses"] == local[1]
    assert same_weights(tmp_path / "run", local[0])
    bad = cluster.run("srun", "-N1", "-n2", sys.executable, "-m", "drumline", *train("dp=4", "bad"), cwd=tmp_path)
    assert bad.returncode == 2, bad.stderr
    assert bad.stderr.count("drumline: the plan dp=4 needs 4 ranks, but slurm started 2\n") == 1
    assert bad.stdout == ""
    one = cluster.run("srun", "-N1", "-n2", sys.executable, "-m", "drumline", "report", "run", cwd=tmp_path)
    assert one.returncode == 2, one.stderr
    assert one.stderr.count("drumline: drumline report on 2 ranks\n") == 1


def test_sbatch_preempted_and_resumed(cluster: SlurmCluster, local: tuple[Path, list[float]], tmp_path: Path) -> None:
    """Two nodes; `MASTER_ADDR` because the names of these nodes are in no name service."""
    words = train("dp=2,backend=gloo", "run", "--save-every", "5", "--resume", "auto")
    options = ["--launcher", "slurm", "--nodes", "2", "--ranks", "2", "--env", "MASTER_ADDR=127.0.0.1"]
    made = run([sys.executable, "-m", "drumline", "launch", *options, "--emit", "job.sh", *words], tmp_path)
    assert made.returncode == 0, made.stderr

    first = _submit(cluster, tmp_path, JOINED_JOB_SLEEP="0.05")
    steps, end = tmp_path / "run" / "steps.jsonl", time.monotonic() + 120
    while not (steps.exists() and steps.read_text().count("\n") > 3):
        assert time.monotonic() < end, _output(tmp_path, first) + cluster.logs()
        time.sleep(0.05)
    assert cluster.run("scancel", "--signal=USR1", first).returncode == 0
    assert cluster.wait_until_ended(first) == "COMPLETED", _output(tmp_path, first)
    assert "preempted: continue with --resume auto" in _output(tmp_path, first)
    done = steps.read_text().count("\n")
    assert 3 < done < 20

    second = _submit(cluster, tmp_path)
    assert cluster.wait_until_ended(second) == "COMPLETED", _output(tmp_path, second)
    text = _output(tmp_path, second)
    assert json.loads(text[text.index("{") : text.rindex("}") + 1])["losses"] == local[1]
    assert same_weights(tmp_path / "run", local[0])


def _submit(cluster: SlurmCluster, folder: Path, **variables: str) -> str:
    done = cluster.run("sbatch", "job.sh", cwd=folder, **variables)
    assert done.returncode == 0, done.stderr
    match = re.search("job ([0-9]+)", done.stdout)
    assert match, done.stdout
    return match[1]


def _output(folder: Path, job: str) -> str:
    path = folder / f"slurm-{job}.out"
    return path.read_text() if path.exists() else ""
