"""Two hosts whose network loses frames, is cut for ten seconds, or is cut for good without a word (F14)."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest
from lossy_network import Wire, lossy_hosts
from netns import Hosts, Unable

RANK = str(Path(__file__).with_name("lossy_network_rank.py"))
PATIENT = {"DRUMLINE_HANG_TIMEOUT": "100"}


def wait_for(marker: Path, ranks: list[subprocess.Popen[str]]) -> None:
    end = time.monotonic() + 100
    while not marker.exists():
        assert time.monotonic() < end and all(rank.poll() is None for rank in ranks)
        time.sleep(0.01)


def outcomes(ranks: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each rank."""
    try:
        texts = [rank.communicate(timeout=150) for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()
    return [(rank.returncode, out.strip(), err[-3000:]) for rank, (out, err) in zip(ranks, texts, strict=True)]


def trained(hosts: Hosts, wire: Wire, folder: Path, name: str, *, cut: float = 0.0) -> set[str]:
    """The digests of the weights of both ranks, after a training whose network is cut for some seconds."""
    marker = folder / name
    ranks = hosts.start(RANK, str(marker), per_host=1, **PATIENT)
    if cut:
        wait_for(marker, ranks)
        before, wire.loss = wire.lost, 1.0
        time.sleep(cut)
        wire.loss = 0.0
        assert wire.lost > before
    ended = outcomes(ranks)
    assert [code for code, _, _ in ended] == [0, 0], ended
    return {out for _, out, _ in ended}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_f14_lost_frames_and_a_partition_that_heals_change_nothing(tmp_path: Path) -> None:
    """Longer than the network is cut, no rank may be taken for one that hangs: DRUMLINE_HANG_TIMEOUT says so."""
    try:
        with lossy_hosts() as (hosts, wire):
            undisturbed = trained(hosts, wire, tmp_path, "undisturbed")
            assert len(undisturbed) == 1 and wire.lost == 0 < wire.carried
            wire.loss = 0.01
            assert trained(hosts, wire, tmp_path, "one percent lost") == undisturbed
            assert wire.lost > 20
            wire.loss = 0.0
            assert trained(hosts, wire, tmp_path, "cut", cut=10.0) == undisturbed
    except Unable as e:
        pytest.skip(str(e))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_f14_connections_that_stay_half_open_end_the_ranks_on_both_sides(tmp_path: Path) -> None:
    """No host is told that the other is gone: its connections stay, and nothing comes over them."""
    try:
        with lossy_hosts() as (hosts, wire):
            marker = tmp_path / "marker"
            ranks = hosts.start(RANK, str(marker), per_host=1, DRUMLINE_HANG_TIMEOUT="12")
            wait_for(marker, ranks)
            wire.loss = 1.0
            ended = outcomes(ranks)
    except Unable as e:
        pytest.skip(str(e))
    assert [code for code, _, _ in ended] == [5, 5], ended
    assert "rank 1 is silent" in ended[0][2], ended
    assert "the store does not answer" in ended[1][2], ended
