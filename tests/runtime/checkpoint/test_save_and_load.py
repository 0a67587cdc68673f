"""Saving and loading are exact; a checkpoint that does not fit is refused by name."""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from pathlib import Path
from typing import Any

import fakes
import numpy
import pytest
import torch

from drumline.core.errors import InputError
from drumline.runtime.checkpoint import Saver, load, lock
from drumline.runtime.training.checkpoint_policy import steps_left


def saved(tmp_path: Path, steps: int = 3, **changes: Any) -> Any:
    engine = fakes.engine(**changes)
    fakes.train(engine, steps)
    with Saver(engine, tmp_path) as saver:
        saver.save()
    return engine


def test_everything_is_restored(tmp_path: Path) -> None:
    engine = saved(tmp_path)
    other = fakes.engine(seed=1)
    other.job = engine.job
    fakes.train(other, 1)
    loaded = load(other, tmp_path)
    assert (loaded.step, loaded.world, loaded.plan, loaded.notes) == (3, 1, "dp=1", ())
    fakes.assert_equal(fakes.state(engine), fakes.state(other))


@pytest.mark.parametrize("k", [0, 1, 2, 5])
@pytest.mark.parametrize("wait", [True, False])
def test_k_steps_restart_k_steps_equal_2k_steps(tmp_path: Path, k: int, wait: bool) -> None:
    straight = fakes.engine()
    fakes.train(straight, 2 * k)
    first = fakes.engine()
    fakes.train(first, k)
    with Saver(first, tmp_path) as saver:
        saver.save(wait=wait)
        fakes.train(first, 1)  # the copy is written, not the live state
    second = fakes.engine(seed=0)
    load(second, tmp_path)
    fakes.train(second, k)
    fakes.assert_equal(fakes.state(straight), fakes.state(second))


def test_random_state(tmp_path: Path) -> None:
    engine = fakes.engine()
    random.seed(3), numpy.random.seed(4), torch.manual_seed(5)
    with Saver(engine, tmp_path) as saver:
        saver.save()
    drawn = random.random(), numpy.random.random(), float(torch.rand(1)), random.gauss(0, 1)
    random.seed(0), numpy.random.seed(0), torch.manual_seed(0)
    load(engine, tmp_path)
    assert (random.random(), numpy.random.random(), float(torch.rand(1)), random.gauss(0, 1)) == drawn


def test_files_of_a_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path)
    folder = tmp_path / "step-00000003"
    assert (tmp_path / "LATEST").read_text() == "step-00000003\n"
    assert sorted(p.name for p in folder.iterdir()) == ["SHA256SUMS", "manifest.json", "rank-00000.safetensors"]
    subprocess.run(["sha256sum", "--quiet", "-c", "SHA256SUMS"], cwd=folder, check=True)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    assert manifest["tied"] == {"head.weight": "token.weight"}
    assert "model/head.weight" not in manifest["tensors"] and "buffer/seen" in manifest["tensors"]
    assert manifest["optimizer"]["groups"][0]["names"] == ["token.weight"]


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    engine = fakes.engine()
    with Saver(engine, tmp_path, keep=3) as saver:
        assert saver.save() == tmp_path / "step-00000000"
        with torch.no_grad():
            engine.model.scale.fill_(9.0)
        assert saver.save() == tmp_path / "step-00000000-1"
    other = fakes.engine()
    assert load(other, tmp_path).path == tmp_path / "step-00000000-1"
    assert other.model.scale.item() == 9.0


def test_old_checkpoints_are_removed(tmp_path: Path) -> None:
    engine = fakes.engine()
    with Saver(engine, tmp_path, keep=2) as saver:
        for _ in range(4):
            fakes.train(engine, 1)
            saver.save()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["LATEST", "LOCK", "step-00000003", "step-00000004"]
    with pytest.raises(InputError, match="keep >= 2"):
        Saver(engine, tmp_path, keep=1)


def test_damaged_checkpoints_do_not_count_as_kept(tmp_path: Path) -> None:
    engine = fakes.engine()
    with Saver(engine, tmp_path, keep=2) as saver:
        for _ in range(2):
            fakes.train(engine, 1)
            saver.save()
        (tmp_path / "step-00000002" / "rank-00000.safetensors").unlink()
        fakes.train(engine, 1)
        saver.save()
    assert (tmp_path / "step-00000001").is_dir()
    with Saver(engine, tmp_path, keep=2) as saver:
        fakes.train(engine, 1)
        saver.save()
    assert not (tmp_path / "step-00000001").exists() and not (tmp_path / "step-00000002").exists()


class Renamed(fakes.Model):
    """One parameter has another name."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = self.scale
        del self.scale


class Wider(fakes.Model):
    """One additional parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.more = torch.nn.Linear(2, 2)


REFUSED = [
    ({"model": fakes.Model(5)}, r"'token.weight' has the shape \(7, 4\)"),
    ({"model": Renamed()}, "'scales' is missing and 'scale' is unknown"),
    ({"model": Wider()}, "'more.weight', 'more.bias' are missing"),
    ({"schedule": None}, "the checkpoint has a schedule, the job has none"),
    ({"optimizer": torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])}, "optimizer is AdamW, the job's is SGD"),
    ({"stream": fakes.stream(41)}, "samples was 40, and is 41"),
]


@pytest.mark.parametrize(("changes", "text"), REFUSED, ids=[text[:20] for _, text in REFUSED])
def test_another_job_is_refused(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    saved(tmp_path)
    other = fakes.engine(seed=0, **changes)
    before = fakes.state(other) if "optimizer" not in changes and other.schedule else None
    with pytest.raises(InputError, match=text):
        load(other, tmp_path)
    if before:
        fakes.assert_equal(before, fakes.state(other))


def test_other_data_if_allowed(tmp_path: Path) -> None:
    saved(tmp_path)
    other = fakes.engine(stream=fakes.stream(41))
    assert load(other, tmp_path, other_data=True).step == 3


def test_dtype_conversion_is_noted(tmp_path: Path) -> None:
    saved(tmp_path)
    other = fakes.engine(model=fakes.Model().double())
    [note] = load(other, tmp_path).notes
    assert note == "values are converted from float32 to float64"
    [states] = [other.optimizer.state[p.value] for p in other.pieces if p.name == "scale"]
    assert states["exp_avg"].dtype == torch.float64 and states["step"].dtype == torch.float32


def test_no_checkpoint(tmp_path: Path) -> None:
    for path, text in ((tmp_path, "no checkpoint in"), (tmp_path / "none", "no checkpoint")):
        with pytest.raises(InputError, match=text):
            load(fakes.engine(), path)


def test_two_jobs_on_one_folder(tmp_path: Path) -> None:
    first = Saver(fakes.engine(), tmp_path)
    with pytest.raises(InputError, match=r"another job writes checkpoints to .*: process \d+ on "):
        Saver(fakes.engine(), tmp_path)
    first.close()
    Saver(fakes.engine(), tmp_path).close()


def test_lock_of_another_host(tmp_path: Path) -> None:
    (tmp_path / "LOCK").write_text('{"pid": 7, "host": "far away"}')
    with pytest.raises(InputError, match="process 7 on far away, seen 0 s ago"):
        Saver(fakes.engine(), tmp_path)
    os.utime(tmp_path / "LOCK", (time.time() - 1000,) * 2)
    Saver(fakes.engine(), tmp_path).close()


class Odd:
    """A schedule whose state contains code."""

    def state_dict(self) -> dict[str, Any]:
        return {"f": lambda: None}


def test_code_is_not_saved(tmp_path: Path) -> None:
    with Saver(fakes.engine(schedule=Odd()), tmp_path) as saver, pytest.raises(InputError, match="of type function"):
        saver.save()


def test_folder_that_is_not_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "VISIBLE", 0.1)
    (tmp_path / "LOCK").write_text('{"nonce": "of another job"}')
    with pytest.raises(InputError, match=r"rank 1 on .* does not see the first rank's lock"):
        lock.check_shared(tmp_path, "ours", 1)


def test_no_steps_left() -> None:
    engine = fakes.engine()
    fakes.train(engine, 3)
    assert steps_left(engine, 5) == 2
    with pytest.raises(InputError, match="the checkpoint is at step 3, and the job has 3"):
        steps_left(engine, 3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("wait", [True, False])
def test_on_a_gpu(tmp_path: Path, wait: bool) -> None:
    device = torch.device("cuda")
    engine = fakes.engine(model=fakes.Model().to(device), device=device)
    fakes.train(engine, 2)
    before = fakes.state(engine)
    with Saver(engine, tmp_path) as saver:
        saver.save(wait=wait)
        fakes.train(engine, 1)
    other = fakes.engine(seed=0, model=fakes.Model().to(device), device=device)
    load(other, tmp_path)
    fakes.assert_equal(before, fakes.state(other))
    on_host = fakes.engine(seed=0)
    load(on_host, tmp_path)
    for name, p in on_host.model.named_parameters():
        assert torch.equal(p, before[f"model/{name}"].cpu()), name
