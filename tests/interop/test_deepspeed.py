"""DeepSpeed's configs: values are read, keys without effect are reported with the reason, invalid values are refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from deepspeed_configs import AUTO, CONFIGS
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.core.errors import InputError
from drumline.interop import deepspeed
from drumline.interop.deepspeed import read
from drumline.interop.imported import LossScaleSettings, NamedComponent
from drumline.plans import Plan


def leaves(table: dict[str, Any], path: str = "") -> list[str]:
    """The names of all keys that are not tables."""
    names = []
    for key, value in table.items():
        name = f"{path}{key}"
        names += leaves(value, f"{name}.") if isinstance(value, dict) else [name]
    return names


@pytest.mark.parametrize("name", CONFIGS)
def test_corpus(tmp_path: Path, name: str) -> None:
    ranks, config, plan, batch = CONFIGS[name]
    imported = read(config, ranks)
    assert str(imported.plan) == plan
    assert imported.batch_size == batch
    assert imported.plan.ranks == ranks
    assert not imported.unknown
    path = tmp_path / "ds_config.json"
    path.write_text("\ufeff" + json.dumps(config, indent=2).replace("\n", "\r\n"), encoding="utf-8")
    assert read(path, ranks) == read(str(path), ranks) == imported
    for key in imported.auto:  # each is a key of the config that says so
        assert key in leaves(config)
    assert str(imported).startswith(f"plan {plan}")


@pytest.mark.parametrize("name", CONFIGS)
def test_a_misspelt_key_is_reported_at_any_depth(name: str) -> None:
    """Rename each key of each config, one by one: its new name is reported, or its table is, as having no effect."""
    ranks, config, _, _ = CONFIGS[name]
    for path in leaves(config):
        if path.split(".")[0] in ("optimizer", "scheduler"):
            continue  # their params are checked where they are made, and params without a type are refused
        changed = json.loads(json.dumps(config))
        table = changed
        *above, key = path.split(".")
        for part in above:
            table = table[part]
        table[f"{key}_x"] = table.pop(key)
        listed = read(changed, ranks)
        wrong = ".".join([*above, f"{key}_x"])
        if above and (above[0] in listed.ignored or above[0] in ("compile", "expert_parallel", "curriculum_learning")):
            continue
        assert wrong in listed.unknown, (name, wrong)
        assert f"unknown key: {wrong}" in str(listed)


def test_fine_tuning_config() -> None:
    imported = read(CONFIGS["stage 2 of a fine-tune"][1], 8)
    assert imported.optimizer == NamedComponent(
        "AdamW", {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    )
    assert imported.schedule == NamedComponent(
        "WarmupDecayLR", {"total_num_steps": 1000, "warmup_num_steps": 100, "warmup_max_lr": 3e-4}
    )
    assert (imported.clip, imported.micro_size, imported.loss_scale, imported.drop_last) == (0.5, 4, None, False)
    assert "no effect: zero_optimization.overlap_comm (gradients are always sent during the backward)" in str(imported)
    assert not imported.auto


def test_fp16_loss_scale() -> None:
    assert read(CONFIGS["fp16 with scaler"][1], 2).loss_scale == LossScaleSettings(0.0, 12, 500, 2, 1.0)
    assert read({"fp16": {"enabled": True}}, 1).loss_scale == LossScaleSettings()
    assert read({"fp16": {"enabled": True, "loss_scale": 128}}, 1).loss_scale == LossScaleSettings(fixed=128.0)


def test_auto_leaves_keys_open() -> None:
    imported = read(CONFIGS["hugging face, stage 3"][1], 4)
    assert set(imported.open_keys) == {"micro", "precision", "bucket"}
    assert imported.optimizer == NamedComponent("AdamW")
    assert imported.schedule == NamedComponent("WarmupLR")
    assert "optimizer.params.lr" in imported.auto
    assert "left to Drumline: " in str(imported)
    assert imported.clip is None
    assert read({**AUTO, "train_batch_size": 32}, 4).batch_size == 32


def test_unsupported_features_are_reported_only_if_on() -> None:
    imported = read(CONFIGS["other training"][1], 1)
    for key in ("progressive_layer_drop", "zero_optimization.zero_quantized_weights"):
        assert "the result will differ" in imported.ignored[key]
    assert "curriculum_learning" not in imported.ignored
    assert "zero_optimization.zero_quantized_gradients" not in imported.ignored


def test_nvme_offload_becomes_host_memory() -> None:
    imported = read(CONFIGS["to disk"][1], 2)
    assert "host memory" in imported.ignored["zero_optimization.offload_optimizer.device"]
    imported = read({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, 1)
    assert imported.plan == Plan(zero=2)
    assert imported.ignored["zero_optimization.offload_param"] == "parameters are offloaded with stage 3, not 2"


def test_drop_last() -> None:
    assert read(CONFIGS["last batch dropped"][1], 2).drop_last


@pytest.mark.parametrize(
    ("config", "ranks", "words"),
    [
        (
            {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
            8,
            r"a batch of 32 on 8 data-parallel ranks\n  where: the config: train_batch_size\n  rule:  train_batch_size\(32\) != "
            r"train_micro_batch_size_per_gpu\(4\) x gradient_accumulation_steps\(2\) x data-parallel ranks\(8\)\n  try:   give two of the three",
        ),
        (
            {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
            2,
            "a batch of 32 on 2",
        ),
        (
            {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4},
            2,
            r"gradient_accumulation_steps\(a whole number\)",
        ),
        ({"train_batch_size": 3}, 4, "a batch of 3 on 4 data-parallel ranks"),
        (
            {"train_batch_size": 0},
            1,
            "train_batch_size is '0'\n.*\n  rule:  train_batch_size is a whole number of at least 1",
        ),
        ({"train_batch_size": -4}, 1, "at least 1"),
        ({"train_batch_size": 2.5}, 1, "a whole number"),
        ({"train_batch_size": True}, 1, "a number"),
        ({"train_batch_size": "32"}, 1, "a number"),
        ({"train_batch_size": 10**30}, 1, "a whole number"),
        ({"train_batch_size": [4]}, 1, "a number"),
        ({"gradient_clipping": float("nan")}, 1, "gradient_clipping is a number of at least 0"),
        ({"gradient_clipping": -1}, 1, "at least 0"),
        (
            {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
            1,
            "fp16 and bf16 are both enabled\n.*\n  rule:  a step has one compute type",
        ),
        (
            {"fp16": {"enabled": "yes"}},
            1,
            "fp16.enabled is 'yes'\n  where: the config: fp16.enabled\n  rule:  fp16.enabled is true or false",
        ),
        ({"fp16": True}, 1, "fp16 is True\n.*\n  rule:  a table of keys"),
        ({"zero_optimization": {"stage": 4}}, 1, "zero_optimization.stage is 0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": "two"}}, 1, "zero_optimization.stage is 'two'"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpuu"}}},
            1,
            r"one of none, cpu, nvme\n  try:   Did you mean 'cpu'\?",
        ),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 3}}, 4, "shard divides dp: 4 % 3 != 0"),
        (
            {"tensor_parallel": {"autotp_size": 3}},
            4,
            r"4 ranks for tp=3, pp=1, cp=1\n.*\n  rule:  tp x pp x cp divides the ranks: 4 % 3 != 0",
        ),
        ({"optimizer": {"params": {"lr": 1}}}, 1, "optimizer.params without optimizer.type"),
        ({"optimizer": {"type": 3}}, 1, "optimizer.type is a word"),
        ({"optimizer": {"type": "Adam", "params": {"lr": {"a": 1}}}}, 1, "optimizer.params.lr is a number, a word"),
        ({"optimizer": "Adam"}, 1, "optimizer is 'Adam'"),
        ({}, 0, "0 ranks for"),
    ],
)
def test_refused(config: dict[str, Any], ranks: int, words: str) -> None:
    with pytest.raises(InputError, match=words):
        read(config, ranks)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "JSON"),
        ("[1]", "a table, not a list"),
        ("{", "is not a config"),
        ('{"a": NaN}', "NaN is not a finite number"),
        ('{"zero_optimization": {"stage": 1, "stage": 2}}', "the key 'stage' is given twice"),
        ("[" * 100_000, "nested too deeply"),
        ('{"train_batch_size": Infinity}', "Infinity is not a finite number"),
    ],
)
def test_files_that_are_not_configs(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(text)
    with pytest.raises(InputError, match=words) as caught:
        read(path, 1)
    assert str(path) in str(caught.value)


def test_missing_files(tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="is not text"):
        read(tmp_path / "ds_config.json", 1)
    with pytest.raises(
        InputError, match=r"no file .*Did you mean 'ds_config.json'\?".replace(" .*", "[^\n]*\n  try:   ")
    ):
        read(tmp_path / "ds_confg.json", 1)


keys = st.sampled_from(
    [
        *deepspeed.keys.TOP,
        *deepspeed.PLAN_KEYS,
        "optimizer",
        "scheduler",
        "zero_optimization",
        "fp16",
        "bf16",
        "stage",
        "enabled",
        "auto",
    ]
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("auto"),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None)
@given(st.dictionaries(keys | st.text(max_size=8), values, max_size=5), st.integers(1, 16))
def test_any_config_is_read_or_refused(config: dict[str, Any], ranks: int) -> None:
    """No other exception, and no key is lost: it is followed, open, without effect, or unknown."""
    try:
        imported = read(config, ranks)
    except InputError as e:
        assert re.search("where|rule", str(e))
        return
    assert imported.plan.ranks == ranks
    assert str(imported)


def test_reading_does_not_import_torch() -> None:
    program = (
        "import sys; from drumline.interop import deepspeed; deepspeed.read({}, 1); assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
