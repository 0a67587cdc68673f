"""Rank and size from the variables of every launcher, and errors for inconsistent values."""

from __future__ import annotations

import pytest

from drumline.comm.environment import RankInfo, connect, rank_info
from drumline.core.errors import InputError

TORCHRUN = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}
SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, RankInfo()),
        (TORCHRUN, RankInfo(2, 4, 0, "torchrun")),
        ({"RANK": "2", "WORLD_SIZE": "4"}, RankInfo(2, 4, 2, "torchrun")),
        ({"WORLD_SIZE": "1"}, RankInfo()),
        ({**SLURM, "SLURM_STEP_ID": "0", "WORLD_SIZE": "8"}, RankInfo(5, 8, 1, "Slurm")),
        ({**SLURM, "SLURM_STEP_ID": "0"}, RankInfo(5, 8, 1, "Slurm")),
        (SLURM, RankInfo()),  # inside an allocation, but not started by srun
        ({**SLURM, "SLURM_STEP_ID": "0", **TORCHRUN}, RankInfo(2, 4, 0, "torchrun")),  # torchrun inside srun
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
            RankInfo(1, 3, 1, "Open MPI"),
        ),
        ({"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0"}, RankInfo(0, 2, 0, "MPICH")),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, RankInfo(1, 2, 1, "MPICH")),
    ],
)
def test_launchers(environment: dict[str, str], expected: RankInfo) -> None:
    assert rank_info(environment) == expected


@pytest.mark.parametrize("text", ["", "x", "-1", "1.0", " 1", "²", "9" * 5000, "1e3", "0x1"])
@pytest.mark.parametrize("key", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
def test_invalid_values(key: str, text: str) -> None:
    with pytest.raises(InputError) as caught:
        rank_info({**TORCHRUN, key: text})
    assert caught.value.what == f"{key}={text!r}"
    assert caught.value.where == "environment"
    assert caught.value.rule == f"{key} is a whole number of at least 0"


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RANK": "2"}, "RANK=2, but WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2, but RANK is not set"),
        ({**SLURM, "SLURM_STEP_ID": "0", "WORLD_SIZE": "4"}, "WORLD_SIZE=4, but RANK is not set"),
    ],
)
def test_half_of_the_variables(environment: dict[str, str], words: str) -> None:
    """Ranks that ignored it would each train alone."""
    with pytest.raises(InputError, match=words) as caught:
        rank_info(environment)
    assert caught.value.rule.startswith("RANK and WORLD_SIZE are set together; there is ")


@pytest.mark.parametrize(("rank", "size"), [(4, 4), (7, 2), (0, 0)])
def test_a_rank_above_the_size(rank: int, size: int) -> None:
    with pytest.raises(
        InputError, match=f"RANK={rank} and WORLD_SIZE={size}\n  where: environment\n  rule:  RANK < WORLD"
    ):
        rank_info({"RANK": str(rank), "WORLD_SIZE": str(size)})


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (
            {},
            "4 ranks were started by torchrun, but MASTER_ADDR is not set\n.*\n  rule:  ranks meet at MASTER_ADDR:MASTER_PORT",
        ),
        ({"MASTER_ADDR": "x"}, "but MASTER_PORT is not set\n.*\n.*\n  try:   export MASTER_PORT"),
        ({"MASTER_ADDR": "x", "MASTER_PORT": "y"}, "MASTER_PORT='y'"),
        ({"MASTER_ADDR": "x", "MASTER_PORT": "0"}, "MASTER_PORT=0\n.*\n  rule:  0 < port < 65536"),
        ({"MASTER_ADDR": "x", "MASTER_PORT": "65536"}, "0 < port < 65536"),
    ],
)
def test_missing_master_address(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], words: str) -> None:
    for key in ("MASTER_ADDR", "MASTER_PORT", "DRUMLINE_STORE"):
        monkeypatch.delenv(key, raising=False)
    for key, value in {**TORCHRUN, **variables}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(InputError, match=words):
        connect()


@pytest.mark.parametrize(
    "launcher",
    [
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3"},
        {"PMI_RANK": "1", "PMI_SIZE": "3"},
    ],
)
def test_mpiexec_without_mpi4py(monkeypatch: pytest.MonkeyPatch, launcher: dict[str, str]) -> None:
    for key in ("MASTER_ADDR", "MASTER_PORT", "DRUMLINE_STORE", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(key, raising=False)
    for key, value in launcher.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    name = rank_info().launcher
    with pytest.raises(InputError, match=f"3 ranks were started by {name}, but MASTER_ADDR is not set") as caught:
        connect()
    assert caught.value.fix.endswith("; with `pip install 'drumline[mpi]'` it is not needed")
