"""`backend=mpi` under mpiexec: gradients by MPI's own collectives and by named algorithms equal one device."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import small_jobs

from drumline.comm.environment import connect
from drumline.core.errors import InputError, PlanError
from drumline.loop.verify import verify
from drumline.schedules import ALGORITHMS

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "comm"))

import mpiexec  # noqa: E402  # of tests/comm

PATHS = os.pathsep.join([str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH", "")])])


def algorithms_of_ranks(name: str, n: int, *plans: str) -> dict[str, str]:
    done = mpiexec.start(
        name, n, str(HERE / "gradient_ranks.py"), "mpi", *plans, timeout=300, PYTHONPATH=PATHS, DRUMLINE_DEBUG="1"
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    documents = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(documents) == n and all(document == documents[0] for document in documents), done.stdout
    result: dict[str, str] = documents[0]
    return result


def test_training_over_mpi() -> None:
    plans = ("dp=2,backend=mpi", "dp=2,zero=1,backend=mpi,allreduce=ring")
    assert algorithms_of_ranks("Open MPI", 2, *plans) == {plans[0]: "backend", plans[1]: "ring over mpi4py"}


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("name", mpiexec.NAMES)
def test_every_sharding_and_algorithm_over_mpi(name: str, n: int) -> None:
    expected = {f"dp={n},zero={zero},backend=mpi,micro=2": "backend" for zero in (0, 1, 2)}
    for algorithm in ALGORITHMS["all_reduce"]:
        for zero in (0, 1, 2):
            expected[f"dp={n},zero={zero},backend=mpi,allreduce={algorithm}"] = f"{algorithm} over mpi4py"
    assert algorithms_of_ranks(name, n, *expected) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", mpiexec.NAMES)
def test_fsdp_and_pipelines_over_mpi(name: str) -> None:
    plans = ("dp=2,zero=3,backend=mpi", "dp=2,pp=1,compress=fp16,backend=mpi")
    assert set(algorithms_of_ranks(name, 2, *plans)) == set(plans)


def test_mpi_without_mpiexec_is_refused() -> None:
    with pytest.raises(PlanError, match=r"backend=mpi on ranks that Drumline starts(.|\n)*mpiexec -n 2 drumline train"):
        verify(small_jobs.make("mlp"), "dp=2,backend=mpi")
    with pytest.raises(InputError, match=r"backend=mpi, but the ranks were started by no launcher(.|\n)*mpiexec -n 2"):
        connect(backend="mpi")
