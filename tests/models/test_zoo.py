"""The zoo against known facts of its models: parameters, operations, kept bytes; and its errors."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from drumline.core.errors import InputError
from drumline.models import KINDS, Affine, Layer, Profile, zoo
from drumline.models.zoo import convolution, transformer
from drumline.models.zoo.assemble import LayerDraft

EVERY = zoo.names()
PUBLISHED = {
    "llama:1b": 1.24,
    "llama:3b": 3.21,
    "llama4:scout": 108,
    "llama4:maverick": 401,
    "qwen3:0.6b": 0.596,
    "qwen3:4b": 4.02,
    "qwen3:8b": 8.19,
    "qwen3:32b": 32.8,
    "qwen3:30b-a3b": 30.5,
    "qwen3:235b-a22b": 235,
    "gemma:2b": 2.61,
    "gemma:9b": 9.24,
    "gemma:27b": 27.2,
    "mixtral:8x7b": 46.7,
    "mixtral:8x22b": 140.6,
    "deepseek:v2": 236,
    "deepseek:v3": 671,
    "gpt-oss:20b": 20.9,
    "gpt-oss:120b": 116.8,
    "mamba:130m": 0.129,
    "mamba:2.8b": 2.77,
}
"""Billions of parameters, as published."""

PARAMETERS = {
    "gpt:350m": 355_871_744,
    "llama:7b": 6_738_415_616,
    "llama:8b": 8_030_261_248,
    "llama:13b": 13_015_864_320,
    "llama:70b": 70_553_706_496,
    "llama:405b": 405_853_388_800,
    "bert:base": 109_482_240,
    "bert:large": 335_141_888,
    "vit:base": 86_567_656,
    "vit:large": 304_326_632,
    "vit:huge": 632_045_800,
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "vgg11": 132_863_336,
    "vgg16": 138_357_544,
    "vgg19": 143_667_240,
    "unet": 31_037_698,
    "mlp:4x4096": 4 * (4096 * 4096 + 4096),
    "lstm:2x1024": 2 * (8 * 1024 * 1024 + 8 * 1024) + 2 * 10_000 * 1024 + 10_000,
}


@pytest.mark.parametrize(("name", "known"), PARAMETERS.items())
def test_parameters_are_exact(name: str, known: int) -> None:
    assert zoo.profile(name).parameters == known


def test_gpt2_small_has_1024_positions() -> None:
    assert zoo.profile("gpt:125m", sequence=1024).parameters == 124_439_808
    assert zoo.profile("gpt:125m").parameters == 124_439_808 + 1024 * 768


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("760m", 0.76),
        ("1.3b", 1.316),
        ("2.7b", 2.652),
        ("6.7b", 6.66),
        ("7b", 6.66),
        ("13b", 12.85),
        ("30b", 29.97),
        ("66b", 65.7),
        ("175b", 174.6),
        ("530b", 529.6),
        ("1t", 1008.0),
    ],
)
def test_gpt_sizes_match_their_names(name: str, billions: float) -> None:
    assert zoo.profile(f"gpt:{name}").parameters == pytest.approx(billions * 1e9, rel=2e-3)


@pytest.mark.parametrize(
    ("name", "giga_products"),
    [("resnet18", 1.814), ("resnet50", 4.089), ("vgg16", 15.47), ("vgg11", 7.609), ("vit:base", 17.56)],
)
def test_work_of_image_models(name: str, giga_products: float) -> None:
    assert zoo.profile(name).flops("forward").at(1) == pytest.approx(2e9 * giga_products, rel=2e-3)


@pytest.mark.parametrize("size", ["125m", "1.3b", "175b"])
def test_gpt_work_is_two_operations_per_weight_and_token(size: str) -> None:
    z, s = transformer.GPT[size], 1024
    products = z.layers * 12 * z.hidden**2 + z.vocabulary * z.hidden
    pairs = z.layers * 4 * s * s * z.hidden
    p = zoo.profile(f"gpt:{size}", sequence=s)
    assert p.flops("forward").at(3) == 3 * (2 * products * s + pairs)
    assert p.flops("backward").at(3) == 3 * (4 * products * s + 2.5 * pairs)


def test_llama_work_counts_shared_keys_once() -> None:
    p, s = zoo.profile("llama:8b"), 8192
    products = 8_030_261_248 - 128256 * 4096 - (2 * 32 + 1) * 4096  # all but the embedding and the norms
    assert p.flops("forward").at(1) == 2 * products * s + 32 * 4 * s * s * 4096


@pytest.mark.parametrize("name", EVERY)
def test_models_are_consistent(name: str) -> None:
    p = zoo.profile(name)
    assert p.name == name
    assert p.origin == "formula"
    assert p.parameter_bytes == 4
    assert p.parameters == p.trained
    assert p.notes[0].startswith(f"batch of {p.batch_size}")
    assert any("2 bytes" in note for note in p.notes)
    assert p.layers[-1].name == "head"
    assert p.flops("backward").at(1) > 1.7 * p.flops("forward").at(1)
    assert p.input.per_sample > 0
    for x in p.layers:
        assert {op.kind for op in x.ops} <= set(KINDS)
        assert {op.phase for op in x.ops} == {"forward", "backward"}
        assert x.parameters >= x.largest
        assert x.depth_forward > 0
        assert x.depth_backward > 0
        assert x.saved.per_sample > 0
    assert p.depth.fixed == sum((x.depth_forward + x.depth_backward) * x.repeats for x in p.layers)
    assert p.depth.per_sample == 0


@pytest.mark.parametrize("name", EVERY)
def test_live_memory_is_kept_plus_the_layers_own(name: str) -> None:
    p = zoo.profile(name)
    kept = 0.0
    for x in p.layers:
        kept += x.saved.at(8) * x.repeats
        assert x.live_backward.at(8) == pytest.approx(kept + x.local_backward.at(8))
        assert x.live_forward.at(8) >= kept
        assert x.live_forward.at(8) >= x.output.at(8)


@pytest.mark.parametrize("size", ["125m", "7b", "175b"])
def test_a_block_keeps_about_34_bytes_per_token_and_hidden_value(size: str) -> None:
    z = transformer.GPT[size]
    block = zoo.profile(f"gpt:{size}").layers[1]
    assert block.repeats == z.layers
    assert block.saved.per_sample / (2048 * z.hidden) == pytest.approx(34, rel=0.06)
    assert block.output.per_sample == 2 * 2048 * z.hidden
    assert (block.tensors, block.largest) == (12, 4 * z.hidden**2)


def test_tensors_count_a_tied_weight_once() -> None:
    assert zoo.profile("gpt:125m").tensors == 2 + 12 * 12 + 2
    assert zoo.profile("llama:8b").tensors == 1 + 32 * 9 + 2
    assert zoo.profile("bert:base").tensors == 5 + 12 * 16 + 2
    assert zoo.profile("resnet50").tensors == 161
    assert zoo.profile("vgg16").tensors == 32
    assert zoo.profile("vit:base").tensors == 4 + 12 * 12 + 4


def test_batch_norm_statistics_are_buffers() -> None:
    channels = 26_560  # of all 53 norms of ResNet-50
    assert zoo.profile("resnet50").buffers == 2 * 4 * channels + 8 * 53
    assert zoo.profile("vgg16").buffers == 0


def test_depth_of_linear_maps_and_of_a_recurrence() -> None:
    mlp = zoo.profile("mlp:3x1024")
    assert mlp.layers[1].depth_forward == (1 + 10 + 1) + 1  # the product, the bias, the relu
    short, long = (zoo.profile("lstm:1x256", sequence=s).layers[1].depth_forward for s in (64, 128))
    assert long - short == 64 * (1 + 8 + 6)


def test_memory_grows_with_the_sequence_and_not_with_its_square() -> None:
    one, two = (zoo.profile("llama:8b", sequence=s).layers[1].saved.per_sample for s in (4096, 8192))
    assert two == 2 * one


def test_sizes_of_grids() -> None:
    assert zoo.profile("mlp").name == "mlp:4x4096"
    assert zoo.profile("mlp:1x8").parameters == 8 * 8 + 8
    assert zoo.profile("mlp:2x8").parameters == 2 * (8 * 8 + 8)
    assert [x.repeats for x in zoo.profile("mlp:9x8").layers] == [1, 7, 1]
    assert zoo.profile("lstm:3x64").layers[1].repeats == 3


def test_batch_and_sequence_are_chosen() -> None:
    p = zoo.profile("gpt:125m", batch_size=64, sequence=256)
    assert p.batch_size == 64
    assert p.layers[1].output.per_sample == 2 * 256 * 768
    assert "256 tokens" in p.notes[0]
    assert zoo.profile("resnet50", batch_size=7).batch_size == 7


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("GPT:175B", "gpt:175b"),
        (" Llama:8B ", "llama:8b"),
        ("resnet:50", "resnet50"),
        ("ResNet50", "resnet50"),
        ("vgg:16", "vgg16"),
        ("UNet", "unet"),
        ("lstm", "lstm:2x1024"),
    ],
)
def test_names_ignore_case(text: str, name: str) -> None:
    assert zoo.profile(text).name == name
    assert zoo.is_zoo(text)


@pytest.mark.parametrize("name", EVERY)
def test_names_are_recognised(name: str) -> None:
    assert zoo.is_zoo(name)


@pytest.mark.parametrize(
    "text", ["gpt.py", "gpt.py:job", "train.py:resnet50", "./gpt:7b", "resnet50.json", "gptx:7b", "profile.json", ""]
)
def test_files_are_not_zoo_models(text: str) -> None:
    assert not zoo.is_zoo(text)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpt:176b", ["no model 'gpt:176b'", "gpt:1t", "Did you mean 'gpt:175b'?"]),
        ("llama:80b", ["llama:7b, llama:8b, llama:13b, llama:70b, llama:405b", "Did you mean 'llama:8b'?"]),
        ("resnet51", ["resnet18, resnet34, resnet50", "Did you mean 'resnet50'?"]),
        ("unet:3", ["the zoo has unet", "Did you mean 'unet'?"]),
        ("vgg", ["vgg11, vgg16, vgg19"]),
        ("bert:huge", ["bert:base, bert:large"]),
        ("lamma:7b", ["its families are gpt, llama", "Did you mean 'llama:7b'?"]),
        ("mlp:4", ["mlp:LAYERSxWIDTH, such as mlp:4x4096"]),
        ("mlp:0x4", ["mlp:LAYERSxWIDTH"]),
        ("lstm:4x99999999", ["lstm:LAYERSxWIDTH"]),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(name: str, words: list[str]) -> None:
    with pytest.raises(InputError) as e:
        zoo.profile(name)
    for word in words:
        assert word in str(e.value)


@pytest.mark.parametrize("value", [0, -1, True, 2.5])
def test_counts_are_whole_and_positive(value: int) -> None:
    with pytest.raises(InputError, match=r"batch_size = .* for gpt:125m\n.*whole number above 0"):
        zoo.profile("gpt:125m", batch_size=value)
    with pytest.raises(InputError, match="sequence = "):
        zoo.profile("gpt:125m", sequence=value)


def test_images_have_no_sequence() -> None:
    with pytest.raises(InputError, match=r"resnet50 has no sequence length\n.*only gpt, llama, .*, bert, lstm have"):
        zoo.profile("resnet:50", sequence=128)


def test_file_form_reads_back_equal(tmp_path) -> None:
    for name in ("gpt:7b", "resnet50", "lstm"):
        p = zoo.profile(name)
        p.save(tmp_path / "profile.json")
        assert Profile.load(tmp_path / "profile.json") == p


def test_the_zoo_needs_no_torch() -> None:
    code = "import sys; from drumline.models import zoo; zoo.profile('gpt:1t'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def _torch_keeps(module, x) -> int:
    """Bytes of all storages that torch keeps for the backward of a module in bf16, without parameters and buffers."""
    import torch

    held: dict[int, tuple[object, int]] = {}
    own = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}

    def pack(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = (storage, storage.nbytes())  # holding it keeps its address from being reused
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = module(x)
    assert y.requires_grad
    return sum(n for _, n in held.values())


def _as_layer(parts) -> Layer:
    return LayerDraft("x", "X", tuple(parts), 0).layer(Affine())


def test_a_block_keeps_what_torch_keeps() -> None:
    import torch
    from torch import nn
    from torch.nn import functional

    h, s, heads, n = 64, 96, 4, 3

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.LayerNorm(h), nn.LayerNorm(h)
            self.qkv, self.proj = nn.Linear(h, 3 * h), nn.Linear(h, h)
            self.wide, self.back = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

        def forward(self, x):
            q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in self.qkv(self.one(x)).chunk(3, dim=-1))
            y = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            x = x + self.proj(y)
            return x + self.back(functional.gelu(self.wide(self.two(x))))

    torch.manual_seed(0)
    block = Block().bfloat16()
    measured = _torch_keeps(block, torch.randn(n, s, h, dtype=torch.bfloat16, requires_grad=True))
    shape = replace(transformer.GPT["125m"], hidden=h, heads=heads, kv_heads=heads, inner=4 * h)
    layer = _as_layer(transformer._block(shape, s))
    assert layer.parameters == sum(p.numel() for p in block.parameters())
    assert measured == pytest.approx(layer.saved.at(n), rel=0.02)


def test_a_residual_block_keeps_what_torch_keeps() -> None:
    import torch
    from torch import nn

    c, width, side, n = 32, 16, 14, 2

    class Bottleneck(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branch = nn.Sequential(
                nn.Conv2d(c, width, 1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
                nn.Conv2d(width, width, 3, stride=2, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
                nn.Conv2d(width, 4 * width, 1, bias=False),
                nn.BatchNorm2d(4 * width),
            )
            self.down = nn.Sequential(nn.Conv2d(c, 4 * width, 1, stride=2, bias=False), nn.BatchNorm2d(4 * width))

        def forward(self, x):
            y = self.branch(x)
            y += self.down(x)
            return torch.relu_(y)

    block = Bottleneck().bfloat16()
    x = torch.randn(n, c, side, side, dtype=torch.bfloat16, requires_grad=True)
    layer = _as_layer(convolution._residual(c, width, 4 * width, side, 2, keep=True))
    assert layer.parameters == sum(p.numel() for p in block.parameters())
    assert _torch_keeps(block, x) == pytest.approx(layer.saved.at(n), rel=0.02)


@pytest.mark.parametrize(("name", "billions"), PUBLISHED.items())
def test_parameters_are_those_published(name: str, billions: float) -> None:
    assert zoo.profile(name).parameters == pytest.approx(billions * 1e9, rel=5e-3)


def test_active_parameters_of_mixtures() -> None:
    """Operations of a forward per token are twice the parameters that it meets, and attention's."""
    p, s = zoo.profile("mixtral:8x7b", batch_size=1), 4096
    scores = sum(op.flops.per_sample * op.count for x in p.each() for op in x.ops if op.name.endswith("attention"))
    active = (p.flops("forward").per_sample - scores) / (2 * s)
    assert active == pytest.approx(12.9e9 - 32000 * 4096, rel=5e-3)  # the embedding is looked up
    routed = [x.experts for x in p.layers if x.experts]
    assert [(e.count, e.active, e.parameters) for e in routed] == [(8, 2, 8 * 3 * 4096 * 14336)]
