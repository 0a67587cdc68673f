"""Collectives on real links: parsing link descriptions, the model by hand, fits, and published measurements."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from drumline.clusters import catalogue, load
from drumline.clusters.link_types import LinkType, LinkTypes, link_types, load_link_types
from drumline.core.errors import ClusterError, InputError
from drumline.costs.networks import ErrorSummary, Interconnect, interconnect_seconds, validate_collectives
from drumline.costs.networks.fit import fit_link_types, minimise
from drumline.costs.networks.link_text import NetworkLink, NodeLink, is_stated, parse_network_link, parse_node_link
from drumline.costs.networks.ring_share import DGX1_LINKS, ring_share, rings
from drumline.costs.networks.rows import REQUIRED_COLUMNS, CollectiveRow, is_collectives, read_collectives

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
        ("NVLink3+NVSwitch 600 GB/s bidir", NodeLink(300e9, "nvswitch")),
        ("NVLink4+NVSwitch 900 GB/s bidir", NodeLink(450e9, "nvswitch", True)),
        ("NVLink2 (V100) 300 GB/s bidir", NodeLink(150e9, "nvlink")),
        ("NVLink4 + NVSwitch", NodeLink(450e9, "nvswitch", True)),
        ("NVLink 200 GB/s one-way", NodeLink(200e9, "nvlink")),
        ("PCIe4 x16", NodeLink(32e9, "pcie")),
        ("PCIe Gen5", NodeLink(64e9, "pcie")),
        ("xGMI 896 GB/s", NodeLink(448e9, "xgmi")),
        ("NVLink3 600 GB/s", NodeLink(300e9, "nvswitch")),
    ],
)
def test_links_inside_a_node(text: str, link: NodeLink) -> None:
    assert parse_node_link(text, 8) == link


def test_four_devices_have_no_switch() -> None:
    assert parse_node_link("NVLink3 600 GB/s", 4) == NodeLink(300e9, "nvlink")
    assert parse_node_link("NVLink4+NVSwitch 900 GB/s", 4) == NodeLink(450e9, "nvswitch", True)


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("8x 200 Gb/s HDR IB per node", NetworkLink(200e9, "infiniband", 8)),
        ("4x100 Gb/s EFA per node", NetworkLink(50e9, "efa", 4)),
        ("8x400G NDR", NetworkLink(400e9, "infiniband", 8)),
        ("40 GbE TCP", NetworkLink(5e9, "tcp")),
        ("100 Gb/s IB", NetworkLink(12.5e9, "infiniband")),
        ("3200 Gb/s EFA per node", NetworkLink(400e9, "efav2")),
        ("32x100 Gb/s EFA per node", NetworkLink(400e9, "efav2", 32)),
        ("100 Gb/s EFAv2", NetworkLink(12.5e9, "efav2")),
        ("8x400 Gb/s RoCE", NetworkLink(400e9, "ethernet", 8)),
        ("4x 200 Gbps Slingshot", NetworkLink(100e9, "slingshot", 4)),
    ],
)
def test_links_between_nodes(text: str, link: NetworkLink) -> None:
    assert parse_network_link(text) == link


def test_links_that_are_unstated_or_unknown() -> None:
    assert not any(map(is_stated, ("", " ", "not stated", "unknown", "TCP (host pair not stated)", "-")))
    assert all(map(is_stated, ("40 GbE TCP", "NVLink2 (V100) 300 GB/s bidir")))
    for text in ("string and cups", "NVLink"):
        with pytest.raises(ValueError, match=text):
            parse_node_link(text, 8)
    with pytest.raises(ValueError, match="pigeons"):
        parse_network_link("pigeons")


def test_rings_in_the_cube_mesh() -> None:
    """Measured bandwidths are these multiples of one link."""
    assert [rings(p) for p in range(2, 9)] == [1, 2, 4, 2, 2, 4, 6]
    assert all(sum(n for pair, n in DGX1_LINKS.items() if d in pair) == 6 for d in range(8))
    assert ring_share(8, 8) == 1
    assert ring_share(8, 2) == pytest.approx(1 / 6)
    assert ring_share(4, 4) == 1
    assert ring_share(4, 3) == pytest.approx(2 / 3)
    assert ring_share(8, 1) == 1


def test_inside_a_node_by_hand() -> None:
    switch = Interconnect(8, 100.0, "nvswitch")
    assert interconnect_seconds("all_reduce", 8, 1000, switch, SIMPLE) == 10 + 14 + 1000 * 1.75 / 50
    assert interconnect_seconds("all_gather", 8, 1000, switch, SIMPLE) == 10 + 7 + 1000 * 0.875 / 50
    assert interconnect_seconds("all_reduce", 1, 1000, switch, SIMPLE) == 0
    reduces = Interconnect(8, 100.0, "nvswitch", True)
    assert interconnect_seconds("all_reduce", 8, 1000, reduces, SIMPLE) == 10 + 2 + 1000 * 1.125 / 50
    assert interconnect_seconds("reduce_scatter", 8, 8e3, reduces, SIMPLE) == 10 + 7 + 8e3 * 0.875 / 50
    cube = Interconnect(8, 600.0, "nvlink")
    assert interconnect_seconds("all_reduce", 2, 1000, cube, SIMPLE) == pytest.approx(1000 / 100)


def test_between_nodes_by_hand() -> None:
    rails = Interconnect(8, 100.0, "nvswitch", False, 40.0, "infiniband", 8)
    assert interconnect_seconds("all_reduce", 32, 1000, rails, SIMPLE) == 100 + 2 * 5 + 1000 * (62 / 32) / 40
    narrow = Interconnect(8, 100.0, "nvswitch", False, 80.0, "infiniband", 8)
    assert (
        interconnect_seconds("all_reduce", 32, 1000, narrow, SIMPLE) == 110 + 1000 * (62 / 32) / 50
    )  # the node's own link
    shared = Interconnect(8, 1000.0, "nvswitch", False, 40.0, "efa", 4)
    assert (
        interconnect_seconds("all_reduce", 16, 1000, shared, SIMPLE) == 105 + 1000 * 1.875 / 20
    )  # a ring, while short
    assert interconnect_seconds("all_reduce", 16, 1e5, shared, SIMPLE) == 1005 + 1e5 * 1 / 40  # then the tree
    assert interconnect_seconds("all_gather", 16, 1e5, shared, SIMPLE) == 105 + 1e5 * (15 / 16) / 20
    adds = Interconnect(8, 100.0, "nvswitch", True, 30.0, "efa", 8)  # in-switch reduction leads to a tree of nodes
    assert interconnect_seconds("all_reduce", 16, 1e5, adds, SIMPLE) == 1005 + 1e5 * 1 / 30
    slow = Interconnect(8, 30.0, "nvswitch", True, 30.0, "efa", 8)
    assert (
        interconnect_seconds("all_reduce", 16, 1e6, slow, SIMPLE) == 1005 + 1e6 * 1.125 / 15
    )  # by the node's own link


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(InputError, match="unknown collective 'all_reduc'"):
        interconnect_seconds("all_reduc", 8, 1, Interconnect(8))
    with pytest.raises(ClusterError, match=r"no link type 'nvswich'(.|\n)*Did you mean 'nvswitch'"):
        interconnect_seconds("all_reduce", 8, 1, Interconnect(8, 1.0, "nvswich"))
    with pytest.raises(InputError, match="over 0 ranks"):
        interconnect_seconds("all_reduce", 0, 1, Interconnect(8))


@pytest.mark.parametrize("name", catalogue())
def test_every_cluster_gives_the_types_of_its_links(name: str) -> None:
    cluster = load(name)
    interconnect = Interconnect.of(cluster)
    assert link_types().get(interconnect.node_link_type).level == "node"
    if cluster.network is not None:
        assert link_types().get(interconnect.network_link_type).level == "network"
        assert cluster.network.ports >= (
            1 if (cluster.node.devices <= 8 and "ethernet" in name) or name in ("a10", "l4") else 2
        )
        assert cluster.network.port_bandwidth * cluster.network.ports == pytest.approx(cluster.network.link.bandwidth)
        assert interconnect_seconds("all_reduce", 2 * interconnect.devices_per_node, 1e8, interconnect) > 0


def test_a_cluster_without_link_types_is_refused() -> None:
    one = load("dgx-a100")
    bare = dataclasses.replace(
        one, node=dataclasses.replace(one.node, link=dataclasses.replace(one.node.link, type=""))
    )
    with pytest.raises(InputError, match=r"does not give the type of its node.link(.|\n)*node.link.type"):
        Interconnect.of(bare)


def simulated_rows(known: LinkTypes) -> list[CollectiveRow]:
    """Rows as the model itself predicts them."""
    rows = []
    for p in (2, 4, 8):
        interconnect = Interconnect(8, 300e9, "nvswitch")
        for m in (1e6, 4e6, 16e6, 64e6, 256e6, 1e9):
            rows.append(
                CollectiveRow(
                    0,
                    "here",
                    "all_reduce",
                    p,
                    m,
                    interconnect_seconds("all_reduce", p, m, interconnect, known),
                    interconnect,
                )
            )
    return rows


def test_a_fit_recovers_the_constants_that_made_the_rows() -> None:
    true = LinkTypes({**link_types().link_type, "nvswitch": LinkType("node", 30e-6, 3e-6, 0.7, 1.2e-12)})
    rows = simulated_rows(true)
    fitted = fit_link_types(rows)
    errors = [
        abs(interconnect_seconds("all_reduce", r.ranks, r.bytes, r.interconnect, fitted) / r.seconds - 1) for r in rows
    ]
    assert sum(errors) / len(errors) < 0.02
    assert fitted.link_type["efa"].origin == "estimate"
    assert fitted.link_type["nvswitch"].origin.startswith("fitted on 18 published")
    start = [
        abs(interconnect_seconds("all_reduce", r.ranks, r.bytes, r.interconnect, fit_link_types([])) / r.seconds - 1)
        for r in rows
    ]
    assert sum(start) > 5 * sum(errors)


def test_coordinate_descent_finds_the_minimum() -> None:
    best = minimise(lambda x: abs(x["a"] - 3) + abs(x["b"] - 0.5), {"a": 1.0, "b": 1.0}, upper={"b": 1.0})
    assert best == pytest.approx({"a": 3, "b": 0.5}, rel=1e-3)


HEAD = ",".join(REQUIRED_COLUMNS)


def read(folder: Path, *lines: str, head: str = HEAD) -> Path:
    path = folder / "mine.csv"
    path.write_text("\n".join([head, *lines]) + "\n")
    return path


def test_unusable_rows_are_listed_with_the_reason(tmp_path: Path) -> None:
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
    rows, skipped = read_collectives(path)
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
    assert is_collectives(list(REQUIRED_COLUMNS)) and not is_collectives(["model"])


def test_errors_name_file_line_and_column(tmp_path: Path) -> None:
    with pytest.raises(InputError) as e:
        read_collectives(read(tmp_path, head=HEAD.replace("size_bytes", "size_byte")))
    assert "column 'size_bytes' is missing" in str(e.value)
    assert "mine.csv, line 1" in e.value.where and "size_byte" in e.value.fix
    good = "a,all_reduce,8,8,NVLink3+NVSwitch 600 GB/s bidir,,1000000,100,"
    for bad, column in ((good.replace("1000000", "1 MB"), "size_bytes"), (good.replace(",100,", ",-3,"), "time_us")):
        with pytest.raises(InputError) as e:
            read_collectives(read(tmp_path, good, bad))
        assert e.value.where == f"{tmp_path / 'mine.csv'}, line 3: {column}"
    with pytest.raises(InputError, match=r"another number of values(.|\n)*line 2"):
        read_collectives(read(tmp_path, good + ",7,7"))


def test_error_summary() -> None:
    summary = ErrorSummary.of([0.1, -0.3, 0.2, 0.0])
    assert (summary.rows, summary.mean, summary.median, summary.worst) == (
        4,
        pytest.approx(0.15),
        pytest.approx(0.15),
        0.3,
    )
    assert summary.bias == pytest.approx(0)
    assert ErrorSummary.of([]).rows == 0
    assert str(summary).startswith("4 rows: mean 15.0%")


def test_no_constant_names_its_source() -> None:
    assert load_link_types() == link_types()
    for name, link in link_types().link_type.items():
        assert link.origin == "estimate" or link.origin.startswith("fitted on "), name
        assert not any(
            word in (name + link.origin).lower() for word in ("echo", "vtrain", "aws", "azure", "ultrascale", "gloo")
        )


@pytest.mark.skipif(not PUBLISHED.exists(), reason="the published measurements are not here")
def test_published_collectives() -> None:
    result = validate_collectives(PUBLISHED, leave_one_out=False)
    inside, across = result.levels["inside"], result.levels["across"]
    assert inside.rows >= 180 and inside.mean <= 0.07
    assert across.rows >= 60 and across.mean <= 0.07
    assert abs(inside.bias) < 0.03 and abs(across.bias) < 0.03
    assert len(result.rows) + len(result.skipped) == len(PUBLISHED.read_text().splitlines()) - 1
    assert {one.reason for one in result.skipped} == {
        "inter_link is not stated",
        "n_gpus is not stated",
        "gpus_per_node is not stated",
    }
    assert result.left_out == {}
    assert any(line.startswith("inside") for line in result.lines())
    assert max(map(len, result.lines())) <= 60


@pytest.mark.slow
@pytest.mark.skipif(not PUBLISHED.exists(), reason="the published measurements are not here")
def test_published_collectives_without_their_own_source() -> None:
    result = validate_collectives(PUBLISHED)
    assert result.left_out["inside"].mean <= 0.10
    assert result.left_out["across"].mean <= 0.12


@pytest.mark.slow
@pytest.mark.skipif(not PUBLISHED.exists(), reason="the published measurements are not here")
def test_shipped_constants_are_those_of_the_fit() -> None:
    rows, _ = read_collectives(PUBLISHED)
    assert fit_link_types(rows) == link_types()
