"""`drumline` under real launchers: torchrun, Open MPI, MPICH. The ranks join one job, which runs once."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from launched import JOB, document, environment, run, same_weights, torchrun, train

from drumline.comm.mpi.rendezvous import own_addresses

sys.path.insert(0, str(Path(__file__).parents[1] / "comm"))
from mpiexec import NAMES, start


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on local ranks, to compare with."""
    folder = tmp_path_factory.mktemp("local")
    done = run([sys.executable, "-m", "drumline", *train("dp=2", "run", "--save-every", "5")], folder)
    (folder / "document.json").write_text(json.dumps(document(done)))
    return folder


def losses(folder: Path) -> list[float]:
    """The losses of that run."""
    result: list[float] = json.loads((folder / "document.json").read_text())["losses"]
    return result


def test_torchrun_trains_once(tmp_path: Path, local: Path) -> None:
    done = run([*torchrun(2), *train("dp=2", "run", "--save-every", "5")], tmp_path)
    result = document(done)  # one document: the other rank printed nothing
    assert result["losses"] == losses(local)
    assert len((tmp_path / "run" / "steps.jsonl").read_text().splitlines()) == 20
    assert same_weights(tmp_path / "run", local / "run")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]


def test_the_launcher_decides_the_number_of_ranks(tmp_path: Path) -> None:
    done = run([*torchrun(2), *train("dp=4", "run")], tmp_path)
    assert done.returncode != 0
    assert done.stdout == ""
    assert done.stderr.count("drumline: the plan dp=4 needs 4 ranks, but torchrun started 2\n") == 1
    assert "exitcode: 2" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_verb_for_one_process_is_refused(tmp_path: Path) -> None:
    done = run([*torchrun(2), "plan", "gpt:7b", "--cluster", "dgx-h100"], tmp_path)
    assert done.returncode != 0
    assert done.stdout == ""
    assert done.stderr.count("drumline: drumline plan on 2 ranks\n") == 1


SCRIPT = """
import os, psutil, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1)
dist.all_reduce(x)
if dist.get_rank() == 0:
    port = int(os.environ["MASTER_PORT"])
    own = [c.laddr for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.laddr.port == port]
    print(int(x), sorted({a.ip for a in own}))
dist.destroy_process_group()
"""


def test_scripts_meet_on_the_loopback_address(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run([sys.executable, "-m", "drumline", "run", "-n", "2", "script.py"], tmp_path)
    assert (done.returncode, done.stdout) == (0, "2 ['127.0.0.1']\n"), done.stderr


@pytest.mark.slow
def test_scripts_join(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run([*torchrun(2), "run", "script.py"], tmp_path)
    assert (done.returncode, done.stdout[:2]) == (0, "2 "), done.stderr
    bad = run([*torchrun(2), "run", "-n", "3", "script.py"], tmp_path)
    assert bad.returncode != 0
    assert "--ranks 3, but torchrun started 2" in bad.stderr


PLANS = """
import os
import sys
import drumline as dl
answer = dl.plan(sys.argv[1])
with open(f"plan-{os.environ['RANK']}", "w") as file:
    file.write(f"{answer.best.plan} {answer.seconds}")
"""


@pytest.mark.slow
def test_a_script_plans_once(tmp_path: Path) -> None:
    """Every rank gets the answer of the first one, with the time that its search took."""
    (tmp_path / "script.py").write_text(PLANS)
    done = run([*torchrun(2)[:-2], "script.py", JOB], tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = ((tmp_path / f"plan-{rank}").read_text() for rank in range(2))
    assert first == second and "dp=" in first


ALONE = """
import os
import drumline as dl
if os.environ["RANK"] == "0":
    print(dl.plan("gpt:1.3b", "dgx-h100", devices=8).best.plan)
"""


@pytest.mark.slow
def test_one_rank_may_ask_about_a_given_cluster_alone(tmp_path: Path) -> None:
    """Nothing has to be measured, so it waits for no other rank."""
    (tmp_path / "script.py").write_text(ALONE)
    done = run([*torchrun(2)[:-2], "script.py"], tmp_path)
    assert done.returncode == 0 and "dp=" in done.stdout, done.stderr


@pytest.mark.slow
def test_torchrun_verifies_once(tmp_path: Path) -> None:
    result = document(run([*torchrun(2), "verify", JOB, "--plan", "dp=2,zero=1", "--steps", "2", "--json"], tmp_path))
    assert result["passed"] is True
    assert result["ranks"] == 2


@pytest.mark.slow
def test_a_failure_on_another_rank_is_printed_once(tmp_path: Path) -> None:
    words = train("dp=2", "run")
    done = run([*torchrun(2), "train", f"{JOB}:failing", *words[2:]], tmp_path)
    assert done.returncode != 0
    assert done.stdout == ""
    assert done.stderr.count("no data here") >= 1
    assert len([line for line in done.stderr.splitlines() if line.startswith("drumline: ")]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_torchrun_restarts_after_kills(tmp_path: Path, local: Path, backend: str) -> None:
    words = train(f"dp=2,backend={backend}", "run", "--save-every", "2", "--resume", "auto")
    done = run([*torchrun(2, "--max-restarts", "3"), *words], tmp_path, JOINED_JOB_KILL="1:30:3")
    result = document(done)
    assert len(list(tmp_path.glob("killed-*"))) == 3
    clean = run(
        [sys.executable, "-m", "drumline", *train(f"dp=2,backend={backend}", "clean", "--save-every", "2")], tmp_path
    )
    assert result["losses"] == document(clean)["losses"]
    assert same_weights(tmp_path / "run", tmp_path / "clean")


@pytest.mark.slow
def test_a_killed_agent_leaves_no_ranks(tmp_path: Path) -> None:
    words = train("dp=2", "run", "--steps", "100000")
    agent = subprocess.Popen(
        [*torchrun(2), *words],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        steps, end = tmp_path / "run" / "steps.jsonl", time.monotonic() + 90
        while not (steps.exists() and steps.read_text().count("\n") > 2):
            assert agent.poll() is None and time.monotonic() < end
            time.sleep(0.1)
        ranks = psutil.Process(agent.pid).children(recursive=True)
        assert len(ranks) >= 2
    finally:
        agent.kill()
        agent.wait()
    alive = psutil.wait_procs(ranks, timeout=5)[1]
    assert not alive, alive


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_mpiexec(name: str, tmp_path: Path, local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = start(name, 2, "-m", "drumline", *train("dp=2", "run", "--save-every", "5"))
    assert document(done)["losses"] == losses(local)
    assert same_weights(tmp_path / "run", local / "run")
    bad = start(name, 2, "-m", "drumline", *train("dp=4", "bad"))
    assert bad.returncode == 2, bad.stderr
    assert bad.stderr.count("drumline: the plan dp=4 needs 4 ranks, but mpiexec started 2\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["file", "tcp", "env"])
def test_rendezvous(scheme: str, tmp_path: Path, local: Path) -> None:
    """Ranks that were started by hand, each with its own command."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    place = {
        "file": {"DRUMLINE_RENDEZVOUS": f"file://{tmp_path}/store"},
        "tcp": {"DRUMLINE_RENDEZVOUS": f"tcp://{own_addresses()[0][0]}:{port}"},
        "env": {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
    }[scheme]
    command = [sys.executable, "-m", "drumline", *train("dp=2", "run", "--save-every", "5")]
    ranks = [
        subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment(RANK=str(r), WORLD_SIZE="2", LOCAL_RANK=str(r), LOCAL_WORLD_SIZE="2", **place),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in range(2)
    ]
    if scheme == "tcp":
        _only_loopback(int(port), ranks)
    (out, err), (silent, more) = (rank.communicate(timeout=120) for rank in ranks)
    assert [rank.returncode for rank in ranks] == [0, 0], err + more
    assert silent == ""
    assert json.loads(out)["losses"] == losses(local)


@pytest.mark.slow
@pytest.mark.parametrize("entry", ["drumline/heartbeat/1", "joined/events/1"])
def test_a_foreign_client_of_the_store_is_noticed(entry: str, tmp_path: Path) -> None:
    """Another program connects to the port, lists the entries and writes one in the name of a rank: its status, or a
    report about its step. The run ends with an error that names the entry."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "drumline", *train("dp=2", "run", "--steps", "120")]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "JOINED_JOB_SLEEP": "0.01"}
    ranks = [
        subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment(RANK=str(r), WORLD_SIZE="2", LOCAL_RANK=str(r), LOCAL_WORLD_SIZE="2", **place),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in range(2)
    ]
    try:
        _write_foreign(port, entry, ranks)
        errors = [rank.communicate(timeout=60)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert 0 not in [rank.returncode for rank in ranks], errors
    assert f"the entry '{entry.removeprefix('joined/')}" in "".join(errors), errors
    assert "was not written by a rank of this job" in "".join(errors)


def _write_foreign(port: int, entry: str, ranks: list[subprocess.Popen[str]]) -> None:
    """Connect as a client that knows nothing but the port; wait until the ranks train, and write the entry."""
    store: Any = None
    end = time.monotonic() + 90
    while time.monotonic() < end and all(rank.poll() is None for rank in ranks):
        time.sleep(0.2)
        if store is None:
            with contextlib.suppress(OSError, RuntimeError), socket.create_connection(("127.0.0.1", port), 1):
                store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False, timeout=timedelta(seconds=2))
            continue
        keys = store.list_keys()
        beats = [key for key in keys if key.endswith("drumline/heartbeat/1")]
        if beats:  # the group is made and the training runs
            key = beats[0]
            if "heartbeat" not in entry:
                nonce = next(key for key in keys if "/joined/" in key).partition("/joined/")[0]
                key = f"{nonce}/{entry}/at/{store.add(f'{nonce}/{entry}', 1)}"
            for _ in range(1000):  # a rank replaces its own status every second, and others may not have read it
                with contextlib.suppress(RuntimeError):  # rank 0 has ended, and the store with it
                    store.set(f"{key}/0", "78da030000000001")
                    store.set(key, "1")
                if ranks[0].poll() is not None:
                    break
                time.sleep(0.01)
            return
    for rank in ranks:
        rank.kill()
    pytest.fail("the ranks did not train: " + "".join(rank.communicate()[1] for rank in ranks))


def _only_loopback(port: int, ranks: list[subprocess.Popen[str]]) -> None:
    """Wait until the first rank listens, and check at which address."""
    end = time.monotonic() + 60
    while time.monotonic() < end and ranks[0].poll() is None:
        listening = [c.laddr for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.laddr.port == port]
        if listening:
            assert {address.ip for address in listening} == {"127.0.0.1"}
            return
        time.sleep(0.05)
    pytest.fail("rank 0 has not listened")


@pytest.mark.slow
def test_sizes_that_differ_are_refused_quickly(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "drumline", *train("dp=2", "run")]
    begun = time.monotonic()
    ranks = [
        subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment(
                RANK=str(r), WORLD_SIZE=str(2 + r), LOCAL_RANK=str(r), MASTER_ADDR="127.0.0.1", MASTER_PORT="29637"
            ),
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in range(2)
    ]
    errors = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert time.monotonic() - begun < 150  # not the five minutes for which ranks are waited for
    assert [rank.returncode for rank in ranks] == [2, 2], errors
    assert all("WORLD_SIZE is 2 on rank 0 and 3 on rank 1" in e for e in errors)


@pytest.mark.slow
def test_a_signal_to_all_ranks_saves_and_a_resumed_run_ends_equal(tmp_path: Path, local: Path) -> None:
    """As schedulers preempt: TERM to all ranks; then the same command again."""
    words = train("dp=2", "run", "--save-every", "5", "--resume", "auto", "--steps", "20")
    command = [*torchrun(2), *words]
    agent = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment(JOINED_JOB_SLEEP="0.02"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    steps, end = tmp_path / "run" / "steps.jsonl", time.monotonic() + 90
    while not (steps.exists() and steps.read_text().count("\n") > 6):
        assert agent.poll() is None and time.monotonic() < end
        time.sleep(0.02)
    for rank in psutil.Process(agent.pid).children():
        os.kill(rank.pid, signal.SIGUSR1)
    out, err = agent.communicate(timeout=60)
    assert agent.returncode == 0, err
    assert "preempted: continue with --resume auto" in err
    assert 6 < len(json.loads(out)["losses"]) < 20
    again = document(run(command, tmp_path))
    assert again["losses"] == losses(local)
    assert same_weights(tmp_path / "run", local / "run")
