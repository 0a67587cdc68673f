"""DeepSpeed's, Horovod's and Accelerate's own names: arguments, checkpoints with tags, and what is refused."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from world import World

import drumline.deepspeed as deepspeed
import drumline.horovod as hvd
from drumline.accelerate import Accelerator
from drumline.core.errors import InputError, JobError, PlanError

Worlds = Callable[[int], World]
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
}


def engine_of(zero: int = 0, **more: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    config = {**CONFIG, "zero_optimization": {"stage": zero}}
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config, **more)[0]


def train(engine: Any, steps: int) -> None:
    for _ in range(steps * engine.gradient_accumulation_steps()):
        engine.backward(engine(torch.ones(4, 4) * (1 + engine.global_rank)).square().mean())
        engine.step()


def interrupted(folder: str, first: int, second: int) -> dict[str, Any]:
    """Two steps, a save, and two more steps in an engine under another stage equal four steps in one."""
    engine = engine_of(first)
    train(engine, 2)
    engine.save_checkpoint(folder, client_state={"epoch": 3, "best": torch.ones(2)})
    other = engine_of(second)
    path, state = other.load_checkpoint(folder)
    counts = (other.global_steps, other.micro_steps)
    train(other, 2)
    whole = engine_of(0)
    train(whole, 4)
    torch.testing.assert_close(other.module_state_dict(), whole.module_state_dict())
    weights = engine_of(second)
    weights.load_checkpoint(folder, tag="global_step2", load_module_only=True)
    torch.testing.assert_close(weights.module_state_dict(), {**engine.module_state_dict()})
    assert engine.save_16bit_model(folder, "model.safetensors")
    return {"path": path, "state": state, "counts": counts, "none": other.load_checkpoint(folder + "/other")}


@pytest.mark.parametrize(("first", "second"), [(2, 0), (0, 3)])
def test_checkpoints_with_tags(world: Worlds, tmp_path: Path, first: int, second: int) -> None:
    for mine in world(2).run(interrupted, str(tmp_path), first, second):
        assert mine["path"] == str(tmp_path / "global_step2")
        assert mine["state"]["epoch"] == 3 and mine["state"]["best"].tolist() == [1, 1]
        assert mine["counts"] == (2, 4) and mine["none"] == (None, None)
    assert (tmp_path / "latest").read_text() == "global_step2"
    assert (tmp_path / "model.safetensors").exists()


def refused_state(folder: str) -> str:
    with pytest.raises(JobError) as error:
        engine_of().save_checkpoint(folder, client_state={"args": argparse.Namespace(a=1)})
    return str(error.value)


def test_state_that_would_run_code_is_refused(world: Worlds, tmp_path: Path) -> None:
    [text] = world(1).run(refused_state, str(tmp_path))
    assert "Namespace" in text and "vars(args)" in text and not list(tmp_path.iterdir())


def of_deepspeed(folder: str) -> str:
    path = Path(folder) / "global_step1"
    path.mkdir()
    (path / "mp_rank_00_model_states.pt").touch()
    (Path(folder) / "latest").write_text("global_step1\n")
    with pytest.raises(InputError) as error:
        engine_of().load_checkpoint(folder)
    return str(error.value)


def test_a_checkpoint_of_deepspeed_is_recognised(world: Worlds, tmp_path: Path) -> None:
    assert "zero_to_fp32" in world(1).run(of_deepspeed, str(tmp_path))[0]


def accessors() -> list[Any]:
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    parser.add_argument("--local_rank", type=int, default=-1)
    args = parser.parse_args(["--deepspeed"])
    engine = engine_of(args=args)
    with pytest.raises(JobError, match="a multiple of"):
        engine.set_train_batch_size(9)
    engine.set_train_batch_size(24)
    train(engine, 1)
    with pytest.raises(AttributeError, match="Job"):
        engine.train_batch()
    with pytest.raises(JobError, match="two names of one argument"):
        engine_of(config_params={})
    with pytest.raises(JobError, match="mpu"):
        engine_of(mpu=object())
    with pytest.raises(JobError, match="is empty"):
        deepspeed.initialize(model=nn.Linear(2, 2), model_parameters=[], config=CONFIG)
    return [
        *(args.local_rank, engine.local_rank, engine.fp16_enabled(), engine.bfloat16_enabled()),
        *(engine.micro_steps, engine.global_steps, engine.train_batch_size(), engine.zero_optimization_stage()),
        len(list(engine.parameters())),
    ]


def test_accessors(world: Worlds) -> None:
    assert world(2).run(accessors) == [[r, r, False, False, 3, 1, 24, 0, 2] for r in (0, 1)]


def test_other_imports_of_a_script_find_ours() -> None:
    from deepspeed.accelerator import get_accelerator
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split
    from deepspeed.ops.adam import FusedAdam
    from deepspeed.pipe import PipelineModule

    assert get_accelerator().device_name() in ("cpu", "cuda")
    assert split({"params": []}) == [{"params": []}]
    assert isinstance(FusedAdam([nn.Parameter(torch.ones(1))]), torch.optim.AdamW)
    with pytest.raises(PlanError, match="a Job"):
        PipelineModule(layers=[])
    with pytest.raises(AttributeError, match="drumline export"):
        deepspeed.init_inference("model")


def horovod_values() -> list[Any]:
    hvd.init()
    rank = hvd.rank()
    rows = hvd.allgather(torch.full((rank + 1, 2), float(rank)))
    parameter, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    sgd = torch.optim.SGD([parameter, unused], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(sgd, 1, gamma=0.5)  # before: its counter must not hide the exchange
    optimizer = hvd.DistributedOptimizer(sgd, backward_passes_per_step=2)
    for i in range(2):
        (parameter * (rank + 1)).sum().backward()
        if rank == 1 and not i:
            unused.sum().backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    with pytest.raises(JobError, match="backward_passes_per_step"):
        for _ in range(3):
            parameter.sum().backward()
    with pytest.raises(AttributeError, match="drop_last"):
        hvd.join()
    with pytest.raises(InputError, match="Adasum"):
        hvd.allreduce(torch.ones(1), op=hvd.Adasum)
    return [
        rows.tolist(),
        *(parameter.tolist(), unused.tolist(), sgd.param_groups[0]["lr"]),
        hvd.allreduce(torch.tensor([float(rank)]), compression=hvd.Compression.fp16).item(),
        *(hvd.allreduce(torch.tensor([rank]), op=hvd.Sum).item(), hvd.broadcast_object({"r": rank}, 1)["r"]),
    ]


def test_horovods_collectives_and_optimizer(world: Worlds) -> None:
    """Gradients 2 and 4 of two passes have the mean 3; a parameter that one rank has not used counts as zeros."""
    expected = [[[0, 0], [1, 1], [1, 1]], [-2.0] * 3, [0.5] * 2, 0.5, 0.5, 1, 1]
    assert world(2).run(horovod_values) == [expected] * 2


def prepared_values(folder: str) -> list[Any]:
    accelerator = Accelerator(gradient_accumulation_steps=2, plan="zero=1")
    torch.manual_seed(accelerator.process_index)  # the sampler's order is shared all the same
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    loader = DataLoader(TensorDataset(torch.arange(10.0)[:, None]), batch_size=2, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    seen, flags = [], []
    for (x,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean() * 1e-3)
            flags.append(accelerator.sync_gradients)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        seen += accelerator.gather_for_metrics(x).flatten().tolist()
    accelerator.save_state(folder)
    accelerator.load_state(folder)
    with pytest.raises(JobError, match=r"accumulate\(\) counts"):
        accelerator.backward(torch.ones(()))
    with pytest.raises(JobError, match="plan='zero=2'"):
        Accelerator(fsdp_plugin=object())
    with pytest.raises(AttributeError, match="gradient_accumulation_steps"):
        accelerator.no_sync(model)
    rest = accelerator.skip_first_batches(loader, 2)
    return [sorted(seen), flags, scheduler.last_epoch, optimizer.param_groups[0]["lr"], len(loader), len(list(rest))]


def test_accelerates_loop(world: Worlds, tmp_path: Path) -> None:
    """Every sample once, though the last round is filled up; a batch ends with the loader; schedules step by ranks."""
    expected = [[float(i) for i in range(10)], [False, True, True], 4, 0.025, 3, 1]
    assert world(2).run(prepared_values, str(tmp_path)) == [expected] * 2
