"""Small tables of runs for the tests: one complete row, and changes to it."""

from __future__ import annotations

import csv
from pathlib import Path

from drumline.validation.read_runs import COLUMNS

ROW = {
    "source": "a page",
    "source_row": "row 1",
    "year": "2024",
    "model_family": "gpt",
    "params_b": "1.3",
    "layers": "24",
    "hidden": "2048",
    "heads": "16",
    "kv_heads": "16",
    "ffn": "8192",
    "vocab": "51200",
    "seq_len": "2048",
    "global_batch": "64",
    "micro_batch": "4",
    "gpu": "A100-80GB-SXM",
    "n_gpus": "8",
    "gpus_per_node": "8",
    "intra_link": "NVLink3+NVSwitch 600 GB/s bidir",
    "inter_link": "8x HDR IB 200 Gb/s per node",
    "tp": "1",
    "pp": "1",
    "vpp": "1",
    "dp": "8",
    "zero_fsdp": "0",
    "cp": "1",
    "sp": "no",
    "ep": "1",
    "recompute": "none",
    "precision": "bf16",
    "schedule": "none",
    "iteration_time_s": "2.0",
    "tokens_per_s_per_gpu": "",
    "samples_per_s": "",
    "memory_gb_per_gpu": "",
    "memory_kind": "",
    "iter_s_derived": "",
    "note": "",
}


def table(folder: Path, *changes: dict[str, str], columns: tuple[str, ...] = COLUMNS) -> Path:
    """A file with one row per change."""
    path = folder / "runs.csv"
    with path.open("w", newline="") as f:
        writer = csv.DictWriter(f, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows({**ROW, **change} for change in changes)
    return path
