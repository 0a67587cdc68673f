"""The mpi transport, the endpoint over MPI and the rendezvous under mpiexec, with Open MPI and MPICH, on 1 to 4 ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import mpiexec
import pytest

from drumline.comm.mpi import world as mpiworld
from drumline.core.errors import InputError

MESSAGES = (
    "the_contract",
    "tags_of_31_bits",
    "every_type",
    "a_size_that_is_wrong",
    "a_missing_message_times_out",
    "frames_in_order",
    "the_contract_of_endpoints",
    "own_collectives",
)

BACKEND = ("every_operation", "large_and_odd_tensors", "sub_groups", "training", "a_wrong_call_is_reported")


@pytest.mark.parametrize(
    "n", [pytest.param(1, marks=pytest.mark.slow), 2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))]
)
@pytest.mark.parametrize("name", mpiexec.NAMES)
def test_messages_rendezvous_and_backend(name: str, n: int, tmp_path: Path) -> None:
    mpiexec.run(name, n, tmp_path, *MESSAGES, "peers_are_found", *BACKEND)


@pytest.mark.slow
@pytest.mark.parametrize("name", mpiexec.NAMES)
def test_rendezvous_across_hosts(name: str, tmp_path: Path) -> None:
    from drumline.comm.mpi.rendezvous import own_addresses

    if not own_addresses():
        pytest.skip("this machine has no address but its own loopback")
    mpiexec.run(name, 3, tmp_path, "peers_of_other_hosts_are_found")


@pytest.mark.parametrize("name", mpiexec.NAMES)
def test_an_error_on_one_rank_ends_all(name: str) -> None:
    program = "from drumline.comm.mpi.world import world; c = world(); assert c.rank == 0, 'rank 1 fails'; c.Barrier()"
    done = mpiexec.start(name, 2, "-c", program)
    assert done.returncode != 0
    assert "rank 1 fails" in done.stderr


def test_mpiexec_of_another_mpi() -> None:
    """MPICH's mpiexec with Open MPI's library: every rank would be alone."""
    program = "from drumline.comm.environment import connect; connect()"
    done = mpiexec.start("MPICH", 2, "-c", program, MPI4PY_LIBMPI=str(mpiexec.PREFIX / "lib" / "libmpi.so.40"))
    assert done.returncode != 0
    assert "mpiexec of MPICH started 2 ranks, but mpi4py sees 1" in done.stderr
    assert "belong to the same MPI" in done.stderr


def test_without_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    mpiworld.load.cache_clear()
    with pytest.raises(InputError, match="mpi4py is not installed\n.*\n  try:   pip install 'drumline\\[mpi\\]'"):
        mpiworld.load()
    mpiworld.load.cache_clear()
