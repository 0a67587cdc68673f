"""Reading published runs: complete rows, rows that lack something, and malformed files."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_rows import table

from drumline.core.errors import InputError
from drumline.costs.plan_columns import SCHEDULES
from drumline.validation import run_text
from drumline.validation.datasheets import (
    parse_datasheet,
    parse_link_domain,
    parse_network_bandwidth,
    parse_node_bandwidth,
)
from drumline.validation.published_run import PublishedRun
from drumline.validation.read_runs import COLUMNS, read_runs
from drumline.validation.run_columns import run_columns


def one(folder: Path, **change: str) -> PublishedRun:
    runs, skipped = read_runs(table(folder, change))
    assert not skipped, skipped
    return runs[0]


def reason(folder: Path, **change: str) -> str:
    runs, skipped = read_runs(table(folder, {}, change))
    assert len(runs) == 1 and skipped[0].line == 3 and skipped[0].key
    return skipped[0].reason


def test_a_complete_row(tmp_path: Path) -> None:
    run = one(tmp_path)
    assert (run.micro, run.seconds, run.gated, run.tied, run.sheet.type) == (2, 2.0, False, True, "A100")
    assert run.link == 300e9 and run.network == 200e9 and run.software.fused_attention and run.line == 2


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"heads": ""}, "heads is empty"),
        ({"n_gpus": "128..512"}, "n_gpus is '128..512', not a number"),
        ({"tp": "auto (plan over 8)"}, "tp is 'auto (plan over 8)', not a number"),
        ({"dp": "4"}, "dp(4) * tp(1) * pp(1) * cp(1) is not n_gpus(8)"),
        ({"global_batch": "16"}, "global_batch(16) is less than dp(8) * micro_batch(4)"),
        ({"recompute": "some"}, "recompute is 'some'"),
        ({"zero_fsdp": "gone"}, "zero_fsdp is 'gone'"),
        ({"precision": "fp8"}, "precision is 'fp8', A100 has"),
        ({"iteration_time_s": ""}, "no time, no throughput and no memory was published"),
        ({"iteration_time_s": "0.1"}, "TFLOP/s at least, where A100 has 312 in bf16"),
        ({"gpu": "TPU v4"}, "unknown GPU 'TPU v4'"),
        ({"ep": "8"}, "ep is 8, and no column has the experts"),
        ({"params_b": "8.5"}, "params_b is 8.5, a dense model of this shape has"),
    ],
)
def test_incomplete_rows_are_listed_with_the_reason(tmp_path: Path, change: dict[str, str], text: str) -> None:
    assert text in reason(tmp_path, **change)


@pytest.mark.parametrize(
    ("change", "key", "text"),
    [
        ({"layers": "many"}, "layers", "layers is 'many'"),
        ({"iteration_time_s": "2,0 s"}, "iteration_time_s", "a number, or nothing"),
        ({"hidden": "-4"}, "hidden", "more than 0"),
        ({"heads": "16.5"}, "heads", "a whole number"),
        ({"memory_gb_per_gpu": "all"}, "memory_gb_per_gpu", "memory_gb_per_gpu is 'all'"),
    ],
)
def test_malformed_cells_are_named_with_file_line_and_column(
    tmp_path: Path, change: dict[str, str], key: str, text: str
) -> None:
    path = table(tmp_path, {}, change)
    with pytest.raises(InputError) as caught:
        read_runs(path)
    assert text in str(caught.value) and caught.value.where == f"{path}: line 3: {key}" and caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("change", "key", "text"),
    [({"gpu": "A10000"}, "gpu", "unknown GPU 'A10000'"), ({"vocab": ""}, "vocab", "vocab is empty")],
)
def test_a_file_without_usable_rows(tmp_path: Path, change: dict[str, str], key: str, text: str) -> None:
    path = table(tmp_path, change)
    with pytest.raises(InputError) as caught:
        read_runs(path)
    assert f"no row can be predicted: {text}" in caught.value.what and caught.value.where == f"{path}: line 2: {key}"


def test_remarks_around_a_number(tmp_path: Path) -> None:
    run = one(tmp_path, layers="24 (assumed)", iteration_time_s="~2.5", vpp="NA")
    assert run.layers == 24 and run.seconds == 2.5 and run.virtual == 1


def test_a_missing_column_is_named_with_the_closest_one(tmp_path: Path) -> None:
    path = table(tmp_path, {}, columns=tuple(c.replace("micro_batch", "micro_batches") for c in COLUMNS))
    with pytest.raises(InputError) as caught:
        read_runs(path)
    assert "column 'micro_batch' is missing" in str(caught.value) and f"{path}: line 1" in str(caught.value)
    assert "'micro_batches'" in caught.value.fix


def test_a_row_with_too_few_values(tmp_path: Path) -> None:
    path = table(tmp_path, {})
    path.write_text(path.read_text() + "short,row\n")
    with pytest.raises(InputError, match="fewer values than columns"):
        read_runs(path)


def test_times_and_memories(tmp_path: Path) -> None:
    assert one(tmp_path, iteration_time_s="", tokens_per_s_per_gpu="8192").seconds == 64 * 2048 / 8192 / 8
    assert one(tmp_path, iteration_time_s="", samples_per_s="32").seconds == 2
    kinds = {
        "GiB peak allocated": "allocated",
        "GB nvidia-smi on first/last node": "smi",
        "GiB analytic": "analytic",
        "GB peak": "reserved",
        "GB max over stages": "allocated",
    }
    for text, kind in kinds.items():
        run = one(tmp_path, memory_gb_per_gpu="10", memory_kind=text)
        assert run.memory_kind == kind and run.memory == 10 * (
            2**30 if text.startswith("GiB") or "smi" in text else 1e9
        )
    assert one(tmp_path, memory_gb_per_gpu="10", memory_kind="GB peak (rank shown)").first_rank


def test_gated_and_tied_models(tmp_path: Path) -> None:
    llama = {
        "model_family": "llama3-8b",
        "params_b": "8.03",
        "layers": "32",
        "hidden": "4096",
        "heads": "32",
        "kv_heads": "8",
        "ffn": "14336",
        "vocab": "128256",
    }
    assert (one(tmp_path, **llama).gated, one(tmp_path, **llama).tied) == (True, False)
    tied = {
        "model_family": "llama-style (MHA, tied emb.)",
        "params_b": "1.342",
        "layers": "16",
        "heads": "32",
        "kv_heads": "32",
        "vocab": "131072",
    }
    assert (one(tmp_path, **tied).gated, one(tmp_path, **tied).tied) == (True, True)
    assert not one(tmp_path, model_family="bert-large").causal


def test_parsing_of_free_text() -> None:
    assert [
        run_text.parse_zero(x)
        for x in ("0", "1 (distributed optimizer)", "FSDP full shard (3)", "HSDP (shard within node)", "?")
    ] == [0, 1, 3, 3, None]
    assert [run_text.parse_zero(x) for x in ("FSDP2 (3)", "FSDP2", "zero1", "ZeRO-2", "DDP", "3 + CPU offload")] == [
        3,
        3,
        1,
        2,
        0,
        3,
    ]
    assert [run_text.parse_shard(x, 64, 8) for x in ("FSDP (3)", "HSDP (shard within node)", "FSDP (3) within 16")] == [
        64,
        8,
        16,
    ]
    assert [
        run_text.parse_recompute(x)
        for x in ("none (assumed)", "full", "selective (op)", "selective (every 2nd layer)", "selective", "")
    ] == ["none", "full", "operators", "half", "selective", None]
    names = [
        run_text.parse_precision(x)
        for x in (
            "amp_bf16 DEFAULT",
            "fp16 mixed",
            "float8 tensorwise, torch.compile",
            "float8 rowwise",
            "TF32",
            "mixed (fp16/bf16 not stated)",
            "?",
        )
    ]
    assert names == ["bf16", "fp16", "fp8", "bf16", "tf32", "fp16", None]
    orders = [
        SCHEDULES[run_text.parse_schedule(x, pp, v)]
        for x, pp, v in (
            ("1f1b", 1, 1),
            ("1F1B", 8, 1),
            ("interleaved-1f1b", 8, 3),
            ("ZB-1p", 8, 1),
            ("ZB-2p", 8, 1),
            ("gpipe", 4, 1),
        )
    ]
    assert orders == ["none", "1f1b", "interleaved", "zero-bubble", "zero-bubble-2p", "gpipe"]


@pytest.mark.parametrize(
    ("change", "key", "value"),
    [
        ({"year": "2021", "precision": "fp16"}, "fused_attention", False),
        ({"year": "2021", "precision": "fp16", "note": "FlashAttention"}, "fused_attention", True),
        ({"zero_fsdp": "FSDP (3)", "precision": "bf16, torch.compile"}, "elementwise_fusion", 2),
        ({"zero_fsdp": "FSDP (3)"}, "elementwise_fusion", 1),
        ({"zero_fsdp": "1 (distributed optimizer)"}, "elementwise_fusion", 0),
        ({"zero_fsdp": "1 (distributed optimizer)"}, "overlap_tp", True),
        ({"zero_fsdp": "1 (distributed optimizer)", "note": "no comm overlap"}, "overlap_tp", False),
        ({"zero_fsdp": "1 (DeepSpeed)", "year": "2022"}, "flat_buffers", True),
        ({"precision": "bf16 PURE"}, "gradient_bytes", 2.0),
    ],
)
def test_inferred_software(tmp_path: Path, change: dict[str, str], key: str, value: object) -> None:
    assert getattr(one(tmp_path, **change).software, key) == value


def test_parsing_of_links() -> None:
    a100, gb200 = parse_datasheet("A100-80GB-SXM", "here"), parse_datasheet("GB200-186GB", "here")
    assert parse_network_bandwidth("8x HDR IB 200 Gb/s per node", a100, 8, 8) == 200e9
    assert parse_network_bandwidth("RDMA 400 Gb/s per GPU", a100, 8, 8) == 400e9
    assert parse_network_bandwidth("800 Gb/s per node (4x HDR IB)", a100, 8, 8) == 100e9
    assert parse_network_bandwidth("not stated", a100, 8, 8) == a100.network
    assert parse_network_bandwidth("4x Omni-Path 100 Gb/s per node", a100, 8, 8) == pytest.approx(
        0.65 * 50e9
    )  # its protocol runs on the host
    assert parse_network_bandwidth("4x HDR IB (2 switches)", a100, 8, 8) == 100e9
    assert (
        parse_link_domain("NVLink5 NVL72 1800 GB/s bidir", 4) == 72
        and parse_network_bandwidth("", gb200, 4, 72) == gb200.network
    )
    assert parse_node_bandwidth("", a100) == a100.link
    assert parse_datasheet("H100-96GB-SXM HBM2e 500W", "here").power == pytest.approx(500 / 700)


def test_rows_become_columns(tmp_path: Path) -> None:
    runs, _ = read_runs(table(tmp_path, {}, {"tp": "2", "dp": "4", "iteration_time_s": "", "memory_gb_per_gpu": "20"}))
    columns = run_columns(runs)
    assert columns.layouts.tp.tolist() == [1, 2] and columns.layouts.micro.tolist() == [2, 4]
    assert columns.seconds[0] == 2 and columns.seconds[1] != columns.seconds[1] and columns.memory[1] == 20e9


MIXTURE = {
    "model_family": "deepseek-v3 MoE",
    "params_b": "",
    "ffn": "",
    "zero_fsdp": "1",
    "ep": "4",
    "experts": "16",
    "experts_active": "4",
    "expert_ffn": "512",
    "experts_shared": "1",
    "dense_layers": "3",
}
WITH_EXPERTS = (*COLUMNS, "experts", "experts_active", "expert_ffn", "experts_shared", "dense_layers")


def test_a_mixture_has_its_experts_and_latent_attention(tmp_path: Path) -> None:
    run = read_runs(table(tmp_path, MIXTURE, columns=WITH_EXPERTS))[0][0]
    assert run.mixture is not None and run.latent and run.ep == 4
    assert (run.mixture.experts, run.mixture.active_experts, run.mixture.dense_layers) == (16, 4, 3)
    assert run.ffn == 512 * 5  # the dense layers are as wide as what a token visits
    assert run.mixture.routed_nodes == 4
    models = run_columns([run]).models
    assert models.mixture_fraction[0] == pytest.approx(21 / 24)
    assert models.layer_weights[0] > models.active_weights[0] > models.attention_weights[0]


def test_ep_needs_experts(tmp_path: Path) -> None:
    _, skipped = read_runs(table(tmp_path, {}, MIXTURE | {"experts": "", "ffn": "8192"}, columns=WITH_EXPERTS))
    assert skipped[0].key == "ep" and "no column has the experts" in skipped[0].reason
