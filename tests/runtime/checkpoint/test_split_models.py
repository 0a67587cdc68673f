"""Checkpoints of models split by rows, columns, segments and stages: any layout loads into any other."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import split_ranks as on_ranks
import torch
from world import World

from drumline.core.errors import CorruptFile, GaveUp
from drumline.partition.sharding.layout import Split
from drumline.plans import Plan
from drumline.runtime.checkpoint import boxes
from drumline.runtime.checkpoint.boxes import Box, fill_box, location_of
from drumline.runtime.checkpoint.export import export
from drumline.runtime.checkpoint.manifest import parse, read_manifest
from drumline.runtime.checkpoint.reader import CheckpointReader
from drumline.runtime.state.pieces import ParameterSlice, Piece

Worlds = Callable[[int], World]


def run(world: Worlds, layout: str, function: Callable[..., object], *arguments: object) -> list[object]:
    return world(Plan.parse(on_ranks.PLANS[layout]).ranks).run(function, layout, *arguments)


@pytest.mark.parametrize("layout", on_ranks.PLANS)
def test_any_layout_to_any_other(world: Worlds, tmp_path: Path, layout: str) -> None:
    """Weights, optimizer state and buffers are bitwise equal, and each element is written once."""
    run(world, layout, on_ranks.save, str(tmp_path))
    model, states = on_ranks.whole(1)
    [path] = tmp_path.glob("step-*")
    reader = CheckpointReader(path, read_manifest(path))
    for name, p in model.named_parameters():
        assert torch.equal(reader.whole(f"model/{name}"), p), name
        for key, value in states.get(name, {}).items():
            assert torch.equal(reader.whole(f"optimizer/{key}/{name}"), value), name
    for name, b in model.named_buffers():
        assert torch.equal(reader.whole(f"buffer/{name}"), b), name
    for other in on_ranks.PLANS:
        assert not any(run(world, other, on_ranks.wrong, str(tmp_path))), other


@pytest.mark.parametrize("layout", ["tp", "tp=3", "pp and copies"])
def test_weights_and_export(world: Worlds, tmp_path: Path, layout: str) -> None:
    """From a checkpoint, a safetensors file and a torch file into any layout."""
    run(world, layout, on_ranks.save, str(tmp_path / "c"))
    [checkpoint] = (tmp_path / "c").glob("step-*")
    [exported] = export(tmp_path / "c", tmp_path / "out")
    model, _ = on_ranks.whole(1)
    content = safetensors.torch.load_file(exported)
    assert {**content, "also": content["token"]}.keys() == model.state_dict().keys()
    assert all(torch.equal(t, model.state_dict()[n]) for n, t in content.items())
    torch.save(model.state_dict(), tmp_path / "w.pt")
    for source in (checkpoint, exported, tmp_path / "w.pt"):
        for other in ("tp", "tp and shards", "pp"):
            assert not any(world(Plan.parse(on_ranks.PLANS[other]).ranks).run(weights, other, str(source))), (
                source,
                other,
            )


def weights(layout: str, path: str) -> list[str]:
    return on_ranks.wrong(layout, path, weights=True)


def test_format_versions(world: Worlds, tmp_path: Path) -> None:
    """Checkpoints without boxes keep version 1; boxes have version 2."""
    for layout, version in (("copies", 1), ("shards", 1), ("pp", 1), ("tp", 2)):
        run(world, layout, on_ranks.save, str(tmp_path / layout))
        [path] = (tmp_path / layout).glob("step-*")
        manifest = json.loads((path / "manifest.json").read_bytes())
        boxed = {name for name, entry in manifest["tensors"].items() if "boxes" in entry}
        assert manifest["version"] == version and bool(boxed) == (version == 2)
        if boxed:  # rows are plain runs, like a sharded parameter
            assert {n for n in boxed if n.startswith("model/")} == {
                f"model/{n}" for n in ("fused", "fused_bias", "out", "narrow", "pixels")
            }


def test_writing_is_divided(world: Worlds, tmp_path: Path) -> None:
    """Copies of a split model share the writing; every rank writes something."""
    run(world, "tp and copies", on_ranks.save, str(tmp_path))
    [path] = tmp_path.glob("step-*")
    sizes = dict.fromkeys((f"rank-{r:05d}.safetensors" for r in range(4)), 0)
    for name, entry in read_manifest(path).tensors.items():
        for file, _, n in (*entry.runs, *(r for b in entry.boxes for r in b.runs)):
            sizes[file] += n if not name.startswith(("random", "buffer")) else 0
    assert max(sizes.values()) < 1.4 * min(sizes.values()), sizes


def test_incomplete_save_fails(world: Worlds, tmp_path: Path) -> None:
    with pytest.raises(GaveUp, match="step 3 was not saved: no rank wrote 'buffer/late'"):
        run(world, "pp", on_ranks.save, str(tmp_path), "late")
    assert not list(tmp_path.glob("step-*"))


def damaged(path: Path, change: Callable[[list[dict[str, object]]], object]) -> None:
    manifest = json.loads((path / "manifest.json").read_bytes())
    change(manifest["tensors"]["model/out"]["boxes"])
    parse(json.dumps(manifest).encode(), path / "manifest.json")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda b: b.pop(), "do not cover it exactly"),
        (lambda b: b.append(b[0]), "do not cover it exactly"),
        (lambda b: b[0]["box"].update(dim=0), "do not cover it exactly"),
        (lambda b: b[0]["box"].update(dim=5), "do not cover it exactly"),
        (lambda b: b[1]["box"].update(ranges=[[2, 6]]), "do not cover it exactly"),
        (lambda b: b[1]["box"].update(ranges=[[3, 7]]), "do not cover it exactly"),
        (lambda b: b[1]["box"].update(ranges=[]), "do not cover it exactly"),
        (lambda b: b[1]["runs"].pop(), r"\(3..6 of dim 1\)' has 0 of its 12 elements"),
        (lambda b: b[1]["box"].update(more=1), "unknown key 'more'"),
    ],
)
def test_damage(world: Worlds, tmp_path: Path, change: Callable[[object], object], text: str) -> None:
    run(world, "tp", on_ranks.save, str(tmp_path))
    [path] = tmp_path.glob("step-*")
    damaged(path, lambda boxes: None)
    with pytest.raises(CorruptFile, match=text):
        damaged(path, change)


# -- boxes


SHAPES = [
    ((6, 4), 1, ((0, 1, 4),)),
    ((2, 3, 8), 1, ((0, 2, 3),)),
    ((4, 9), 1, ((0, 2, 5), (0, 3, 4))),
    ((9, 2), 0, ((0, 2, 5), (0, 3, 4))),
]


def copy(whole: torch.Tensor, at: int, room: torch.Tensor) -> None:
    room.copy_(whole.reshape(-1)[at : at + room.numel()])


@pytest.mark.parametrize("long", [1, 2**18])
@pytest.mark.parametrize("window", [1, 40, 2**23])
def test_boxes_equal_indexing(monkeypatch: pytest.MonkeyPatch, long: int, window: int) -> None:
    """Any range of any box, read run by run or from whole rows, few or many at a time."""
    monkeypatch.setattr(boxes, "_LONG", long)
    monkeypatch.setattr(boxes, "CHUNK", window)
    for shape, dim, cuts in SHAPES:
        whole = torch.arange(float(torch.Size(shape).numel()), dtype=torch.float64).reshape(shape)
        for index in range(2):
            cut = ParameterSlice(Split(dim, cuts), index)
            expected = on_ranks.elements_of(cut, whole)
            start, box = location_of(Piece("x", shape, 0, torch.nn.Parameter(expected), slice=cut))
            assert start == 0 and box is not None and box.numel(shape) == expected.numel()
            for a, b in ((0, expected.numel()), (1, expected.numel() - 1), (3, 4), (2, 2)):
                out = torch.empty(b - a, dtype=torch.float64)
                fill_box(partial(copy, whole), shape, box, a, out)
                assert torch.equal(out, expected[a:b]), (shape, index, a, b)
            assert [box.tensor_index(shape, i) for i in range(expected.numel())] == expected.tolist()


def test_rows_need_no_box() -> None:
    whole = torch.arange(30.0).reshape(1, 6, 5)
    for index, start in ((0, 0), (1, 20)):
        cut = ParameterSlice(Split(1, ((0, 4, 6),)), index)
        assert location_of(Piece("x", (1, 6, 5), 3, torch.nn.Parameter(whole[:, :1]), slice=cut)) == (start + 3, None)
    nothing = ParameterSlice(Split(0, ((0, 6, 6),)), 1)
    assert location_of(Piece("x", (6, 5), 0, torch.nn.Parameter(whole[0, :0]), slice=nothing))[1] is None


def test_few_file_operations(tmp_path: Path) -> None:
    """A few columns of a thousand rows are one read."""
    reads: list[int] = []

    def fill(at: int, room: torch.Tensor) -> None:
        reads.append(room.numel())
        room.zero_()

    out = torch.empty(2000)
    fill_box(fill, (1000, 8), Box(1, ((2, 3), (5, 6))), 0, out)
    assert reads == [8000]
