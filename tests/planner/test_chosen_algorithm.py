"""The planner chooses `allreduce` by price, writes it into the plan, and says what the others cost."""

from __future__ import annotations

from dataclasses import replace

from drumline.clusters import Cluster, DeviceSpec, Link, Network, Node
from drumline.clusters.measured import CollectiveTable
from drumline.costs import cost_model
from drumline.models import zoo
from drumline.planner import price, search
from drumline.planner.gradient_algorithms import choose_algorithms, describe_algorithm, other_words
from drumline.plans import Plan
from drumline.schedules import ALL_REDUCE_WORDS

CPU = DeviceSpec("cpu", "cpu", 8e9, 1e10, {"fp32": 5e10}, 1e-6)
INSIDE, WIRE = Link(2e-5, 4e9), Link(1e-4, 1.25e8)
HOST = Cluster("one host", CPU, Node(4, INSIDE))
HOSTS = Cluster("two hosts", CPU, Node(2, INSIDE), Network(2, WIRE))
SIZES = (1e4, 1e9)


def tables(**seconds: float) -> tuple[CollectiveTable, ...]:
    """Measured times of all-reduces of 1e9 bytes over four ranks, by algorithm."""
    return tuple(CollectiveTable("all_reduce", "shm", 4, SIZES, (t * 1e-5, t), name, 1) for name, t in seconds.items())


def test_between_hosts_the_hierarchy_wins_and_is_explained() -> None:
    profile = zoo.profile("mlp:4x1024", batch_size=4096)
    plan = Plan(dp=4)
    estimate = price(profile, HOSTS, plan)
    [(best, _)] = choose_algorithms([(plan, estimate)], cost_model(profile, HOSTS, "fp32"), HOSTS)
    assert best == plan, "auto is hierarchical there"
    words = other_words(plan, HOSTS)
    assert set(words) == set(ALL_REDUCE_WORDS) - {"auto"}
    for word in words:
        step = price(profile, HOSTS, replace(plan, allreduce=word)).step_seconds
        assert step >= estimate.step_seconds, word
    text = describe_algorithm(plan, HOSTS)
    assert text.startswith("Gradients are summed by hierarchical (allreduce=auto): 21")
    assert "Gradients are summed by ring: " in describe_algorithm(replace(plan, allreduce="ring"), HOSTS)
    assert "the next are 21" in describe_algorithm(replace(plan, allreduce="ring"), HOSTS)


def test_the_answer_says_it() -> None:
    answer, _ = search(zoo.profile("mlp:2x512", batch_size=65536), HOSTS)
    assert answer.best.plan == Plan(dp=4)
    assert "Gradients are summed by hierarchical (allreduce=auto): " in answer.explanation


def test_what_was_measured_on_one_host_decides() -> None:
    profile = zoo.profile("mlp:4x1024", batch_size=8)
    plain = replace(HOST, collective=tables(native=1.0))
    slower = replace(HOST, collective=tables(native=1.0, halving=2.0))
    faster = replace(HOST, collective=tables(native=1.0, halving=0.5))
    for cluster, word in ((plain, "auto"), (slower, "auto"), (faster, "halving")):
        plan = Plan(dp=4)
        [(chosen, estimate)] = choose_algorithms(
            [(plan, price(profile, cluster, plan))], cost_model(profile, cluster, "fp32"), cluster
        )
        assert chosen == Plan(dp=4, allreduce=word)
        assert estimate == price(profile, cluster, chosen)
    assert describe_algorithm(Plan(dp=4), plain) == ""


def test_gpus_have_no_choice() -> None:
    gpus = replace(HOSTS, device=replace(CPU, kind="cuda"))
    assert other_words(Plan(dp=4), gpus) == []
    assert describe_algorithm(Plan(dp=4), gpus) == ""
    assert other_words(Plan(dp=4, zero=3), HOSTS) == ["native"]
