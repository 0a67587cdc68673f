"""Files and command lines that start ranks: words stay words, whatever is in them."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command import here
from ruamel.yaml import YAML

from drumline.cli.launch import parse_variables
from drumline.core.errors import InputError
from drumline.launchers.choice import LAUNCHERS, launcher_named
from drumline.launchers.launcher import Launcher, LaunchOptions
from drumline.launchers.ssh import SshLauncher, read_hostfile

NASTY = ["a b", ";rm -rf x", "$(id)", "`id`", "two\nlines", "'", '"', "\\", "$HOME", "*", "--x=#y", "é", "&& true", ""]
OPTIONS = LaunchOptions(ranks=4, nodes=2, hosts=("a", "b"), name="job", image="r/i:1", environment={"X": "$(id)\n'"})


def shell_words(script: str, tmp_path: Path) -> list[list[str]]:
    """What the programs of a script get, one list for each call, with the script run by a real shell."""
    log = tmp_path / "words"
    recorder = tmp_path / "record"
    recorder.write_text(
        f"#!{sys.executable}\nimport sys, json\nopen({str(log)!r}, 'a').write(json.dumps(sys.argv[1:]) + '\\n')\n"
    )
    recorder.chmod(0o755)
    for name in ("srun", "ssh"):
        (tmp_path / name).unlink(missing_ok=True)
        (tmp_path / name).symlink_to(recorder)
    subprocess.run(["bash", "-c", script], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, cwd=tmp_path, check=True)
    import json

    return [json.loads(line) for line in log.read_text().splitlines()]


def test_a_batch_script_passes_words_on(tmp_path: Path) -> None:
    script = launcher_named("slurm").script(["train", *NASTY], OPTIONS)
    [words] = shell_words(script, tmp_path)
    assert words[-len(NASTY) :] == NASTY
    assert words[words.index("train") - 2 : words.index("train")] == ["-m", "drumline"]
    head = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    assert "#SBATCH --nodes=2" in head
    assert "#SBATCH --ntasks-per-node=2" in head
    assert list(tmp_path.glob("x")) == []


@pytest.mark.parametrize("name", ["a\n#SBATCH --uid=0", "a b", ";rm", "$(id)", "x" * 65])
def test_bad_names_of_jobs(name: str) -> None:
    for launcher in ("slurm", "kubernetes"):
        with pytest.raises(InputError, match="--name"):
            launcher_named(launcher).script(["train"], LaunchOptions(2, name=name, image="i"))


def test_a_manifest_passes_words_on() -> None:
    text = launcher_named("kubernetes").script(["train", *NASTY], OPTIONS)
    service, job = YAML(typ="safe").load_all(text)
    assert service["metadata"]["name"] == "job"
    spec = job["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (2, 2, "Indexed")
    command = spec["template"]["spec"]["containers"][0]["command"]
    assert [_expanded(w) for w in command[-len(NASTY) :]] == NASTY
    assert command[command.index("--node") + 1] == "$(JOB_COMPLETION_INDEX)"
    assert command[command.index("--rendezvous") + 1] == "tcp://job-0.job:29500"
    assert _expanded(command[command.index("--env") + 1]) == "X=$(id)\n'"
    for image in ("", "a b", "$(id)"):
        with pytest.raises(InputError, match="--image"):
            launcher_named("kubernetes").script(["train"], LaunchOptions(2, name="a", image=image))


def _expanded(word: str) -> str:
    """As Kubernetes reads a word: $$( is a literal $(, and $(NAME) would be a variable."""
    assert "$(" not in word.replace("$$(", "")
    return word.replace("$$(", "$(")


def test_ssh_passes_words_on(tmp_path: Path) -> None:
    launcher = SshLauncher()
    lines = launcher.commands(["train", *NASTY], OPTIONS)
    assert [line[-2] for line in lines] == ["a", "b"]
    for node, line in enumerate(lines):
        assert line[line.index("--") + 1] == OPTIONS.hosts[node]
        folder, _, rest = line[-1].partition(" && exec ")
        assert shlex.split(folder) == ["cd", str(Path.cwd())]
        words = shlex.split(rest)
        assert words[-len(NASTY) :] == NASTY
        assert words[words.index("--node") + 1] == str(node)
        assert words[words.index("--env") + 1] == "X=$(id)\n'"
    meeting = {w for line in lines for w in shlex.split(line[-1]) if w.startswith("tcp://")}
    assert len(meeting) == 1
    assert meeting.pop().startswith("tcp://a:")


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a\nb # first\n\n# no\n", ("a", "b")),
        ("gpu[1-3]\n", ("gpu1", "gpu2", "gpu3")),
        ("10.0.0.1\nb\r\n", ("10.0.0.1", "b")),
    ],
)
def test_hostfiles(tmp_path: Path, text: str, hosts: tuple[str, ...]) -> None:
    (tmp_path / "hosts").write_text(text)
    assert read_hostfile(tmp_path / "hosts") == hosts


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a;rm\n", "is not a host name"),
        ("$(id)\n", "is not a host name"),
        ("-oProxyCommand=id\n", "is not a host name"),
        ("a slots=4\n", "one host on each line"),
        ("", "names no host"),
        ("a\nb\na\n", "a is listed twice"),
        ("n[0-999999999]\n", "at most 65536"),
    ],
)
def test_bad_hostfiles(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(InputError, match=words):
        read_hostfile(tmp_path / "hosts")


@pytest.mark.parametrize("word", ["A", "=x", "A B=1", "A;B=1", "1A=2", "A-B=1", "$(id)=1", "A\n=1"])
def test_bad_variables(word: str) -> None:
    with pytest.raises(InputError, match="NAME=VALUE"):
        parse_variables([word])


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["plan", "x"], "drumline launch plan\n  rule:  it starts train, verify, measure, bench, run"),
        (["--launcher", "slrum", "train"], "--launcher slrum\n.*known.*\n  try:   Did you mean 'slurm'"),
        (["--ranks", "3", "--nodes", "2", "train"], "--ranks 3 --nodes 2\n  rule:  at least one rank on each host"),
        (["--nodes", "2", "--node", "2", "train"], "--node 2\n  rule:  a number from 0 to 1"),
        (["--nodes", "2", "train"], "--nodes 2 without --rendezvous"),
        (["--launcher", "ssh", "--nodes", "2", "train"], "0 hosts for 2 nodes"),
        (["--launcher", "slurm", "train"], "--launcher slurm starts nothing from here"),
        (["--launcher", "ssh", "--emit", "f", "train"], "--launcher ssh has no script"),
    ],
)
def test_refused(words: list[str], error: str, tmp_path: Path) -> None:
    done = here("launch", *words, cwd=tmp_path)
    assert done.returncode == 2
    import re

    assert re.search(error, done.stderr), done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda x: x.name)
class TestContract:
    """What every launcher has."""

    def test_it_is_not_found_in_an_empty_environment(self, launcher: type[Launcher]) -> None:
        assert launcher.detect({}) is False

    def test_it_says_how_it_is_used(self, launcher: type[Launcher]) -> None:
        assert "drumline" in launcher.how
        assert launcher_named(launcher.name).name == launcher.name

    def test_it_finds_itself(self, launcher: type[Launcher]) -> None:
        variables: dict[str, Any] = {
            "torchrun": {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"},
            "slurm": {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"},
            "mpiexec": {"PMI_RANK": "1", "PMI_SIZE": "2"},
        }
        own = variables.get(launcher.name, {"RANK": "1", "WORLD_SIZE": "2", "DRUMLINE_LAUNCHER": launcher.name})
        assert [x.name for x in LAUNCHERS if x.detect(own)] == [launcher.name]
        assert launcher().where(own).rank == 1
