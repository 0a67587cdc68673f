"""Collectives on real links: what people write about links, the model by hand, fits, and the published measurements."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from drumline.clusters import catalogue, load
from drumline.clusters.link_types import LinkType, LinkTypes, link_types, load_link_types
from drumline.core.errors import ClusterError, InputError
from drumline.costs.networks import Errors, Fabric, fabric_seconds, validate_collectives
from drumline.costs.networks.fit import descend, fit
from drumline.costs.networks.mesh import CUBE, ring_share, rings
from drumline.costs.networks.rows import NEEDED, Row, is_collectives, read_rows
from drumline.costs.networks.words import Across, Inside, across_link, inside_link, stated

PUBLISHED = Path(__file__).parents[3] / "shared" / "data" / "published_collectives.csv"
SIMPLE = LinkTypes(
    {
        "nvswitch": LinkType("node", 10.0, 1.0, 0.5, 0.0),
        "nvlink": LinkType("node", 0.0, 0.0, 1.0, 0.0),
        "efa": LinkType("network", 100.0, 5.0, 0.5, 0.0, 1000.0, 1.0),
        "infiniband": LinkType("network", 100.0, 5.0, 1.0),
    }
)


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("NVLink3+NVSwitch 600 GB/s bidir", Inside(300e9, "nvswitch")),
        ("NVLink4+NVSwitch 900 GB/s bidir", Inside(450e9, "nvswitch", True)),
        ("NVLink2 (V100) 300 GB/s bidir", Inside(150e9, "nvlink")),
        ("NVLink4 + NVSwitch", Inside(450e9, "nvswitch", True)),
        ("NVLink 200 GB/s one-way", Inside(200e9, "nvlink")),
        ("PCIe4 x16", Inside(32e9, "pcie")),
        ("PCIe Gen5", Inside(64e9, "pcie")),
        ("xGMI 896 GB/s", Inside(448e9, "xgmi")),
        ("NVLink3 600 GB/s", Inside(300e9, "nvswitch")),
    ],
)
def test_links_inside_a_node(text: str, link: Inside) -> None:
    assert inside_link(text, 8) == link


def test_four_devices_need_no_switch() -> None:
    assert inside_link("NVLink3 600 GB/s", 4) == Inside(300e9, "nvlink")
    assert inside_link("NVLink4+NVSwitch 900 GB/s", 4) == Inside(450e9, "nvswitch", True)


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("8x 200 Gb/s HDR IB per node", Across(200e9, "infiniband", 8)),
        ("4x100 Gb/s EFA per node", Across(50e9, "efa", 4)),
        ("8x400G NDR", Across(400e9, "infiniband", 8)),
        ("40 GbE TCP", Across(5e9, "tcp")),
        ("100 Gb/s IB", Across(12.5e9, "infiniband")),
        ("3200 Gb/s EFA per node", Across(400e9, "efa")),
        ("8x400 Gb/s RoCE", Across(400e9, "ethernet", 8)),
        ("4x 200 Gbps Slingshot", Across(100e9, "slingshot", 4)),
    ],
)
def test_links_between_nodes(text: str, link: Across) -> None:
    assert across_link(text) == link


def test_links_that_are_not_stated_or_not_known() -> None:
    assert not any(map(stated, ("", " ", "not stated", "unknown", "TCP (host pair not stated)", "-")))
    assert all(map(stated, ("40 GbE TCP", "NVLink2 (V100) 300 GB/s bidir")))
    for text in ("string and cups", "NVLink"):
        with pytest.raises(ValueError, match=text):
            inside_link(text, 8)
    with pytest.raises(ValueError, match="pigeons"):
        across_link("pigeons")


def test_rings_in_the_cube() -> None:
    """As many as measured bandwidths show: multiples of one link."""
    assert [rings(p) for p in range(2, 9)] == [1, 2, 4, 2, 2, 4, 6]
    assert all(sum(n for pair, n in CUBE.items() if d in pair) == 6 for d in range(8))
    assert ring_share(8, 8) == 1
    assert ring_share(8, 2) == pytest.approx(1 / 6)
    assert ring_share(4, 4) == 1
    assert ring_share(4, 3) == pytest.approx(2 / 3)
    assert ring_share(8, 1) == 1


def test_the_model_by_hand() -> None:
    switch = Fabric(8, 100.0, "nvswitch")
    assert fabric_seconds("all_reduce", 8, 1000, switch, SIMPLE) == 10 + 14 + 1000 * 1.75 / 50
    assert fabric_seconds("all_gather", 8, 1000, switch, SIMPLE) == 10 + 7 + 1000 * 0.875 / 50
    assert fabric_seconds("all_reduce", 1, 1000, switch, SIMPLE) == 0
    reduces = Fabric(8, 100.0, "nvswitch", True)
    assert fabric_seconds("all_reduce", 8, 1000, reduces, SIMPLE) == 10 + 2 + 1000 * 1.125 / 50
    assert fabric_seconds("reduce_scatter", 8, 8e3, reduces, SIMPLE) == 10 + 7 + 8e3 * 0.875 / 50
    cube = Fabric(8, 600.0, "nvlink")
    assert fabric_seconds("all_reduce", 2, 1000, cube, SIMPLE) == pytest.approx(1000 / 100)


def test_between_nodes_by_hand() -> None:
    rails = Fabric(8, 100.0, "nvswitch", False, 40.0, "infiniband", 8)
    assert fabric_seconds("all_reduce", 32, 1000, rails, SIMPLE) == 100 + 2 * 5 + 1000 * (62 / 32) / 40
    narrow = Fabric(8, 100.0, "nvswitch", False, 80.0, "infiniband", 8)
    assert fabric_seconds("all_reduce", 32, 1000, narrow, SIMPLE) == 110 + 1000 * (62 / 32) / 50  # the node's own link
    shared = Fabric(8, 1000.0, "nvswitch", False, 40.0, "efa", 4)
    assert fabric_seconds("all_reduce", 16, 1000, shared, SIMPLE) == 105 + 1000 * 1.875 / 20  # a ring, while short
    assert fabric_seconds("all_reduce", 16, 1e5, shared, SIMPLE) == 1005 + 1e5 * 1 / 40  # then the tree
    assert fabric_seconds("all_gather", 16, 1e5, shared, SIMPLE) == 105 + 1e5 * (15 / 16) / 20
    adds = Fabric(8, 100.0, "nvswitch", True, 30.0, "efa", 8)  # a switch that adds up leads to a tree of nodes
    assert fabric_seconds("all_reduce", 16, 1e5, adds, SIMPLE) == 1005 + 1e5 * 1 / 30
    slow = Fabric(8, 30.0, "nvswitch", True, 30.0, "efa", 8)
    assert fabric_seconds("all_reduce", 16, 1e6, slow, SIMPLE) == 1005 + 1e6 * 1.125 / 15  # by the node's own link


def test_wrong_calls() -> None:
    with pytest.raises(InputError, match="unknown collective 'all_reduc'"):
        fabric_seconds("all_reduc", 8, 1, Fabric(8))
    with pytest.raises(ClusterError, match=r"no wire 'nvswich'(.|\n)*Did you mean 'nvswitch'"):
        fabric_seconds("all_reduce", 8, 1, Fabric(8, 1.0, "nvswich"))
    with pytest.raises(InputError, match="over 0 ranks"):
        fabric_seconds("all_reduce", 0, 1, Fabric(8))


@pytest.mark.parametrize("name", catalogue())
def test_every_cluster_says_what_its_links_are_made_of(name: str) -> None:
    cluster = load(name)
    fabric = Fabric.of(cluster)
    assert link_types().get(fabric.inside_wire).level == "node"
    if cluster.network is not None:
        assert link_types().get(fabric.across_wire).level == "network"
        assert cluster.network.ports >= 2
        assert cluster.network.port_bandwidth * cluster.network.ports == pytest.approx(cluster.network.link.bandwidth)
        assert fabric_seconds("all_reduce", 2 * fabric.devices, 1e8, fabric) > 0


def test_a_cluster_that_does_not_say_it() -> None:
    one = load("dgx-a100")
    bare = dataclasses.replace(
        one, node=dataclasses.replace(one.node, link=dataclasses.replace(one.node.link, type=""))
    )
    with pytest.raises(InputError, match=r"does not say what its node.link is made of(.|\n)*node.link.type"):
        Fabric.of(bare)


def made(known: LinkTypes) -> list[Row]:
    """Rows as the model itself would measure them."""
    rows = []
    for p in (2, 4, 8):
        fabric = Fabric(8, 300e9, "nvswitch")
        for m in (1e6, 4e6, 16e6, 64e6, 256e6, 1e9):
            rows.append(Row(0, "here", "all_reduce", p, m, fabric_seconds("all_reduce", p, m, fabric, known), fabric))
    return rows


def test_a_fit_finds_what_made_the_rows() -> None:
    true = LinkTypes({**link_types().link_type, "nvswitch": LinkType("node", 30e-6, 3e-6, 0.7, 1.2e-12)})
    rows = made(true)
    found = fit(rows)
    errors = [abs(fabric_seconds("all_reduce", r.ranks, r.bytes, r.fabric, found) / r.seconds - 1) for r in rows]
    assert sum(errors) / len(errors) < 0.02
    assert found.link_type["efa"].origin == "estimate"
    assert found.link_type["nvswitch"].origin.startswith("fitted on 18 published")
    start = [abs(fabric_seconds("all_reduce", r.ranks, r.bytes, r.fabric, fit([])) / r.seconds - 1) for r in rows]
    assert sum(start) > 5 * sum(errors)


def test_descend() -> None:
    found = descend(lambda x: abs(x["a"] - 3) + abs(x["b"] - 0.5), {"a": 1.0, "b": 1.0}, upper={"b": 1.0})
    assert found == pytest.approx({"a": 3, "b": 0.5}, rel=1e-3)


HEAD = ",".join(NEEDED)


def read(folder: Path, *lines: str, head: str = HEAD) -> Path:
    path = folder / "mine.csv"
    path.write_text("\n".join([head, *lines]) + "\n")
    return path


def test_rows_are_read_and_others_are_listed_with_the_reason(tmp_path: Path) -> None:
    path = read(
        tmp_path,
        "a,all_reduce,8,8,NVLink3+NVSwitch 600 GB/s bidir,,1000000,100,",
        "a,all_reduce,16,8,NVLink3+NVSwitch 600 GB/s bidir,not stated,1000000,100,",
        "a,all_gather,8,8,NVLink3+NVSwitch 600 GB/s bidir,,1000000,,100",
        "a,broadcast,8,8,NVLink3+NVSwitch 600 GB/s bidir,,1000000,100,",
        "a,all_reduce,,8,NVLink3+NVSwitch 600 GB/s bidir,,1000000,100,",
        "a,all_reduce,8,8,strings,,1000000,100,",
        "a,all_reduce,8,8,NVLink3+NVSwitch 600 GB/s bidir,,1000000,,",
        "a,all_reduce,8,8,,,1000000,100,",
        "a,all_reduce,1,8,,,1000000,100,",
    )
    rows, skipped = read_rows(path)
    assert [(row.line, row.collective) for row in rows] == [(2, "all_reduce"), (4, "all_gather")]
    assert rows[0].seconds == pytest.approx(100e-6)
    assert rows[1].seconds == pytest.approx(1e6 * 0.875 / 100e9)
    reasons = {one.line: one.reason for one in skipped}
    assert reasons[3] == "inter_link is not stated"
    assert "'broadcast' is not one of" in reasons[5]
    assert reasons[6] == "n_gpus is not stated"
    assert "strings" in reasons[7]
    assert reasons[8] == "neither time_us nor busbw_GBps is stated"
    assert reasons[9] == "intra_link is not stated"
    assert "one rank" in reasons[10]
    assert is_collectives(list(NEEDED)) and not is_collectives(["model"])


def test_bad_files_are_named_by_file_line_and_column(tmp_path: Path) -> None:
    with pytest.raises(InputError) as e:
        read_rows(read(tmp_path, head=HEAD.replace("size_bytes", "size_byte")))
    assert "column 'size_bytes' is missing" in str(e.value)
    assert "mine.csv, line 1" in e.value.where and "size_byte" in e.value.fix
    good = "a,all_reduce,8,8,NVLink3+NVSwitch 600 GB/s bidir,,1000000,100,"
    for bad, column in ((good.replace("1000000", "1 MB"), "size_bytes"), (good.replace(",100,", ",-3,"), "time_us")):
        with pytest.raises(InputError) as e:
            read_rows(read(tmp_path, good, bad))
        assert e.value.where == f"{tmp_path / 'mine.csv'}, line 3: {column}"
    with pytest.raises(InputError, match=r"another number of values(.|\n)*line 2"):
        read_rows(read(tmp_path, good + ",7,7"))


def test_errors() -> None:
    found = Errors.of([0.1, -0.3, 0.2, 0.0])
    assert (found.rows, found.mean, found.median, found.worst) == (4, pytest.approx(0.15), pytest.approx(0.15), 0.3)
    assert found.bias == pytest.approx(0)
    assert Errors.of([]).rows == 0
    assert str(found).startswith("4 rows: mean 15.0%")


def test_no_constant_names_where_it_was_measured() -> None:
    assert load_link_types() == link_types()
    for name, wire in link_types().link_type.items():
        assert wire.origin == "estimate" or wire.origin.startswith("fitted on "), name
        assert not any(
            word in (name + wire.origin).lower() for word in ("echo", "vtrain", "aws", "azure", "ultrascale", "gloo")
        )


@pytest.mark.skipif(not PUBLISHED.exists(), reason="the published measurements are not here")
def test_published_collectives() -> None:
    found = validate_collectives(PUBLISHED, leave_one_out=False)
    inside, across = found.levels["inside"], found.levels["across"]
    assert inside.rows >= 180 and inside.mean <= 0.07
    assert across.rows >= 60 and across.mean <= 0.07
    assert abs(inside.bias) < 0.03 and abs(across.bias) < 0.03
    assert len(found.rows) + len(found.skipped) == len(PUBLISHED.read_text().splitlines()) - 1
    assert {one.reason for one in found.skipped} == {
        "inter_link is not stated",
        "n_gpus is not stated",
        "gpus_per_node is not stated",
    }
    assert found.left_out == {}
    assert any(line.startswith("inside") for line in found.lines())
    assert max(map(len, found.lines())) <= 60


@pytest.mark.slow
@pytest.mark.skipif(not PUBLISHED.exists(), reason="the published measurements are not here")
def test_published_collectives_without_their_own_source() -> None:
    found = validate_collectives(PUBLISHED)
    assert found.left_out["inside"].mean <= 0.10
    assert found.left_out["across"].mean <= 0.12


@pytest.mark.slow
@pytest.mark.skipif(not PUBLISHED.exists(), reason="the published measurements are not here")
def test_what_ships_is_what_the_command_writes() -> None:
    rows, _ = read_rows(PUBLISHED)
    assert fit(rows) == link_types()
