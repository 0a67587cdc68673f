"""Every model of the zoo, on any cluster of the catalogue, in any number and with any batch: answered, or refused."""

from __future__ import annotations

import random

import pytest
from typer.testing import CliRunner

from drumline.cli import app
from drumline.clusters.catalogue import catalogue, load
from drumline.core.errors import DrumlineError
from drumline.models import zoo

DEVICES = (8, 64, 512, 4096)
BATCHES = (1, 7, 64, 1000, 4096)
EXIT_CODES = {0, 3}
"""A plan, or none fits."""
CLUSTERS = [name for name in catalogue() if load(name).network is not None]
"""Those that may have more nodes than one."""


def question(draw: random.Random) -> tuple[str, ...]:
    cluster, model = draw.choice(CLUSTERS), draw.choice(zoo.names())
    return model, "--cluster", cluster, "--devices", str(draw.choice(DEVICES)), "--batch", str(draw.choice(BATCHES))


def exit_code(words: tuple[str, ...]) -> int:
    """Of `drumline plan`; anything but an error of ours is a traceback."""
    done = CliRunner().invoke(app, ["plan", *words, "--top", "1"])
    if isinstance(done.exception, DrumlineError):
        return done.exception.exit_code
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code


@pytest.mark.parametrize("seed", range(6))
def test_a_random_question_is_answered(seed: int) -> None:
    words = question(random.Random(seed))
    here, devices = load(words[2]).node.devices, int(words[4])
    fills = devices <= here or devices % here == 0
    assert exit_code(words) in (EXIT_CODES if fills else {2}), words


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1150))
def test_many_random_questions_are_answered(seed: int) -> None:
    test_a_random_question_is_answered(seed)


def test_a_single_node_has_no_more_devices() -> None:
    assert exit_code(("llama:8b", "--cluster", "rtx4090", "--devices", "64")) == 2


def test_a_plan_that_is_adapted_to_other_batches_is_adapted_once() -> None:
    """llama:70b on two nodes, whose fastest plan changes with the batch, ended in an IndexError."""
    assert exit_code(("llama:70b", "--cluster", "dgx-h100", "--devices", "16", "--batch", "64")) == 0


def test_plans_with_experts_are_adapted_to_fewer_samples() -> None:
    """With fewer samples than ep there are too few replicas: gpt-oss:20b ended in an error of the plan."""
    words = ("gpt-oss:20b", "--cluster", "dgx-h100", "--devices", "16", "--batch", "16")
    assert exit_code(words) in EXIT_CODES
