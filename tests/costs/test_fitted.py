"""The vectorised cost model: it agrees with the profile, its parts follow the layout, one call prices all rows."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import numpy as np
import pytest

from drumline.clusters import load
from drumline.core.errors import ClusterError, InputError
from drumline.costs import estimate
from drumline.costs.fitted import (
    Constants,
    LayoutColumns,
    MachineColumns,
    ModelColumns,
    constants_for,
    machine_for,
    recompute_fractions,
    step_memory,
    step_times,
)
from drumline.costs.fitted.compute import layer_flops
from drumline.costs.fitted.constants import PRIOR
from drumline.costs.fitted.constants_file import FittedConstants, load_constants
from drumline.costs.fitted.devices import device_type
from drumline.costs.fitted.memory import DEVICE, RESERVED, in_flight
from drumline.costs.fitted.stages import stage_sizes
from drumline.costs.fitted.step import PARTS
from drumline.costs.plan_columns import SCHEDULES
from drumline.models import zoo
from drumline.plans import Plan

GPT = {
    "layers": 24,
    "hidden": 2048,
    "heads": 16,
    "kv_heads": 16,
    "ffn": 8192,
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
    "ffn": 14336,
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
    "sequence_parallel": 0,
    "micro_batch_size": 1,
    "micro": 8,
    "recompute_matmuls": 0,
    "recompute_attention": 0,
    "recompute_elementwise": 0,
    "schedule": 2,
    "fused_attention": 1,
    "portable_attention": 0,
    "overlap_ep": 0,
    "elementwise_fusion": 0,
    "fp8": 0,
    "gradient_bytes": 4,
    "master_weights": 1,
    "fused_accumulation": 1,
    "flat_buffers": 0,
    "overlap_dp": 1,
    "overlap_tp": 0,
    "gradient_message_bytes": 4,
    "parameter_message_bytes": 2,
    "overlap_parameters": 1,
    "reduce_scatter": 1,
    "reduce_every_micro_batch": 0,
}


def models(**numbers: Any) -> ModelColumns:
    return ModelColumns.of(**{"causal": 1, "predicted_fraction": 1, "experts": 1, "active_experts": 1, **numbers})


def layouts(**numbers: Any) -> LayoutColumns:
    return LayoutColumns.of(**{**LAYOUT, **numbers})


def a100(n: int = 1) -> MachineColumns:
    return machine_for(load("dgx-a100"), "bf16").take(np.zeros(n, dtype=np.intp))


def seconds(part: str = "total", *, model: dict[str, Any] = GPT, **numbers: Any) -> Any:
    shape = layouts(**numbers)
    n = len(shape.tp)
    times = step_times(models(**model).take(np.zeros(n, dtype=np.intp)), shape, a100(n), Constants())
    value = getattr(times, part)
    return value if n > 1 else float(value[0])


@pytest.mark.parametrize(
    ("name", "numbers", "small"),
    [
        ("gpt:1.3b", GPT, 24 * 13 * 2048 + 2 * 2048 + 2048 * 2048),  # biases and norms, the last norm, positions
        ("llama:8b", LLAMA, 32 * 2 * 4096 + 4096),  # norms
    ],
)
def test_parameters_and_flops_are_those_of_the_profile(name: str, numbers: dict[str, int], small: int) -> None:
    profile, model = zoo.profile(name, batch_size=8), models(**numbers)
    assert profile.parameters == model.weights[0] + small
    forward = (model.layers * layer_flops(model) + 2 * model.embedding_weights)[0] * numbers["sequence"]
    assert profile.flops("forward").at(1) == pytest.approx(forward)


def test_states_are_those_of_the_operator_model() -> None:
    """Parameters, gradients and optimizer state under zero=3 in fp32."""
    profile, cluster = zoo.profile("gpt:1.3b", batch_size=64), load("dgx-a100").with_devices(8)
    e = estimate(profile, Plan.parse("dp=8,zero=3,micro=8,precision=bf16"), cluster)
    memory = step_memory(models(**GPT), layouts(zero=3, master_weights=0), Constants())
    for part in ("parameters", "gradients", "optimizer"):
        assert getattr(memory, part)[0] == pytest.approx(e.memory_parts[part], rel=0.01)


def test_times_are_close_to_the_operator_model() -> None:
    """Data sheet and fit agree within their stated error."""
    profile, cluster = zoo.profile("gpt:1.3b", batch_size=64), load("dgx-a100").with_devices(8)
    e = estimate(profile, Plan.parse("dp=8,micro=8,precision=bf16"), cluster)
    times = step_times(models(**GPT), layouts(), machine_for(cluster, "bf16"), constants_for(cluster))
    assert times.total[0] == pytest.approx(e.step_seconds, rel=e.error)


def test_parts_add_up_and_are_never_negative() -> None:
    times = step_times(models(**GPT), layouts(tp=2, pp=2, zero=1), a100(), Constants())
    parts = [getattr(times, name)[0] for name in PARTS]
    assert min(parts) >= 0 and sum(parts) == pytest.approx(times.total[0])


def test_each_choice_changes_its_part() -> None:
    assert seconds("tp", tp=1) == 0 < seconds("tp", tp=2) < seconds("tp", tp=8)
    assert seconds("tp", tp=8, overlap_tp=1) < seconds("tp", tp=8)
    assert seconds("tp", tp=32, dp=1) > 1.5 * seconds("tp", tp=8, dp=1)  # through the ports
    assert seconds("dp", dp=1) == 0 < seconds("dp", overlap_dp=1) < seconds("dp", overlap_dp=0)
    assert seconds("dp", zero=3, micro=8) > seconds("dp", zero=3, micro=1)
    again = dict(
        zip(
            ("recompute_matmuls", "recompute_attention", "recompute_elementwise"),
            recompute_fractions("full"),
            strict=True,
        )
    )
    assert seconds("recompute") == 0 and seconds("recompute", **again) == pytest.approx(seconds("forward"), rel=0.25)
    assert seconds("cp", cp=2, dp=4) > 0 and seconds("ep", model={**GPT, "experts": 8, "active_experts": 2}, ep=4) > 0
    assert seconds("optimizer", zero=1) == pytest.approx(seconds("optimizer", zero=0) / 8)


def test_gradient_hooks_cost_time_per_layer_and_micro_batch() -> None:
    hooks_only = {"flat_buffers": [0, 1], "fused_accumulation": 1}  # no accumulation kernel: only the hooks are left
    for micro, layers in ((8, 24), (16, 24), (8, 12)):
        plain, hooked = seconds("backward", model={**GPT, "layers": layers}, micro=micro, **hooks_only)
        assert hooked - plain == pytest.approx(micro * layers * PRIOR["gradient_hooks"])
    plain, copied = seconds("backward", flat_buffers=[0, 1], fused_accumulation=0)
    assert copied - plain > 8 * 24 * PRIOR["gradient_hooks"]  # and a copy moves them once more


def test_stages_on_different_nodes_send_over_the_network() -> None:
    inside, across = seconds("pp", pp=[8, 16], tp=1, dp=1, micro=32)
    assert across > 3 * inside  # a port of 25 GB/s a rank, links of 300
    assert across == pytest.approx(seconds("pp", pp=16, tp=1, dp=8, micro=32))


def test_bubbles_by_schedule() -> None:
    by = {
        name: seconds("bubble", pp=4, dp=1, schedule=i, virtual=2 if name == "interleaved" else 1)
        for i, name in enumerate(SCHEDULES)
    }
    assert by["zero-bubble-2p"] == 0 < by["zero-bubble"] < by["interleaved"] < by["1f1b"] == by["gpipe"]
    # (p-1)/m of the work where all stages are equal: a small vocabulary
    even = {**GPT, "vocabulary": 64}
    work = seconds("forward", model=even, pp=4, dp=1, micro=32) + seconds("backward", model=even, pp=4, dp=1, micro=32)
    assert seconds("bubble", model=even, pp=4, dp=1, micro=32) == pytest.approx(3 / 32 * work, rel=0.02)


def test_layers_per_stage() -> None:
    sizes = stage_sizes(models(**{**GPT, "layers": [24, 22, 26]}), layouts(pp=[8, 8, 4]))
    assert sizes.first.tolist() == [3, 2, 6] and sizes.inner.tolist() == [3, 3, 7]


def test_micro_batches_in_flight() -> None:
    shape = layouts(
        pp=8,
        micro=64,
        virtual=[1, 1, 4, 1],
        schedule=[SCHEDULES.index(x) for x in ("1f1b", "gpipe", "interleaved", "zero-bubble-2p")],
    )
    assert in_flight(shape, 0).tolist() == [8, 64, 8 + 7 / 4, 15]
    assert in_flight(layouts(pp=8, micro=3, schedule=2), 0).tolist() == [3]


def test_activations_match_published_formulas() -> None:
    """34 sbh + 5 a s^2 b bytes per layer; tensor parallelism leaves 10 sbh whole, sequence parallelism splits all."""
    s, h, a = 2048, 6144, 64
    big = models(**{**GPT, "layers": 1, "hidden": h, "heads": a, "kv_heads": a, "ffn": 4 * h})
    for tp, split, bytes_ in (
        (1, 0, 34 * h + 5 * a * s),
        (8, 0, 10 * h + (24 * h + 5 * a * s) / 8),
        (8, 1, (34 * h + 5 * a * s) / 8),
    ):
        memory = step_memory(
            big, layouts(tp=tp, sequence_parallel=split, fused_attention=0, gradient_bytes=2), Constants(), kind=0
        )
        assert memory.activations[0] == pytest.approx(s * bytes_)


def test_kinds_of_memory() -> None:
    alive, reserved, whole = (
        step_memory(models(**GPT), layouts(), Constants(), kind=kind, context=1.6e9).total[0]
        for kind in (1, RESERVED, DEVICE)
    )
    assert alive < reserved < whole - 1.6e9


def test_misaligned_heads_are_slow() -> None:
    odd = {**GPT, "hidden": 13824, "ffn": 4 * 13824, "sequence": 2048}
    slow, fast = (
        seconds(model={**odd, "heads": heads, "kv_heads": heads}, tp=8, dp=1, fused_attention=0) for heads in (128, 64)
    )
    assert slow > 1.15 * fast  # heads of 108 against 216


def test_100_000_layouts_take_as_many_calls_as_10() -> None:
    """Speed, counted: no loop over candidates anywhere."""

    def calls(n: int) -> int:
        count = 0

        def note(frame: FrameType, event: str, _: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        choice = np.random.default_rng(0).choice
        shape = layouts(
            tp=choice([1, 2, 4, 8], n),
            pp=choice([1, 2, 4], n),
            micro_batch_size=choice([1, 2, 4], n),
            zero=choice([0, 1, 3], n),
        )
        model, machines = models(**GPT).take(np.zeros(n, dtype=np.intp)), a100(n)
        sys.setprofile(note)
        try:
            times = step_times(model, shape, machines, Constants())
            step_memory(model, shape, Constants())
        finally:
            sys.setprofile(None)
        assert len(times.total) == n and np.isfinite(times.total).all()
        return count

    assert calls(100_000) == calls(10) < 5000


def test_device_types() -> None:
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
    assert {name: device_type(name) for name in names} == names


def test_every_device_of_the_catalogue_has_constants() -> None:
    fitted = load_constants()
    for name in ("dgx-v100", "p4d", "a800", "dgx-h200", "hgx-b200", "mi300x", "rtx4090"):
        constants = constants_for(load(name))
        assert 0.2 < float(constants.matmul) < 1 and device_type(load(name).device.name) in fitted.device
    assert fitted.of("X999", 0.5)["matmul"] < fitted.of("X999", 0.8)["matmul"]  # unseen: by its best matmul
    with pytest.raises(ClusterError, match="has no fp8"):
        machine_for(load("dgx-a100"), "fp8")


def test_unknown_constants_are_refused(tmp_path: Any) -> None:
    path = tmp_path / "mine.toml"
    FittedConstants(shared={"matmull": 0.8}, device={}).save(path, "by hand")
    with pytest.raises(InputError) as caught:
        load_constants(path)
    assert (
        "unknown constant 'matmull'" in str(caught.value)
        and f"{path}: shared" in str(caught.value)
        and "'matmul'" in str(caught.value)
    )


def test_constants_by_their_old_names_still_load(tmp_path: Any) -> None:
    path = tmp_path / "old.toml"
    path.write_text(
        '[shared]\nproducts = 0.7\npasses_eager = 1.5\n[device.A100]\norigin = "x"\nconstants = { hooks = 1e-3 }\n'
    )
    old = load_constants(path)
    assert old.shared == {"matmul": 0.7, "elementwise_eager": 1.5}
    assert old.device["A100"].constants == {"gradient_hooks": 1e-3}
