"""`--slow`, `--jitter`, `--seed` and `--allow-stale` as a user types them; and `dl.plan`, `dl.simulate` with the same."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from command import here

import drumline as dl
from drumline.clusters import Cluster, DeviceSpec, Link, Network, Node, StepTimeDistribution
from drumline.loop.inputs import with_step_times
from drumline.models import zoo

CPU = Cluster("cpu", DeviceSpec("core", "cpu", 8e9, 1e10, {"fp32": 5e10}, 5e-6), Node(4, Link(2e-5, 3e9)))


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("machine") / "cpu.toml"
    CPU.save(path)
    return path


def asked(*arguments: object) -> dict[str, Any]:
    done = here(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_plan_with_a_straggler(machine: Path) -> None:
    question = ("plan", "resnet50", "--batch", 64, "--cluster", machine, "--slow", "3:4", "--top", 3)
    document = asked(*question, "--jitter", 0.1, "--allow-stale")
    assert document["plans"][0]["plan"] == "dp=4,sync=async" and document["staleness"] == 3
    stale = document["stale"]
    assert stale["chosen"] and "updates old" in stale["caveat"] and stale["caveat"] in document["explanation"]
    assert stale["step_seconds"] < 0.5 * stale["exact_seconds"]
    assert document["bounds"].keys() <= {"products", "memory", "launches", "communication", "optimizer", "waiting"}
    plain = asked(*question)
    assert "sync" not in plain["plans"][0]["plan"] and "stale" not in plain and plain["parts"]["waiting"] > 0
    text = here(*question, "--allow-stale").stdout
    assert "Its replicas do not wait for each other" in text and "lower the learning rate" in text.replace("\n", " ")


def test_plan_prices_a_given_plan(machine: Path) -> None:
    question = ("plan", "resnet50", "--batch", 64, "--cluster", machine, "--top", 1, "--plan", "dp=4,sync=async")
    given = asked(*question, "--slow", "3:4", "--formula", "--fit")["given"]
    assert given["plan"] == "dp=4,sync=async" and given["staleness"] == 3 and "updates old" in given["notes"][0]
    text = here(*question, "--formula").stdout
    assert "Your plan dp=4,sync=async" in text and "note: approximate" in text
    assert "communication = (ask + pull + push) / 4 workers" in " ".join(text.split())


def test_simulate_with_a_straggler(machine: Path, tmp_path: Path) -> None:
    question = ("simulate", "resnet50", "--cluster", machine, "--slow", "3:4", "--jitter", 0.2, "--seed", 3)
    document = asked(*question, "--plan", "dp=4,sync=async", "--picture", tmp_path / "steps.svg")
    workers = document["workers"]
    assert sum(workers["staleness"].values()) == workers["updates"] and max(workers["waiting"]) < 0.05
    assert document["step_seconds"] == pytest.approx(document["planned_seconds"], rel=0.05)
    assert (tmp_path / "steps.svg").read_text().startswith("<svg")
    assert document.pop("picture") == str(tmp_path / "steps.svg")
    again = asked(*question, "--plan", "dp=4,sync=async")
    assert {**again, "seconds": 0} == {**document, "seconds": 0}
    together = here(*question, "--plan", "dp=4").stdout
    assert "mostly for worker 3" in together and "waiting" in together
    stale = here(*question, "--plan", "dp=4,sync=stale:2").stdout
    assert "staleness of the gradients" in stale and "the servers are busy" in stale and "note: approximate" in stale


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--slow", "3"), "RANK:FACTOR"),
        (("--slow", "9:4"), "there are 4 ranks"),
        (("--slow", "1:2", "--slow", "1:3"), "one factor for each slow rank"),
        (("--jitter", "-1"), "from 0 to 10"),
        (("--emit", "deepspeed", "--allow-stale"), "nothing else"),
    ],
)
def test_bad_options_are_refused(machine: Path, options: tuple[str, ...], words: str) -> None:
    done = here("plan", "resnet50", "--cluster", machine, *options)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr


def test_the_same_from_python() -> None:
    profile = zoo.profile("resnet50", batch_size=64)
    answer = dl.plan(profile, CPU, slow={3: 4.0}, allow_stale=True)
    assert answer.best.plan.sync == "async" and answer.stale is not None and answer.stale.chosen
    replay = dl.simulate(profile, "dp=4,sync=stale:2", CPU, slow=["3:4"], jitter=0.1, seed=1)
    assert replay.workers is not None and replay.workers.slowest == 3
    assert replay.step_seconds == replay.workers.step_seconds == pytest.approx(replay.planned_seconds, rel=0.05)
    assert dl.simulate(profile, "dp=4", CPU).workers is None


def test_what_is_not_given_stays_as_in_the_cluster_file() -> None:
    own = dataclasses.replace(CPU, step_times=StepTimeDistribution.of(["1:2"], 0.3, 5))
    assert with_step_times(own) == own
    assert with_step_times(own, jitter=0.1).step_times == StepTimeDistribution.of(["1:2"], 0.1, 5)
    assert with_step_times(own, {2: 3.5}, seed=1).step_times == StepTimeDistribution.of(["2:3.5"], 0.3, 1)


@pytest.mark.parametrize("verb", ["plan", "simulate"])
@pytest.mark.parametrize(("plan", "on"), [("dp=4,sync=hogwild", "GPUs"), ("dp=8,micro=2,sync=hogwild", "2 hosts")])
def test_hogwild_is_refused_where_it_does_not_run(tmp_path: Path, verb: str, plan: str, on: str) -> None:
    path = tmp_path / "two.toml"
    dataclasses.replace(CPU, network=Network(2, Link(1e-4, 1e9))).save(path)
    refused = here(
        verb, "resnet50", "--batch", 64, "--cluster", path if on == "2 hosts" else "dgx-h100", "--plan", plan
    )
    text = " ".join(refused.stderr.split())
    assert refused.returncode == 2 and f"the plan {plan} on {on}" in text
    assert f"the nearest plan that runs: {plan.replace('hogwild', 'async')}" in text
