"""The vectorised closed form: it counts what the profile counts, its parts follow the layout, and one call prices all."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import numpy as np
import pytest
from drumline.costs.fitted.chips import type_of
from drumline.costs.fitted.constants_file import FittedConstants, load_constants

from drumline.clusters import load
from drumline.core.errors import ClusterError, InputError
from drumline.costs import estimate
from drumline.costs.fitted import (
    Constants,
    Layouts,
    Machines,
    Models,
    constants_for,
    machines_for,
    recomputed,
    step_memory,
    step_times,
)
from drumline.costs.fitted.compute import layer_flops
from drumline.costs.fitted.constants import PRIOR
from drumline.costs.fitted.inputs import SCHEDULES
from drumline.costs.fitted.memory import DEVICE, RESERVED, in_flight
from drumline.costs.fitted.stages import stages
from drumline.costs.fitted.step import PARTS
from drumline.models import zoo
from drumline.plans import Plan

GPT = {
    "layers": 24,
    "hidden": 2048,
    "heads": 16,
    "kv_heads": 16,
    "inner": 8192,
    "gated": 0,
    "vocabulary": 50257,
    "tied": 1,
    "sequence": 2048,
}
LLAMA = {
    "layers": 32,
    "hidden": 4096,
    "heads": 32,
    "kv_heads": 8,
    "inner": 14336,
    "gated": 1,
    "vocabulary": 128256,
    "tied": 0,
    "sequence": 8192,
}
LAYOUT = {
    "tp": 1,
    "pp": 1,
    "virtual": 1,
    "dp": 8,
    "zero": 0,
    "shard": 8,
    "cp": 1,
    "ep": 1,
    "sequence_split": 0,
    "slice": 1,
    "micro": 8,
    "again_products": 0,
    "again_attention": 0,
    "again_passes": 0,
    "order": 2,
    "fused": 1,
    "fusion": 0,
    "low": 0,
    "gradient": 4,
    "master": 1,
    "added": 1,
    "copied": 0,
    "overlap_dp": 1,
    "overlap_tp": 0,
    "wire": 4,
    "spread": 2,
    "ahead": 1,
    "scattered": 1,
    "often": 0,
}


def models(**numbers: Any) -> Models:
    return Models.of(**{"causal": 1, "predicted": 1, "experts": 1, "active": 1, **numbers})


def layouts(**numbers: Any) -> Layouts:
    return Layouts.of(**{**LAYOUT, **numbers})


def a100(n: int = 1) -> Machines:
    return machines_for(load("dgx-a100"), "bf16").take(np.zeros(n, dtype=np.intp))


def seconds(part: str = "total", *, model: dict[str, Any] = GPT, **numbers: Any) -> Any:
    shape = layouts(**numbers)
    n = len(shape.tp)
    found = step_times(models(**model).take(np.zeros(n, dtype=np.intp)), shape, a100(n), Constants())
    value = getattr(found, part)
    return value if n > 1 else float(value[0])


@pytest.mark.parametrize(
    ("name", "numbers", "small"),
    [
        ("gpt:1.3b", GPT, 24 * 13 * 2048 + 2 * 2048 + 2048 * 2048),  # biases and norms, the last norm, positions
        ("llama:8b", LLAMA, 32 * 2 * 4096 + 4096),  # norms
    ],
)
def test_it_counts_what_the_profile_counts(name: str, numbers: dict[str, int], small: int) -> None:
    profile, model = zoo.profile(name, batch_size=8), models(**numbers)
    assert profile.parameters == model.weights[0] + small
    forward = (model.layers * layer_flops(model) + 2 * model.table_weights)[0] * numbers["sequence"]
    assert profile.flops("forward").at(1) == pytest.approx(forward)


def test_it_holds_what_the_other_closed_form_holds() -> None:
    """States under zero=3 and zero=1 as `cost.step.estimate` has them: 16-bit copies and fp32 sums, or fp32 throughout."""
    profile, cluster = zoo.profile("gpt:1.3b", batch_size=64), load("dgx-a100").with_devices(8)
    e = estimate(profile, Plan.parse("dp=8,zero=3,micro=8,precision=bf16"), cluster)
    held = step_memory(models(**GPT), layouts(zero=3, master=0), Constants())
    for part in ("parameters", "gradients", "optimizer"):
        assert getattr(held, part)[0] == pytest.approx(e.memory_parts[part], rel=0.01)


def test_it_is_near_the_other_closed_form() -> None:
    """Two ways to the same step, a data sheet and a fit, within the bound that both state."""
    profile, cluster = zoo.profile("gpt:1.3b", batch_size=64), load("dgx-a100").with_devices(8)
    e = estimate(profile, Plan.parse("dp=8,micro=8,precision=bf16"), cluster)
    found = step_times(models(**GPT), layouts(), machines_for(cluster, "bf16"), constants_for(cluster))
    assert found.total[0] == pytest.approx(e.step_seconds, rel=e.error)


def test_parts_add_up_and_are_never_negative() -> None:
    found = step_times(models(**GPT), layouts(tp=2, pp=2, zero=1), a100(), Constants())
    parts = [getattr(found, name)[0] for name in PARTS]
    assert min(parts) >= 0 and sum(parts) == pytest.approx(found.total[0])


def test_each_choice_moves_its_part() -> None:
    assert seconds("tp", tp=1) == 0 < seconds("tp", tp=2) < seconds("tp", tp=8)
    assert seconds("tp", tp=8, overlap_tp=1) < seconds("tp", tp=8)
    assert seconds("tp", tp=32, dp=1) > 1.5 * seconds("tp", tp=8, dp=1)  # through the ports
    assert seconds("dp", dp=1) == 0 < seconds("dp", overlap_dp=1) < seconds("dp", overlap_dp=0)
    assert seconds("dp", zero=3, micro=8) > seconds("dp", zero=3, micro=1)
    again = dict(zip(("again_products", "again_attention", "again_passes"), recomputed("full"), strict=True))
    assert seconds("recompute") == 0 and seconds("recompute", **again) == pytest.approx(seconds("forward"), rel=0.25)
    assert seconds("cp", cp=2, dp=4) > 0 and seconds("ep", model={**GPT, "experts": 8, "active": 2}, ep=4) > 0
    assert seconds("optimizer", zero=1) == pytest.approx(seconds("optimizer", zero=0) / 8)


def test_gradients_that_the_host_hands_over_cost_it_time_for_every_layer_and_micro_batch() -> None:
    moved = {"copied": [0, 1], "added": 1}  # no pass over the gradients: only the hooks are left
    for micro, layers in ((8, 24), (16, 24), (8, 12)):
        plain, handed = seconds("backward", model={**GPT, "layers": layers}, micro=micro, **moved)
        assert handed - plain == pytest.approx(micro * layers * PRIOR["hooks"])
    plain, copied = seconds("backward", copied=[0, 1], added=0)
    assert copied - plain > 8 * 24 * PRIOR["hooks"]  # and a copy moves them once more


def test_stages_in_two_nodes_send_through_the_ports_however_few_ranks_a_stage_has() -> None:
    inside, across = seconds("pp", pp=[8, 16], tp=1, dp=1, micro=32)
    assert across > 3 * inside  # a port of 25 GB/s a rank, links of 300
    assert across == pytest.approx(seconds("pp", pp=16, tp=1, dp=8, micro=32))


def test_bubbles_by_order() -> None:
    by = {
        name: seconds("bubble", pp=4, dp=1, order=i, virtual=2 if name == "interleaved" else 1)
        for i, name in enumerate(SCHEDULES)
    }
    assert by["zero-bubble-2p"] == 0 < by["zero-bubble"] < by["interleaved"] < by["1f1b"] == by["gpipe"]
    # (p-1)/m of the work, where all stages are alike: a vocabulary of few words
    even = {**GPT, "vocabulary": 64}
    work = seconds("forward", model=even, pp=4, dp=1, micro=32) + seconds("backward", model=even, pp=4, dp=1, micro=32)
    assert seconds("bubble", model=even, pp=4, dp=1, micro=32) == pytest.approx(3 / 32 * work, rel=0.02)


def test_layers_are_dealt_to_stages() -> None:
    found = stages(models(**{**GPT, "layers": [24, 22, 26]}), layouts(pp=[8, 8, 4]))
    assert found.first.tolist() == [3, 2, 6] and found.inner.tolist() == [3, 3, 7]


def test_micro_batches_in_flight() -> None:
    shape = layouts(
        pp=8,
        micro=64,
        virtual=[1, 1, 4, 1],
        order=[SCHEDULES.index(x) for x in ("1f1b", "gpipe", "interleaved", "zero-bubble-2p")],
    )
    assert in_flight(shape, 0).tolist() == [8, 64, 8 + 7 / 4, 15]
    assert in_flight(layouts(pp=8, micro=3, order=2), 0).tolist() == [3]


def test_activations_as_published_formulas_say() -> None:
    """Without recomputation 34 sbh + 5 a s^2 b bytes a layer; tensor parallelism leaves 10 sbh whole, or splits it all."""
    s, h, a = 2048, 6144, 64
    big = models(**{**GPT, "layers": 1, "hidden": h, "heads": a, "kv_heads": a, "inner": 4 * h})
    for tp, split, bytes_ in (
        (1, 0, 34 * h + 5 * a * s),
        (8, 0, 10 * h + (24 * h + 5 * a * s) / 8),
        (8, 1, (34 * h + 5 * a * s) / 8),
    ):
        held = step_memory(big, layouts(tp=tp, sequence_split=split, fused=0, gradient=2), Constants(), counted=0)
        assert held.activations[0] == pytest.approx(s * bytes_)


def test_what_is_counted() -> None:
    alive, reserved, whole = (
        step_memory(models(**GPT), layouts(), Constants(), counted=kind, context=1.6e9).total[0]
        for kind in (1, RESERVED, DEVICE)
    )
    assert alive < reserved < whole - 1.6e9


def test_heads_that_tensor_cores_do_not_like_are_slow() -> None:
    odd = {**GPT, "hidden": 13824, "inner": 4 * 13824, "sequence": 2048}
    slow, fast = (seconds(model={**odd, "heads": heads, "kv_heads": heads}, tp=8, dp=1, fused=0) for heads in (128, 64))
    assert slow > 1.15 * fast  # heads of 108 against 216


def test_a_hundred_thousand_layouts_are_as_many_calls_as_ten() -> None:
    """Speed, counted: no loop over candidates anywhere."""

    def calls(n: int) -> int:
        count = 0

        def note(frame: FrameType, event: str, _: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        choice = np.random.default_rng(0).choice
        shape = layouts(
            tp=choice([1, 2, 4, 8], n), pp=choice([1, 2, 4], n), slice=choice([1, 2, 4], n), zero=choice([0, 1, 3], n)
        )
        model, machines = models(**GPT).take(np.zeros(n, dtype=np.intp)), a100(n)
        sys.setprofile(note)
        try:
            found = step_times(model, shape, machines, Constants())
            step_memory(model, shape, Constants())
        finally:
            sys.setprofile(None)
        assert len(found.total) == n and np.isfinite(found.total).all()
        return count

    assert calls(100_000) == calls(10) < 5000


def test_names_of_devices() -> None:
    names = {
        "A100-80GB-SXM": "A100",
        "A100-40GB-SXM": "A100-40",
        "H100-SXM-80GB": "H100",
        "H100 PCIe 80GB": "H100-PCIe",
        "GB200-186GB": "GB200",
        "V100-32GB-SXM3": "V100",
        "MI300X-192GB": "MI300X",
        "RTX-4090-24GB": "RTX4090",
        "A1000": None,
        "TPU v4": None,
    }
    assert {name: type_of(name) for name in names} == names


def test_every_device_of_the_catalogue_has_a_profile() -> None:
    profiles = load_constants()
    for name in ("dgx-v100", "p4d", "a800", "dgx-h200", "hgx-b200", "mi300x", "rtx4090"):
        constants = constants_for(load(name))
        assert 0.2 < float(constants.products) < 1 and type_of(load(name).device.name) in profiles.device
    assert (
        profiles.of("X999", 0.5)["products"] < profiles.of("X999", 0.8)["products"]
    )  # never seen: by its best product
    with pytest.raises(ClusterError, match="has no fp8"):
        machines_for(load("dgx-a100"), "fp8")


def test_a_profile_file_with_an_unknown_constant_is_refused(tmp_path: Any) -> None:
    path = tmp_path / "mine.toml"
    Profiles(shared={"product": 0.8}, device={}).save(path, "by hand")
    with pytest.raises(InputError) as caught:
        load_constants(path)
    assert (
        "unknown constant 'product'" in str(caught.value)
        and f"{path}: shared" in str(caught.value)
        and "'products'" in str(caught.value)
    )
