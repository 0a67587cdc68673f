"""Forms of jobs and data that used to fail: each works now, or gives one message with its fix."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import small_jobs
import torch
import torch.nn.functional as F
from torch import nn
from world import World

import drumline as dl
from drumline.comm.environment import disconnect
from drumline.core.errors import JobError, PlanError, StoppedByGuard
from drumline.datasets import Stream, load_data
from drumline.loop.profile import profile
from drumline.loop.verify import verify
from drumline.runtime.verification.explanation import explain

sys.path.insert(0, str(Path(__file__).parent / "runtime"))
import job_forms as forms  # next to the other functions that ranks import

Worlds = Callable[..., World]
CLOSE = {"rtol": 1e-10, "atol": 1e-12}


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A test that runs an engine in this process leaves its group of one rank again."""
    yield
    disconnect()


def on(world: Worlds, ranks: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """The first rank's answer, equal to the others'."""
    return world(ranks).run(function, *arguments)[0]


# -- 1. a DataLoader of the user's own


@pytest.mark.parametrize(
    "kind", ["loader", "seeded", "in order", "batch sampler", "workers", "stream", "stream workers"]
)
def test_data_in_any_form_is_the_same_on_two_ranks(world: Worlds, kind: str) -> None:
    alone = forms.losses_of_data(kind, "dp=1")
    assert on(world, 2, forms.losses_of_data, kind, "dp=2,micro=2") == pytest.approx(alone, rel=1e-10)


def test_the_order_is_that_of_the_loader() -> None:
    job = forms.with_data("batch sampler")
    stream = Stream(job, job.data())
    assert [stream.samples(i) for i in range(5)][::4] == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]  # of two epochs
    in_order = forms.with_data("in order")
    first = Stream(in_order, in_order.data()).batch(0)
    samples = small_jobs.Samples("vector", forms.SAMPLES)
    assert torch.equal(first.micros[0].input[1], samples[1][0] * 2.0)  # by its own collate function
    dropped = Stream(forms.with_data("seeded"), forms.data_of("seeded"))
    assert [len(dropped.samples(i)) for i in range(4)] == [6, 6, 6, 6]  # drop_last
    assert dropped.samples(0) != dropped.samples(2)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("distributed sampler", "DistributedSampler for 2 ranks(.|\n)*leave the sampler out"),
        ("other batch", "batch_size=4, Job.batch_size is 6(.|\n)*DataLoader\\(..., batch_size=6\\)"),
        ("no batches", "batch_size=None(.|\n)*batch_size=6"),
        ("another order", "DataLoader\\(HalfStep\\) gives another order each time(.|\n)*set_epoch"),
    ],
)
def test_a_loader_whose_order_cannot_be_kept(kind: str, words: str) -> None:
    with pytest.raises(JobError, match=words):
        profile(forms.with_data(kind))


def test_two_collate_functions() -> None:
    with pytest.raises(JobError, match="another: pad(.|\n)*leave out Job.collate"):
        profile(forms.with_data("in order", collate=torch.utils.data.default_collate))


# -- 2. an IterableDataset


@pytest.mark.parametrize("kind", ["loader", "stream"])
def test_resume_in_the_middle(tmp_path: Path, kind: str) -> None:
    whole = forms.losses_of_data(kind, "dp=1")
    assert forms.resumed_losses(kind, "dp=1", str(tmp_path / "saved")) == pytest.approx(whole, rel=1e-12)


def test_a_generator_can_be_read_once() -> None:
    job = small_jobs.make("mlp", data=lambda: (x for x in [1]))
    with pytest.raises(JobError, match="can be read only once: return a list, or an IterableDataset"):
        profile(job)


def test_a_dataset_without_a_length() -> None:
    class Endless(torch.utils.data.Dataset[Any]):
        def __getitem__(self, i: int) -> Any:
            return torch.zeros(6), 0

    with pytest.raises(JobError, match="without __len__(.|\n)*give it a __len__"):
        profile(small_jobs.make("mlp", data=Endless))


@pytest.mark.parametrize("kind", ["of this rank", "sharded"])
def test_data_that_is_sharded_twice(world: Worlds, kind: str) -> None:
    with pytest.raises(JobError, match="differs between ranks: rank 1(.|\n)*leave out the sharding"):
        on(world, 2, forms.losses_of_data, kind, "dp=2")


# -- 3. batches by name, and models that return their loss


@pytest.mark.parametrize("plan", ["dp=2,zero=3", "tp=2"])
def test_models_that_return_their_loss(world: Worlds, plan: str) -> None:
    alone = forms.losses_without_loss("mapping", "dp=1")
    assert on(world, 2, forms.losses_without_loss, "mapping", plan) == pytest.approx(alone, rel=1e-10)
    assert forms.losses_without_loss("tuple", "dp=1") == pytest.approx(alone, rel=1e-12)
    assert forms.losses_without_loss("loss", "dp=1") == pytest.approx(alone, rel=1e-12)


def test_a_loss_of_the_jobs_own_gets_the_whole_batch() -> None:
    job = forms.returning(loss=lambda output, batch: F.cross_entropy(output["logits"], batch["labels"]))
    assert forms.losses(lambda: job, "dp=1") == pytest.approx(forms.losses_without_loss("mapping", "dp=1"), rel=1e-12)


def test_a_model_that_returns_no_loss() -> None:
    job = forms.returning(data=lambda: [{"features": torch.zeros(6)}] * 8)
    with pytest.raises(JobError, match="returned no loss(.|\n)*put the labels into the batch"):
        forms.losses(lambda: job, "dp=1")


# -- 4. optimizers by name


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "tp=2", "pp=2,micro=2"])
def test_optimizers_by_name(world: Worlds, plan: str) -> None:
    expected = dict(forms.serial(small_jobs.make("mlp", optimizer=forms.decay_some), 3).named_parameters())
    for name, value in on(world, 2, forms.named_weights, plan).items():
        torch.testing.assert_close(value, expected[name].detach(), **CLOSE)


def test_optimizers_by_name_are_profiled_and_verified() -> None:
    job = small_jobs.make("mlp", optimizer=forms.decay_some)
    assert profile(job).optimizer == "AdamW"
    assert verify(job, "dp=1,micro=2", steps=2).passed


def test_an_optimizer_by_name_that_is_not_elementwise(world: Worlds) -> None:
    with pytest.raises(PlanError, match="Normalised cannot be sharded"):
        on(world, 2, forms.refused_optimizer)


# -- 5. ReduceLROnPlateau


@pytest.mark.parametrize("plan", ["dp=2,zero=1", "tp=2"])
def test_plateau(world: Worlds, plan: str) -> None:
    def after(step: int, model: nn.Module, schedule: Any, _: Any) -> None:
        if step % 2:
            schedule.step(forms.mean_loss(model))
            model.train()

    job = small_jobs.make("mlp", schedule=forms.plateau, clip=None)
    rates: list[float] = []
    model = forms.serial(job, 6, after=lambda *given: (after(*given), rates.append(given[3].param_groups[0]["lr"]))[0])
    final_rates, weights = on(world, 2, forms.plateau_run, plan)
    assert final_rates == [rates[-1]]
    assert rates[-1] < 1e-2  # it has fallen
    for name, p in model.named_parameters():
        torch.testing.assert_close(weights[name], p.detach(), **CLOSE)


def test_plateau_without_evaluations() -> None:
    with pytest.raises(JobError, match="ReduceLROnPlateau without evaluations(.|\n)*evaluate_every=n"):
        forms.trained(small_jobs.make("mlp", schedule=forms.plateau), "dp=1")


def test_plateau_of_a_metric_that_is_missing() -> None:
    job = small_jobs.make("mlp", schedule=forms.plateau, evaluate_every=1, monitor="los")
    with pytest.raises(JobError, match="Job.monitor is 'los'(.|\n)*loss"):
        forms.trained(job, "dp=1")


def test_verify_leaves_a_plateau_alone() -> None:
    assert verify(small_jobs.make("mlp", schedule=forms.plateau), "dp=1,micro=2", steps=2).passed


# -- 6. and 7. callbacks, early stop, evaluation every n steps


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,sync=local:2", "pp=2,micro=2"])
def test_callbacks(world: Worlds, plan: str) -> None:
    calls, steps = on(world, 2, forms.with_callback, plan, 4)
    assert steps == 4
    assert calls == [("step", 0), ("step", 1), ("evaluation", 2), ("step", 2), ("step", 3), ("evaluation", 4)]


def test_early_stop(world: Worlds) -> None:
    steps, messages = on(world, 2, forms.early_stop, "dp=2")
    assert steps == 2
    assert messages[-1] == "a callback ended the training after 2 steps"
    assert messages[-2].startswith("evaluation after 2 steps: loss ")


def test_early_stop_is_saved() -> None:
    one = dl.EarlyStop("accuracy", mode="max", patience=2)
    assert [one.after_evaluation(None, 0, {"accuracy": a}) for a in (0.5, 0.4, 0.6, 0.6)] == [
        False,
        False,
        False,
        False,
    ]
    two = dl.EarlyStop("accuracy", mode="max", patience=2)
    two.load_state_dict(one.state_dict())
    assert two.after_evaluation(None, 0, {"accuracy": float("nan")})
    with pytest.raises(JobError, match="waits for 'accuracy', and the evaluation has loss"):
        one.after_evaluation(None, 0, {"loss": 1.0})


def test_callbacks_that_are_none() -> None:
    with pytest.raises(JobError, match="callbacks=lambda"):
        small_jobs.make("mlp", callbacks=[dl.EarlyStop()])
    with pytest.raises(JobError, match="returns a list of drumline.Callback"):
        forms.trained(small_jobs.make("mlp", callbacks=lambda: [print]), "dp=1")


# -- 8. averaged weights


@pytest.mark.parametrize(
    "plan", ["dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "tp=2", "pp=2,micro=2", "dp=2,backend=threads"]
)
def test_averaged_weights(world: Worlds, tmp_path: Path, plan: str) -> None:
    job = small_jobs.make("mlp")
    torch.manual_seed(job.seed)
    average = {n: p.detach().double() for n, p in job.model().named_parameters()}

    def after(_: int, model: nn.Module, *__: Any) -> None:
        for n, p in model.named_parameters():
            average[n] = 0.5 * average[n] + 0.5 * p.detach()

    model = forms.serial(job, 3, after=after)
    ranks = 1 if "threads" in plan else 2
    averaged, evaluation, newest, again, loss = on(world, ranks, forms.averaged, plan, str(tmp_path / "saved"))
    for name, value in average.items():
        torch.testing.assert_close(averaged[name], value, **CLOSE)
        torch.testing.assert_close(again[name], value, **CLOSE)
    assert newest["loss"] == pytest.approx(forms.mean_loss(model), rel=1e-10)
    (micro,) = Stream(job, load_data(job)).batch(3).micros  # training goes on with the newest weights
    with torch.no_grad():
        assert loss == pytest.approx(float(F.cross_entropy(model(micro.input.double()), micro.target)), rel=1e-10)
    model.load_state_dict(average, strict=False)
    assert evaluation["loss"] == pytest.approx(forms.mean_loss(model), rel=1e-10)


@pytest.mark.parametrize("plan", ["dp=2,sync=local:2", "dp=2,sync=gossip"])
def test_averaged_weights_of_replicas(world: Worlds, plan: str) -> None:
    for averaged, expected in world(2).run(forms.averaged_replicas, plan):
        for name, value in expected.items():
            torch.testing.assert_close(averaged[name], value, **CLOSE)


def test_averaged_weights_are_exported(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from drumline.runtime.checkpoint.export import export

    averaged, *_ = forms.averaged("dp=1", str(tmp_path / "saved"))
    (file,) = export(tmp_path / "saved", tmp_path / "averaged", ema=True)
    for name, value in load_file(file).items():
        torch.testing.assert_close(value, averaged[name], rtol=0.0, atol=0.0)
    (plain,) = export(tmp_path / "saved", tmp_path / "plain")
    assert any(not torch.equal(v, averaged[k]) for k, v in load_file(plain).items())


def test_parameter_servers_have_no_average(world: Worlds) -> None:
    from drumline.plans import Plan
    from drumline.runtime.core.job_checks import check_job

    with pytest.raises(PlanError, match="ema=0.5 and callbacks under sync=async(.|\n)*allreduce"):
        check_job(small_jobs.make("mlp", ema=0.5, callbacks=list), Plan.parse("dp=2,sync=async"), None)


# -- 9. a model object, or the same model twice


def test_a_model_object() -> None:
    with pytest.raises(JobError, match=r"Job.model is a Linear, not a function(.|\n)*model=lambda: Linear"):
        small_jobs.make("mlp", model=nn.Linear(6, 3))


def test_other_objects_in_place_of_functions() -> None:
    with pytest.raises(JobError, match="Job.data is a TensorDataset(.|\n)*data=lambda: TensorDataset"):
        small_jobs.make("mlp", data=torch.utils.data.TensorDataset(torch.zeros(3)))
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(JobError, match="Job.optimizer is a SGD(.|\n)*optimizer=lambda parameters: SGD"):
        small_jobs.make("mlp", optimizer=optimizer)


@pytest.mark.parametrize("model", [forms.given_twice, forms.wrapped_twice])
def test_the_same_model_twice(model: Callable[[], nn.Module]) -> None:
    with pytest.raises(JobError, match=r"returned the same model twice(.|\n)*copy.deepcopy"):
        verify(small_jobs.make("mlp", model=model), "dp=1,micro=2", steps=1)


def test_a_copy_each_time() -> None:
    assert verify(small_jobs.make("mlp", model=forms.copied), "dp=1,micro=2", steps=1).passed


# -- 10. a loss that averages per rank


def ignoring(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean over the targets that are not ignored."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100)


def test_a_loss_that_is_no_mean_over_samples() -> None:
    text = explain(small_jobs.make("masked", loss=ignoring))
    assert text.startswith("the loss is no mean over samples: ")
    assert "return (sum, weight)" in text
    assert explain(small_jobs.make("masked")) == ""  # (sum, weight)
    assert explain(small_jobs.make("gpt")) == ""
    assert explain(small_jobs.make("cnn")) == ""  # BatchNorm: in evaluation samples do not affect each other


def test_data_that_are_not_reproducible() -> None:
    generator = torch.Generator().manual_seed(0)

    class Own:
        def __len__(self) -> int:
            return 16

        def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
            return torch.randn(6, generator=generator), i % 3

    assert explain(small_jobs.make("mlp", data=Own)).startswith("the data are not reproducible: ")


def test_a_part_whose_targets_are_all_ignored() -> None:
    """Its mean is 0 / 0: the step is refused, and the message says why before it offers to skip the step."""
    ignored = [(torch.randn(6), -100 if i % 8 < 7 else 1) for i in range(16)]
    job = small_jobs.make("mlp", data=lambda: ignored, loss=F.cross_entropy, batch_size=4)
    with pytest.raises(StoppedByGuard, match=r"nan(.|\n)*try: .*ignore_index(.|\n)*return \(sum, weight\)"):
        verify(job, "dp=1,micro=2", steps=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "code"),
    [("i % 2 if i % 3 else -100", 4), ("-100 if i % 3 else i % 2", 5)],
    ids=["some ignored", "all of a rank's part ignored"],
)
def test_verify_shows_the_explanation(tmp_path: Path, target: str, code: int) -> None:
    """Where a part has no target at all, its mean is nan, at which a guard stops; both errors name the way out."""
    import command

    (tmp_path / "job.py").write_text(
        "import torch, torch.nn.functional as F, drumline as dl\n"
        "def job():\n"
        "    g = torch.Generator().manual_seed(0)\n"
        f"    data = [(torch.randn(4, generator=g), {target}) for i in range(16)]\n"
        "    return dl.Job(model=lambda: torch.nn.Linear(4, 2), loss=F.cross_entropy, data=lambda: data, batch_size=8,\n"
        "                  optimizer=lambda p: torch.optim.SGD(p, lr=0.1))\n"
    )
    done = command.here("verify", "job.py", "--plan", "dp=2", "--steps", "2", cwd=tmp_path)
    assert done.returncode == code
    assert "return (sum, weight)" in " ".join(done.stderr.split())


# -- 11. a loader of the user's own that is not sharded


def test_every_rank_the_same_batch(world: Worlds) -> None:
    (warning,) = world(2).run(forms.same_batch, "dp=2", False)[0]
    assert "not sharded over ranks" in warning
    assert "DistributedSampler(dataset, engine.data_ranks, engine.data_index)" in warning
    assert world(2).run(forms.same_batch, "dp=2", True) == [[], []]
    assert world(2).run(forms.same_batch, "tp=2", False) == [[], []]


def test_different_batches_for_one_copy(world: Worlds) -> None:
    with pytest.raises(JobError, match="ranks 0 and 1 were given different batches(.|\n)*engine.data_index"):
        world(2).run(forms.same_batch, "tp=2", True)


# -- 12. clip_grad_norm_ by hand


@pytest.mark.parametrize(("zero", "micro"), [(1, 1), (2, 1), (0, 2), (1, 2), (2, 2)])
def test_clip_by_hand_is_refused(world: Worlds, zero: int, micro: int) -> None:
    assert len(world(2).run(forms.clip_by_hand, zero, "none", micro)[0]) == 3
    with pytest.raises(JobError, match="between backward\\(\\) and step\\(\\)(.|\n)*gradient_clipping"):
        world(2).run(forms.clip_by_hand, zero, "by hand", micro)


@pytest.mark.parametrize("zero", [0, 3])
def test_clip_by_hand_works_where_gradients_are_final(world: Worlds, zero: int) -> None:
    plain, by_hand, by_config = (
        world(2).run(forms.clip_by_hand, zero, clip)[0] for clip in ("none", "by hand", "config")
    )
    assert by_hand == pytest.approx(by_config, rel=1e-6)
    assert plain[0] == by_hand[0] and plain[1] != pytest.approx(by_hand[1], rel=1e-3)


def test_gradients_that_were_sent_cannot_be_used(world: Worlds) -> None:
    everything = ["norm", "foreach", "data", "in place", "float"]
    assert world(2).run(forms.use_sent_gradients) == [everything, everything]
