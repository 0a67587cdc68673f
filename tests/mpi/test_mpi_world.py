"""How ranks connect and disconnect: at the first use, by a suitable transport, without waiting for dead ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import warm

sys.path.append(str(Path(__file__).parents[1] / "comm"))
import mpiexec
from mpi_checks import in_processes
from world import World

from drumline.core.errors import InputError
from drumline.mpi import world as mpi_world

HELLO = """
from {package} import MPI
comm = MPI.COMM_WORLD
total = comm.allreduce(comm.Get_rank() + 1)
if comm.rank == 0:
    print(comm.size, total, type(comm._state.matcher.endpoint).__name__, flush=True)
"""


def started(tmp_path: Path, text: str, *, ranks: int = 1, env: dict[str, str] | None = None) -> Any:
    script = tmp_path / "script.py"
    script.write_text(text)
    return warm.python("-m", "drumline", "run", "-n", ranks, script, timeout=60, **(env or {}))


def test_importing_is_light_and_connects_to_no_rank() -> None:
    program = "import sys, drumline; assert 'torch' not in sys.modules; from drumline import MPI\n"
    program += "import torch.distributed as d; assert not d.is_initialized()"
    env = {**os.environ, "RANK": "0", "WORLD_SIZE": "2"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "endpoint"), [("", "ShmEndpoint"), ("shm", "ShmEndpoint"), ("gloo", "GlooEndpoint")]
)
def test_a_program_of_mpi4py_runs_when_its_import_changes(tmp_path: Path, transport: str, endpoint: str) -> None:
    done = started(tmp_path, HELLO.format(package="drumline"), ranks=2, env={"DRUMLINE_TRANSPORT": transport})
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2", "3", endpoint]


@pytest.mark.parametrize("name", mpiexec.NAMES)
def test_mpiexec(tmp_path: Path, name: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(HELLO.format(package="drumline"))
    done = mpiexec.start(name, 2, str(script))  # three would compete for two cores, and some MPIs wait by spinning
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2", "3", "MpiEndpoint"]


def test_one_rank_needs_no_launcher() -> None:
    program = HELLO.format(package="drumline")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["1", "1", "ThreadEndpoint"], done.stderr


def test_unknown_transports_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="DRUMLINE_TRANSPORT='glue'") as e:
        mpi_world.join("glue")
    assert "gloo" in e.value.fix
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="threads are ranks of one process"):
        mpi_world.join("threads")


def test_a_rank_that_fails_ends_the_program(tmp_path: Path) -> None:
    text = "from drumline import MPI\ncomm = MPI.COMM_WORLD\nif comm.rank == 1:\n    raise ValueError('mine')\ncomm.Barrier()\n"
    done = started(tmp_path, text, ranks=2)
    assert done.returncode != 0
    assert "ValueError: mine" in done.stderr


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_a_rank_that_ends_early_is_reported(tmp_path: Path, transport: str) -> None:
    text = "from drumline import MPI\ncomm = MPI.COMM_WORLD\nif comm.rank == 0:\n    comm.recv(source=1)\n"
    done = started(tmp_path, text, ranks=2, env={"DRUMLINE_TRANSPORT": transport})
    assert done.returncode != 0
    assert "rank 1" in done.stderr
    assert "script.py:4" in done.stderr or "has left" in done.stderr or "has ended" in done.stderr, done.stderr


def late(comm: Any) -> str:
    """Receive more than a ring holds, though the sender makes no further call."""
    if comm.rank == 0:
        for i in range(20):
            comm.bsend(b"x" * 200_000, 1, i)
        return ""
    return "".join(str(len(comm.recv(source=0, tag=i))) for i in reversed(range(20)))


def test_buffered_sends_arrive() -> None:
    own = World(2)
    try:
        assert own.run(in_processes, late)[1] == "200000" * 20
    finally:
        own.stop()


def test_objects_are_unpickled_in_one_file() -> None:
    source = Path(mpi_world.__file__).parents[1]
    files = [*source.glob("mpi/*.py"), *source.glob("comm/**/*.py"), source / "MPI.py"]
    assert [f.name for f in files if re.search(r"^(import|from) pickle", f.read_text(), re.MULTILINE)] == [
        "pickling.py"
    ]


def test_abort_ends_all_ranks(tmp_path: Path) -> None:
    text = (
        "from drumline import MPI\ncomm = MPI.COMM_WORLD\nif comm.rank == 1:\n    comm.Abort(9)\ncomm.recv(source=1)\n"
    )
    done = started(tmp_path, text, ranks=2)
    assert done.returncode != 0
