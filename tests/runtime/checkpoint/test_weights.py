"""Plain weights are exported and loaded under the model's own names, strictly, under any plan."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fakes
import on_ranks
import pytest
import safetensors.torch
import small_jobs
import torch
from world import World

from drumline.core.errors import CorruptFile, InputError
from drumline.plans import Plan
from drumline.runtime.checkpoint import Saver, load
from drumline.runtime.checkpoint.export import export
from drumline.runtime.checkpoint.weights import load_weights

Worlds = Callable[[int], World]


@pytest.fixture
def trained(tmp_path: Path) -> Any:
    """A trained fake engine, with its checkpoint in `checkpoints`."""
    engine = fakes.engine()
    fakes.train(engine, 2)
    with Saver(engine, tmp_path / "checkpoints") as saver:
        saver.save()
    return engine


def same(a: torch.nn.Module, b: torch.nn.Module) -> None:
    mine, others = a.state_dict(), b.state_dict()
    assert mine.keys() == others.keys()
    for name, t in mine.items():
        assert torch.equal(t, others[name]), name


def test_single_file(trained: Any, tmp_path: Path) -> None:
    [path] = export(tmp_path / "checkpoints", tmp_path / "out")
    assert path == tmp_path / "out" / "model.safetensors"
    plain = fakes.Model()
    safetensors.torch.load_model(plain, path, strict=True)
    same(trained.model, plain)
    content = safetensors.torch.load_file(path)
    assert (
        "head.weight" not in content
        and "seen" not in content
        and content["norm.num_batches_tracked"].dtype == torch.int64
    )


def test_tied_weight_under_each_name(trained: Any, tmp_path: Path) -> None:
    [path] = export(tmp_path / "checkpoints", tmp_path / "out", untie=True)
    plain = fakes.Model()
    plain.load_state_dict(safetensors.torch.load_file(path), strict=True)
    same(trained.model, plain)


def test_shards_with_an_index(trained: Any, tmp_path: Path) -> None:
    *shards, index = export(tmp_path / "checkpoints", tmp_path / "out", shard_bytes=120)
    assert len(shards) > 2 and shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
    content = json.loads(index.read_bytes())
    loaded: dict[str, torch.Tensor] = {}
    for shard in shards:
        tensors = safetensors.torch.load_file(shard)
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 120
        assert all(content["weight_map"][name] == shard.name for name in tensors)
        loaded |= tensors
    assert content["metadata"]["total_size"] == sum(t.nbytes for t in loaded.values())
    other = fakes.engine(seed=5)
    load_weights(other, tmp_path / "out")
    same(trained.model, other.model)


def test_nothing_is_overwritten(trained: Any, tmp_path: Path) -> None:
    export(tmp_path / "checkpoints", tmp_path / "out")
    with pytest.raises(InputError, match="already exists"):
        export(tmp_path / "checkpoints", tmp_path / "out")
    with pytest.raises(InputError, match="shards of 0 bytes"):
        export(tmp_path / "checkpoints", tmp_path / "new", shard_bytes=0)


def test_damaged_checkpoint_is_not_exported(trained: Any, tmp_path: Path) -> None:
    shard = tmp_path / "checkpoints" / "step-00000002" / "rank-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-4])
    with pytest.raises(CorruptFile, match="rank-00000.safetensors is damaged"):
        export(tmp_path / "checkpoints", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["checkpoint", "safetensors", "pt", "state_dict", "wrapped", "bin folder", "old pt"])
def test_load_weights(trained: Any, tmp_path: Path, form: str) -> None:
    state = trained.model.state_dict()
    path = tmp_path / "weights.pt"
    if form == "checkpoint":
        path = tmp_path / "checkpoints" / "step-00000002"
    elif form == "safetensors":
        [path] = export(tmp_path / "checkpoints", tmp_path / "out")
    elif form == "bin folder":
        path = tmp_path / "folder"
        path.mkdir()
        torch.save(state, path / "pytorch_model.bin")
    elif form == "wrapped":
        torch.save({f"module._orig_mod.{k}": v for k, v in state.items()}, path)
    else:
        saved = {"state_dict": state, "epoch": 3} if form == "state_dict" else state
        torch.save(saved, path, _use_new_zipfile_serialization=form != "old pt")
    other = fakes.engine(seed=5)
    load_weights(other, path)
    same(trained.model, other.model)


def test_missing_and_unknown_tensors(trained: Any, tmp_path: Path) -> None:
    state = dict(trained.model.state_dict())
    del state["scale"], state["token.weight"]  # the other name of the tied weight remains
    state["other"] = torch.zeros(2)
    torch.save(state, tmp_path / "w.pt")
    engine = fakes.engine(seed=5)
    before = fakes.state(engine)
    with pytest.raises(InputError, match="'scale' is missing and 'other' is unknown"):
        load_weights(engine, tmp_path / "w.pt")
    fakes.assert_equal(before, fakes.state(engine))
    load_weights(engine, tmp_path / "w.pt", strict=False)
    assert torch.equal(engine.model.token.weight, trained.model.token.weight)
    assert torch.equal(engine.model.scale, before["model/scale"])
    state["scale"] = torch.zeros(3)
    torch.save(state, tmp_path / "w.pt")
    with pytest.raises(InputError, match=r"'scale' has the shape \(3,\)"):
        load_weights(engine, tmp_path / "w.pt", strict=False)
    torch.save({"nothing": torch.zeros(1)}, tmp_path / "w.pt")
    with pytest.raises(InputError, match="has no tensor of the model"):
        load_weights(engine, tmp_path / "w.pt", strict=False)


def test_two_values_for_one_weight(trained: Any, tmp_path: Path) -> None:
    state = dict(trained.model.state_dict())
    state["head.weight"] = state["head.weight"] + 1
    torch.save(state, tmp_path / "w.pt")
    with pytest.raises(InputError, match=r"'token.weight' and 'head.weight' differ"):
        load_weights(fakes.engine(), tmp_path / "w.pt")


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("how", ["torch", "old torch", "pickle", "in safetensors"])
def test_nothing_is_unpickled(tmp_path: Path, how: str) -> None:
    evil, path = {"scale": Evil(tmp_path / "sentinel")}, tmp_path / "w.pt"
    if how == "pickle":
        path.write_bytes(pickle.dumps(evil, protocol=2))
    elif how == "in safetensors":
        path = tmp_path / "w.safetensors"
        path.write_bytes(pickle.dumps(evil, protocol=2))
    else:
        torch.save(evil, path, _use_new_zipfile_serialization=how == "torch")
    with pytest.raises(CorruptFile, match="is no (torch file of tensors|safetensors file)"):
        load_weights(fakes.engine(), path)
    assert not (tmp_path / "sentinel").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_torch_with_code_in_it(tmp_path: Path) -> None:
    """DCP's metadata and its bytes are pickles: such a folder is no checkpoint and no weights of ours."""
    import torch.distributed.checkpoint as dcp

    sentinel = tmp_path / "sentinel"
    dcp.save({"x": Evil(sentinel)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Evil(sentinel)))
    sentinel.unlink(missing_ok=True)  # torch itself may have read it back
    for read in (load, load_weights):
        with pytest.raises((InputError, CorruptFile)):
            read(fakes.engine(), tmp_path / "dcp")
    assert not sentinel.exists()


@pytest.mark.parametrize("name", ["../w.safetensors", "/etc/passwd", "a/b.safetensors"])
def test_paths_in_an_index(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"scale": name}}))
    with pytest.raises(CorruptFile, match="file names have no folders"):
        load_weights(fakes.engine(), tmp_path)


def test_index_with_an_extra_entry(trained: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    *_, index = export(tmp_path / "checkpoints", out, shard_bytes=120)
    content = json.loads(index.read_bytes())
    content["weight_map"]["more"] = content["weight_map"]["scale"]
    index.write_text(json.dumps(content))
    with pytest.raises(CorruptFile, match=r"has no 'more'"):
        load_weights(fakes.engine(), out)


@pytest.mark.parametrize("text", ["none", "w.txt", "."])
def test_no_weights(tmp_path: Path, text: str) -> None:
    (tmp_path / "w.txt").write_text("")
    with pytest.raises(InputError, match="no file|unknown extension|no weights in"):
        load_weights(fakes.engine(), tmp_path / text)


@pytest.mark.parametrize(
    "plan", ["dp=1", "dp=2", "dp=3,zero=1", "dp=2,zero=3", "dp=2,zero=1,chunk=2", "dp=4,zero=3,shard=2"]
)
@pytest.mark.parametrize("name", ["gpt", "cnn", "partial"])
def test_load_into_any_plan(world: Worlds, tmp_path: Path, name: str, plan: str) -> None:
    """The weights of a model with another seed, and the loss of its next step."""
    torch.manual_seed(7)
    model = small_jobs.make(name).model()
    torch.save(model.state_dict(), tmp_path / "w.pt")
    safetensors.torch.save_model(model, str(tmp_path / "w.safetensors"))
    losses = set()
    for path in ("w.pt", "w.safetensors"):
        for result in world(Plan.parse(plan).ranks).run(on_ranks.weights, name, plan, str(tmp_path / path)):
            losses.add(round(float(result.pop("loss")), 5))
            for key, value in result.items():
                assert torch.equal(value, model.state_dict()[key]), key
    assert len(losses) == 1


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3", "dp=2,zero=3,chunk=2"])
def test_export_of_any_plan(world: Worlds, tmp_path: Path, plan: str) -> None:
    [state, *_] = world(2).run(on_ranks.save, "gpt", plan, str(tmp_path / "c"), 2)
    [path] = export(tmp_path / "c", tmp_path / "out")
    plain = small_jobs.GPT()
    safetensors.torch.load_model(plain, path, strict=True)
    for name, p in plain.named_parameters():
        assert torch.equal(p, state[f"model/{name}"]), name
    with safetensors.safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "token.weight"}
