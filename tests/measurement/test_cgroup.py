"""CPU quotas, read from the files of control groups of both versions, and the ranks that share one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from world import World

from drumline.measurement import cgroup, links
from drumline.measurement.cgroup import CpuQuota


def _made(tmp_path: Path, listing: str, files: dict[str, str]) -> CpuQuota | None:
    for name, text in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "cgroup").write_text(listing)
    return cgroup.cpu_quota(tmp_path / "cgroup", tmp_path / "root")


@pytest.mark.parametrize(
    ("listing", "files", "wanted"),
    [
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, (0.5, 0.1, "")),
        # the tightest of the group and its parents
        ("0::/pod/rank\n", {"pod/cpu.max": "150000 100000\n", "pod/rank/cpu.max": "max 100000\n"}, (1.5, 0.1, "pod")),
        ("0::/pod/a\n", {"pod/cpu.max": "40000 20000\n", "pod/a/cpu.max": "30000 20000\n"}, (1.5, 0.02, "pod/a")),
        # version 1: other controllers have their own trees
        (
            "4:memory:/x\n3:cpu,cpuacct:/x\n",
            {"cpu,cpuacct/x/cpu.cfs_quota_us": "2250\n", "cpu,cpuacct/x/cpu.cfs_period_us": "5000\n"},
            (0.45, 0.005, "cpu,cpuacct/x"),
        ),
        ("3:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        # a container that sees the path of its host, but only its own group
        (
            "3:cpu,cpuacct:/docker/12\n",
            {"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"},
            (2.0, 0.1, "cpu"),
        ),
        ("3:memory:/\n", {}, None),
    ],
)
def test_quotas(tmp_path: Path, listing: str, files: dict[str, str], wanted: tuple[float, float, str] | None) -> None:
    quota = _made(tmp_path, listing, files)
    if wanted is None:
        assert quota is None
        return
    assert quota is not None
    assert (quota.cores, quota.period) == pytest.approx(wanted[:2])
    assert Path(quota.group) == tmp_path / "root" / wanted[2]


def test_no_control_groups(tmp_path: Path) -> None:
    assert cgroup.cpu_quota(tmp_path / "nothing", tmp_path) is None


def test_cpu_time_counts_at_the_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single pause changes little: it is in the CPU time of the others."""
    monkeypatch.setattr(cgroup, "cpu_quota", lambda: CpuQuota(0.5, 0.1, "here"))
    times, cpu_times = [1.0, 1.0, 1.0, 5.0], [0.9, 0.9, 0.9, 1.1]
    for still, wanted in ((False, 1.0), (True, 1.9)):
        monkeypatch.setattr(cgroup, "is_throttled", lambda still=still: still)
        assert cgroup.typical_seconds(times, cpu_times) == pytest.approx(wanted)
    assert cgroup.typical_seconds([4.0, 4.0], [0.1, 0.1]) == 4.0  # most time on a slow link is waiting


def oversubscriptions(groups: list[str]) -> float:
    """On a rank: threads per core, if it is in one of these groups of half a core."""
    import torch.distributed as dist

    quota = CpuQuota(0.5, 0.1, groups[dist.get_rank()])
    with mock.patch.object(links, "cpu_quota", lambda: quota):
        return links.find_host_groups().oversubscription


def test_ranks_of_one_group_share_its_quota(world: Callable[[int], World]) -> None:
    assert world(3).run(oversubscriptions, ["a", "b", "b"]) == [2.0, 4.0, 4.0]
