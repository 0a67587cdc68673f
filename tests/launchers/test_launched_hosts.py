"""`drumline` over several hosts, which are network namespaces: by hand, over ssh, and elastic under torchrun."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launched import document, environment, run, same_weights, torchrun, train
from netns import Hosts, Unable, two_hosts

pytestmark = pytest.mark.slow


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    try:
        with two_hosts() as made:
            yield made
    except Unable as e:
        pytest.skip(str(e))


def launch(*words: str) -> list[str]:
    return [sys.executable, "-m", "drumline", "launch", *words]


@pytest.mark.parametrize("per_host", [1, 2])
def test_one_command_on_each_side(hosts: Hosts, tmp_path: Path, per_host: int) -> None:
    ranks = 2 * per_host
    words = train(f"dp={ranks},backend=gloo,allreduce=native", "run", "--save-every", "5")
    options = ["--nodes", "2", "--ranks", str(ranks), "--rendezvous", f"tcp://{hosts.address}:29400"]
    sides = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, *launch(*options, "--node", str(i), *words)],
            cwd=tmp_path,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i, name in enumerate(hosts.names)
    ]
    (out, err), (silent, more) = (side.communicate(timeout=200) for side in sides)
    assert [side.returncode for side in sides] == [0, 0], err + more
    assert silent == ""
    plan = f"dp={ranks},backend=gloo,allreduce=native"  # between hosts `auto` adds in another order
    clean = run([sys.executable, "-m", "drumline", *train(plan, "clean", "--save-every", "5")], tmp_path)
    assert json.loads(out)["losses"] == document(clean)["losses"]
    assert same_weights(tmp_path / "run", tmp_path / "clean")


def test_ssh(hosts: Hosts, tmp_path: Path) -> None:
    """A program named ssh runs the command in the namespace of the host, by a shell, as a server of ssh would."""
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text('#!/bin/bash\nwhile [ "$1" != -- ]; do shift; done\nexec ip netns exec "$2" sh -c "$3"\n')
    ssh.chmod(0o755)
    (tmp_path / "hosts").write_text("\n".join(hosts.names))
    options = ["--launcher", "ssh", "--hostfile", "hosts", "--rendezvous", f"tcp://{hosts.address}:29400"]
    path = f"{ssh.parent}:{os.environ['PATH']}"
    done = run(launch(*options, *train("dp=2,backend=gloo", "run", "--save-every", "5")), tmp_path, PATH=path)
    clean = run([sys.executable, "-m", "drumline", *train("dp=2,backend=gloo", "clean", "--save-every", "5")], tmp_path)
    assert document(done)["losses"] == document(clean)["losses"]
    bad = run(launch(*options, *train("dp=4", "bad")), tmp_path, PATH=path)
    assert bad.returncode == 2, bad.stderr
    assert bad.stderr.count("the plan dp=4 needs 4 ranks, but ssh started 2") == 1


class Bridge:
    """Hosts on a bridge, of which one can be cut off and joined again."""

    def __init__(self, count: int) -> None:
        self.token = secrets.token_hex(2)
        self.bridge = f"dlb{self.token}"
        self.names = [f"drumline-{self.token}-{i}" for i in range(count)]
        self.net = f"10.{200 + int(self.token[:1], 16)}.{int(self.token[1:3], 16)}"

    def interface(self, host: int) -> str:
        return f"dlh{self.token}{host}"

    def make(self) -> None:
        _ip("link", "add", self.bridge, "type", "bridge")
        _ip("link", "set", self.bridge, "up")
        for i, name in enumerate(self.names):
            _ip("netns", "add", name)
            _ip("link", "add", self.interface(i), "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", self.interface(i), "master", self.bridge, "up")
            _ip("-n", name, "addr", "add", f"{self.net}.{i + 1}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")

    def cut(self, host: int) -> None:
        _ip("link", "set", self.interface(host), "down")

    def mend(self, host: int) -> None:
        _ip("link", "set", self.interface(host), "up")

    def remove(self) -> None:
        for i, name in enumerate(self.names):
            subprocess.run(["ip", "link", "del", self.interface(i)], capture_output=True, check=False)
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", self.bridge], capture_output=True, check=False)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unable(f"ip {' '.join(words)}: {done.stderr.strip()}")


@pytest.mark.timeout(560)
def test_torchrun_elastic_loses_a_host_and_gets_it_back(tmp_path: Path) -> None:
    """Three hosts; the third is cut off, two go on from the checkpoint; it comes back, and three end the run."""
    bridge = Bridge(3)
    agents: dict[int, subprocess.Popen[bytes]] = {}
    logs = [tmp_path / f"log-{i}" for i in range(3)]
    words = train("auto", "run", "--save-every", "2", "--resume", "auto", "--steps", "300", "--log-every", "1")

    def agent(host: int) -> None:
        # a namespace has the machine's name, so the first host is told that it has the store
        conf = f"last_call_timeout=3,join_timeout=120,is_host={int(host == 0)}"
        options = ["--nnodes", "2:3", "--max-restarts", "9", "--rdzv-backend", "c10d", "--rdzv-id", "elastic"]
        options += ["--rdzv-endpoint", f"{bridge.net}.1:29401", "--rdzv-conf", conf]
        options += ["--local-addr", f"{bridge.net}.{host + 1}"]
        with logs[host].open("ab") as log:
            agents[host] = subprocess.Popen(
                ["ip", "netns", "exec", bridge.names[host], *torchrun(1, *options), *words],
                cwd=tmp_path,
                env=environment(JOINED_JOB_SLEEP="0.02", DRUMLINE_TIMEOUT="10", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"),
                stdout=log,
                stderr=log,
            )

    def wait_for_step(n: int) -> None:
        end = time.monotonic() + 150
        while (_steps(tmp_path) or -1) < n:
            assert time.monotonic() < end, "\n".join(f"{p.name}: {p.read_text()[-1500:]}" for p in logs)
            time.sleep(0.2)

    try:
        with contextlib.ExitStack() as stack:
            stack.callback(bridge.remove)
            try:
                bridge.make()
            except Unable as e:
                pytest.skip(str(e))
            for host in range(3):
                agent(host)
            wait_for_step(6)
            bridge.cut(2)
            wait_for_step(_steps(tmp_path) + 6)
            agents[2].kill()
            agents[2].wait()
            bridge.mend(2)
            agent(2)
            assert [agents[i].wait(200) for i in range(2)] == [0, 0], logs[0].read_text()[-3000:]
    finally:
        for a in agents.values():
            a.kill()
            a.wait()
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "steps.jsonl").read_text().splitlines()]
    assert steps == list(range(300))


def _steps(folder: Path) -> int:
    """The last step that the run has recorded."""
    file = folder / "run" / "steps.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return int(json.loads(lines[-1]).get("step", 0)) if lines and lines[-1].endswith("}") else 0
