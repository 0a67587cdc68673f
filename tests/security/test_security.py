"""Attacks by files, names and the network: nothing runs, nothing leaves the folder, nothing listens, nothing leaks."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import rank_sockets
from command import here

from drumline.core.errors import CorruptFile, DrumlineError
from drumline.launchers import spawn
from drumline.reports import Run

RELEASE = Path(__file__).parents[1] / "data" / "release-0.1"
SECRET = "s3cr3t-4711"
JOB = """
import torch
from torch import nn
import drumline as dl

def job():
    return dl.Job(model=lambda: nn.Linear(4, 2), loss=nn.functional.cross_entropy,
                  optimizer=lambda p: torch.optim.SGD(p, lr=0.01),
                  data=lambda: [(torch.ones(4) * i, i % 2) for i in range(20)], batch_size=4, steps=5)
"""


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self.path), "w"))


def seal(run: Path, name: str) -> None:
    head = json.loads((run / "run.json").read_text())
    head["files"][name] = hashlib.sha256((run / name).read_bytes()).hexdigest()
    (run / "run.json").write_text(json.dumps(head))


# -- S1: code in files


@pytest.mark.parametrize("protocol", [0, 5])
@pytest.mark.parametrize("name", ["profile.json", "cluster.toml", "plan.toml", "config.yaml", "config.json", "x.csv"])
def test_pickles_in_place_of_inputs(tmp_path: Path, name: str, protocol: int) -> None:
    path, sentinel = tmp_path / name, tmp_path / "sentinel"
    path.write_bytes(pickle.dumps(Evil(sentinel), protocol=protocol))
    (tmp_path / "j.py").write_text(JOB)
    words: dict[str, list[object]] = {
        "profile.json": ["plan", path, "--cluster", "dgx-h100"],
        "cluster.toml": ["plan", "gpt:125m", "--cluster", path],
        "plan.toml": ["train", tmp_path / "j.py", "--plan", path, "--cluster", "dgx-h100", "-o", tmp_path / "run"],
        "x.csv": ["validate", path],
    }
    done = here(*words.get(name, ["plan", "gpt:125m", "--cluster", "dgx-h100", "--from", path]))
    assert done.returncode in (2, 6) and name in done.stderr, done.stderr
    assert not sentinel.exists()


@pytest.mark.parametrize("name", ["run.json", "steps.jsonl", "measured.json", "predicted.json", "answer.json"])
def test_pickles_in_a_run_folder(tmp_path: Path, name: str) -> None:
    """With the right digests: traces are timelines too."""
    run, sentinel = tmp_path / "run", tmp_path / "sentinel"
    shutil.copytree(RELEASE / "run", run)
    (run / name).write_bytes(pickle.dumps(Evil(sentinel)))
    if name != "run.json":
        seal(run, name)
    with pytest.raises(DrumlineError):
        Run.load(run)
    assert not sentinel.exists()


def test_pickles_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A measurement, its corrections and its journal."""
    from drumline.clusters import Cluster
    from drumline.loop.corrections import with_corrections
    from drumline.loop.measure import cached_cluster, this_machine

    monkeypatch.setenv("DRUMLINE_CACHE", str(tmp_path))
    sentinel = tmp_path / "sentinel"
    path = cached_cluster(os.cpu_count() or 1)
    path.write_bytes(pickle.dumps(Evil(sentinel)))
    with pytest.raises(DrumlineError):
        this_machine(1)
    shutil.copy(RELEASE / "cluster.toml", path)
    path.with_name(f"{path.stem}.corrections.json").write_bytes(pickle.dumps(Evil(sentinel)))
    notes: list[str] = []
    with_corrections(Cluster.load(path), path, use=True, notify=notes.append)
    assert notes and not sentinel.exists()


# -- S2: paths in files


@pytest.mark.parametrize("name", ["../outside.json", "/etc/hostname", "a/b.json", "..", "."])
def test_paths_in_a_run_folder(tmp_path: Path, name: str) -> None:
    shutil.copytree(RELEASE / "run", tmp_path / "run")
    (tmp_path / "outside.json").write_text("{}")
    head = json.loads((tmp_path / "run" / "run.json").read_text())
    head["files"][name] = hashlib.sha256(b"{}").hexdigest()
    (tmp_path / "run" / "run.json").write_text(json.dumps(head))
    with pytest.raises(CorruptFile, match="is no file name|is missing"):
        Run.load(tmp_path / "run")


def test_writing_does_not_follow_a_link(tmp_path: Path) -> None:
    """A link in place of an output file is replaced, and what it names is left alone."""
    from drumline.core.files import write_text

    (tmp_path / "precious").write_text("data")
    (tmp_path / "report.html").symlink_to(tmp_path / "precious")
    write_text(tmp_path / "report.html", "page")
    assert (tmp_path / "precious").read_text() == "data" and not (tmp_path / "report.html").is_symlink()


# -- S3: names with shell metacharacters


NAMES = ["a;touch x", "$(touch x)", "`touch x`", "a b'c\"d", "-n", "a\nb"]


def test_script_and_arguments_are_passed_literally(tmp_path: Path) -> None:
    script = tmp_path / "s $(touch x);.py"
    script.write_text("import json, os, sys\nprint(json.dumps([sys.argv, os.environ['NAME']]))")
    done = subprocess.run(
        [sys.executable, "-m", "drumline", "run", "-n", "1", str(script), *NAMES],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "NAME": "$(touch x)"},
        timeout=60,
    )
    assert json.loads(done.stdout) == [[str(script), *NAMES], "$(touch x)"], done.stderr
    assert {p.name for p in tmp_path.iterdir()} == {script.name}


def test_run_names_are_names(tmp_path: Path) -> None:
    name = "r;touch x$(touch x)`touch x`a b'c\"d"
    (tmp_path / "j.py").write_text(JOB)
    done = here("train", "j.py", "--plan", "dp=1", "--cluster", "dgx-h100", "--steps", 2, "-o", name, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / name / "run.json").exists() and not (tmp_path / "x").exists()


@pytest.mark.parametrize("host", [";rm -rf x", "a b", "$(id)", "<script>", "-oProxyCommand=x"])
def test_hosts_in_a_cluster_file_are_no_commands(tmp_path: Path, host: str) -> None:
    """There is no key for hosts: one in a cluster file is refused, and names are printed, never run."""
    text = (RELEASE / "cluster.toml").read_text()
    path = tmp_path / "c.toml"
    path.write_text(f"hosts = [{json.dumps(host)}]\n{text}")
    done = here("plan", "gpt:125m", "--cluster", path, cwd=tmp_path)
    assert done.returncode == 2 and "unknown key 'hosts'" in done.stderr and "c.toml" in done.stderr


# -- S5: the network


def test_a_local_run_listens_on_the_loopback_interface_only() -> None:
    """Two ranks over gloo: each listens for its peer. The store is a file in a private folder, without a port."""
    for addresses in spawn(rank_sockets.listening, ranks=2):
        assert all(ipaddress.ip_address(ip).is_loopback for ip, _ in addresses), addresses


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_cannot_open_the_store_of_a_local_run() -> None:
    """The file of the store, by its exact path, from a process of another user while the ranks use it."""
    for opened, read in spawn(rank_sockets.open_store_as_another_user, ranks=2):
        assert opened == "PermissionError" and read == "own"


# -- S6: secrets


def test_secrets_stay_out_of_the_run_folder_and_the_screen(tmp_path: Path) -> None:
    (tmp_path / "j.py").write_text(JOB)
    secrets = dict.fromkeys(("WANDB_API_KEY", "HF_TOKEN", "DB_PASS", "DB_PASSWORD", "MY_SECRET"), SECRET)
    done = here(
        "train",
        "j.py",
        "--plan",
        "dp=1",
        "--cluster",
        "dgx-h100",
        "-o",
        "run",
        "--log-format",
        "jsonl",
        cwd=tmp_path,
        **secrets,
    )
    assert done.returncode == 0, done.stderr
    written = [p for p in (tmp_path / "run").rglob("*") if p.is_file()]
    assert len(written) > 5
    assert SECRET not in done.stdout + done.stderr + "".join(p.read_text() for p in written)
    failed = here("train", "j.py:none", "--plan", "dp=1", cwd=tmp_path, **secrets)
    assert failed.returncode == 2 and SECRET not in failed.stderr


# -- S7: files in shared folders


def test_files_of_the_ranks_are_private() -> None:
    names = set()
    for _ in range(2):
        for name, modes in spawn(rank_sockets.modes, ranks=2):
            names.add(name)
            assert modes.pop(name) == "0o700", modes
            assert name.startswith("drumline-") and len(name) >= len("drumline-") + 8
    assert len(names) == 2, "a name that can be guessed"


def test_outputs_follow_the_umask(tmp_path: Path) -> None:
    from drumline.core.files import write_text

    for mask, mode in ((0o077, 0o600), (0o027, 0o640), (0o022, 0o644)):
        before = os.umask(mask)
        try:
            write_text(tmp_path / f"{mask:o}", "x")
        finally:
            os.umask(before)
        assert (tmp_path / f"{mask:o}").stat().st_mode & 0o777 == mode
