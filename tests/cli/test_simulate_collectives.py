"""`drumline simulate all_reduce:ring` on the links of a cluster, as a user types it; and `dl.simulate` with the same."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from command import here

import drumline as dl
from drumline.core.errors import InputError

ROOT = Path(__file__).parents[2]
ON_A100 = ("--cluster", "dgx-a100", "--bytes", "64MB")


def document(*words: object) -> dict[str, Any]:
    done = here("simulate", *words, "--json")
    assert done.returncode == 0, done.stderr
    value: dict[str, Any] = json.loads(done.stdout)
    return value


def test_a_collective_uses_the_links_that_it_would_run_on() -> None:
    ring = document("all_reduce:ring", "--ranks", 16, *ON_A100)
    levels = document("all_reduce:hierarchical", "--ranks", 16, *ON_A100)
    assert [ring["step_seconds"], ring["formula_seconds"]] == pytest.approx([900e-6, 900e-6])
    assert levels["step_seconds"] == pytest.approx(755.3e-6, rel=1e-3)
    assert (ring["nodes"], ring["topology"], ring["formula"]) == (2, "fat-tree", "round by round")
    assert {use["name"] for use in ring["links"]} == {"node out", "node in", "device out", "device in"}
    assert all(0 < use["utilisation"] <= use["busy_share"] * (1 + 1e-9) <= 1 for use in ring["links"])
    one = document("all_reduce:ring", "--ranks", 8, *ON_A100)
    assert (one["nodes"], one["topology"], one["formula"]) == (1, "", "closed form")


def test_the_screen() -> None:
    done = here("simulate", "all_reduce:hierarchical", "--ranks", 16, *ON_A100)
    assert done.stdout.splitlines()[-5:] == [
        "64MB over 16 ranks on 2 nodes of dgx-a100: 755 us",
        "round by round: 755 us",
        "node link: nvswitch, 3.00 us, 300 GB/s a device",
        "network (fat-tree): infiniband, 10.0 us, 200 GB/s a node",
        "busiest link: device in, 49% of its bandwidth (107 MiB)",
    ]
    page = (ROOT / "docs" / "network.md").read_text()
    assert all(f"    {line}\n" in page for line in done.stdout.splitlines()[-5:]), (
        "docs/network.md shows another screen"
    )


PAGE = (ROOT / "docs" / "network.md").read_text()
SHOWN = re.findall(r"^    \$ drumline (.*)\n    \.\.\.\n((?:    .*\n)+)", PAGE, re.M)


def test_every_excerpt_of_the_page_is_tested() -> None:
    assert len(SHOWN) == PAGE.count("\n    ...\n") == 4


@pytest.mark.parametrize(("words", "lines"), SHOWN, ids=[words for words, _ in SHOWN])
def test_the_page_shows_what_its_commands_print(words: str, lines: str) -> None:
    done = here(*shlex.split(words), COLUMNS="100")
    assert done.returncode == 0, done.stderr
    printed = " ".join(done.stdout.split())
    for line in lines.splitlines():
        assert " ".join(line.split()) in printed, (line, done.stdout)


def test_many_ranks() -> None:
    many = document("all_reduce:ring", "--ranks", 16384, "--cluster", "dgx-h100", "--bytes", "64MiB")
    assert many["kinds_of_ranks"] == 8 and many["nodes"] == 2048
    assert many["step_seconds"] == pytest.approx(many["formula_seconds"], rel=1e-9)
    screen = here("simulate", "all_reduce:ring", "--ranks", 16384, "--cluster", "dgx-h100", "--bytes", "64MiB").stdout
    assert "8 ranks, which stand for all 16384" in screen


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("all_reduce:direct", "--ranks", 4096), "at most 500,000 messages"),
        (("all_reduce:ring", "--ranks", 16384), "--bytes 64012288"),
        (("all_reduce:ring", "--ranks", 2_000_000), "from 1 to 1000000 ranks"),
        (("all_reduce:ring", "--ranks", 0), "from 1 to 1000000 ranks"),
        (("all_reduce:ring", "--set", "network.topology=rial"), "Did you mean 'rail'?"),
        (("all_reduce:ring", "--ranks", 16, "--set", "network.topology=torus"), 'network.shape = "4x8"'),
        (("all_reduc:ring",), "Did you mean 'all_reduce'?"),
        (("pipelin:1f1b",), "Did you mean 'pipeline'?"),
        (("all_reduce:ring", "--set", "network.topologi=rail"), "Did you mean 'network.topology'?"),
    ],
)
def test_wrong_input(words: tuple[object, ...], says: str) -> None:
    done = here("simulate", *words, *ON_A100)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr


def test_topologies_on_the_command_line() -> None:
    ring = ("all_reduce:ring", "--ranks", 16, *ON_A100)
    rail = document(*ring, "--set", "network.topology=rail")
    assert rail["step_seconds"] == pytest.approx(30 * (10e-6 + 4e6 / 25e9))
    torus = document(*ring, "--set", "network.topology=torus", "--set", "network.shape=4x8")
    assert torus["step_seconds"] == pytest.approx(30 * (10e-6 + 4e6 / 50e9))
    assert torus["links"][0]["name"].startswith("torus")


def test_the_library() -> None:
    replay = dl.simulate("all_reduce:hierarchical", cluster="dgx-a100", ranks=16, size="64MB")
    assert replay.collective is not None and replay.collective.nodes == 2
    assert replay.step_seconds == replay.collective.replay.seconds
    assert replay.collective.replay.link_use[0].name == "device in"
    with pytest.raises(InputError, match="fewer ranks"):
        dl.simulate("all_reduce:double_tree", cluster="dgx-a100", ranks=900_000)
    assert dl.simulate("barrier:central", cluster="dgx-a100", ranks=1).step_seconds == 0
    with pytest.raises(InputError, match=r"--bytes -5(.|\n)*zero bytes or more"):
        dl.simulate("all_reduce:ring", cluster="dgx-a100", size=-5)
    assert dl.simulate("all_reduce:ring", cluster="dgx-a100", size="4e6").title.startswith("4000000 bytes over 4 ranks")
