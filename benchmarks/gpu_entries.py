"""Host time of a forward and a backward on a GPU, split into kinds of operators, views and Python functions.

    python benchmarks/gpu_entries.py [--turns 22] [--device cuda] [--keep FILE]

Models of several libraries, so small that the GPU waits for its host, take turns; views, functions and operators of
their forwards are counted, and operators and parameters of their backwards. A least-squares fit of the relative errors,
without negative prices, gives the time of each, with and without autocast, and its error for each model; operators
alone are fitted for comparison. The ratios are in `costs.tuning`. Expected before measuring: a view costs less than an
operator, a function a tenth of it, the backward of a convolution several operators. At the end the host launches
recurrent layers of several sizes. It takes a minute; models of libraries that are not here are left out, and named.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from drumline.measurement.in_step_slowdown import AttentionBlock, ResidualBlock
from drumline.measurement.timing import synchronize
from drumline.tracing.op_costs import kind_of

WARM, WIDTH, BLOCKS, STEPS = 3, 64, 6, 64
FORWARD = ("operator", "attention", "cast", "view", "function")
SPLIT = (*FORWARD, "conv", "matmul", "norm")
BACKWARD = ("operator", "attention", "cast", "view", "conv", "matmul", "norm", "parameter")
FITS = {
    "forward": (FORWARD, SPLIT, ("operator", "cast")),
    "backward": (BACKWARD, ("operator", "attention", "cast", "conv"), ("operator", "cast")),
}
"""What is fitted to the seconds of each phase; `conv`, `matmul` and `norm` are beyond another operator."""


class OperatorCounter(TorchDispatchMode):
    """Counts operators by their cost class on a host."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        view = func.is_view or name in ("_unsafe_view", "detach", "alias")
        self.counts["view" if view else "cast" if name == "_to_copy" else "operator"] += 1
        for word in ("attention", "conv", "norm"):
            self.counts[word] += word in name
        self.counts["matmul"] += kind_of(name) == "matmul"
        return func(*args, **(kwargs or {}))


@dataclass
class Step:
    """A model with its input, the seconds of its passes and the counts of their operators."""

    model: nn.Module
    given: torch.Tensor
    times: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in FITS})
    counts: dict[str, Counter[str]] = field(default_factory=dict)

    def __call__(self, half: bool) -> torch.Tensor:
        with torch.autocast(self.given.device.type, dtype=torch.bfloat16, enabled=half):
            out: Any = self.model(self.given)
        out = getattr(out, "logits", getattr(out, "last_hidden_state", out))
        loss: torch.Tensor = out.float().square().mean()
        return loss

    def count(self, half: bool) -> None:
        """Count the dispatched operators of a step, then the Python functions of another forward."""
        with OperatorCounter() as forward:
            loss = self(half)
        with OperatorCounter() as backward:
            loss.backward()
        backward.counts["parameter"] = sum(p.grad is not None for p in self.model.parameters())
        with functions(forward.counts):
            self(half)
        self.model.zero_grad()
        self.counts = {"forward": forward.counts, "backward": backward.counts}

    def take(self, half: bool) -> None:
        """Run one turn: a timed forward, and its backward."""
        kind = self.given.device.type
        synchronize(kind)
        start = time.perf_counter()
        loss = self(half)
        synchronize(kind)
        middle = time.perf_counter()
        loss.backward()
        synchronize(kind)
        self.times["forward"].append(middle - start)
        self.times["backward"].append(time.perf_counter() - middle)
        self.model.zero_grad()


@contextmanager
def functions(counts: Counter[str]) -> Iterator[None]:
    """Count the Python functions that are entered."""

    def seen(frame: Any, event: str, argument: Any) -> None:
        counts["function"] += event == "call"

    sys.setprofile(seen)
    try:
        yield
    finally:
        sys.setprofile(None)


def models(device: torch.device) -> Iterator[tuple[str, Callable[[], nn.Module], torch.Tensor]]:
    """Yield models by name, each with its input."""
    rows, image = torch.randn(2, 16, WIDTH, device=device), torch.randn(2, 3, 64, 64, device=device)
    tokens = torch.randint(0, 50, (2, 16), device=device)

    def in_a_row(block: Callable[[], nn.Module], many: int = BLOCKS) -> Callable[[], nn.Module]:
        return lambda: nn.Sequential(*(block() for _ in range(many)))

    def layer() -> nn.Module:
        return nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, batch_first=True)

    def normed() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))

    def deep() -> nn.Module:
        return nn.Sequential(nn.Sequential(nn.Sequential(AttentionBlock(WIDTH, 2))))

    yield "transformer", in_a_row(lambda: AttentionBlock(WIDTH, 2)), rows
    yield "nested", in_a_row(deep), rows
    yield (
        "residual",
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), in_a_row(lambda: ResidualBlock(8))()),
        image[..., :32, :32],
    )
    mlp = in_a_row(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(0.1)), 20)
    yield "mlp", mlp, rows
    yield "normed mlp", in_a_row(normed, 15), rows
    yield "encoder", lambda: nn.TransformerEncoder(layer(), BLOCKS), rows
    for name in ("convnext_tiny", "resnet50", "vgg16_bn", "mobilenet_v3_small"):
        yield name, _from("torchvision.models", name), image
    sizes = {"image_size": 64, "patch_size": 16, "num_layers": BLOCKS, "num_heads": 2, "hidden_dim": WIDTH}
    yield "vit", _from("torchvision.models", "VisionTransformer", mlp_dim=WIDTH, **sizes), image
    yield "vit of timm", _from("timm", "create_model", model_name="vit_tiny_patch16_224", img_size=64), image
    usual = {
        "hidden_size": WIDTH,
        "num_hidden_layers": BLOCKS,
        "num_attention_heads": 2,
        "intermediate_size": WIDTH,
        "vocab_size": 50,
        "max_position_embeddings": 16,
    }
    gpt = {"n_embd": WIDTH, "n_layer": BLOCKS, "n_head": 2, "vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0}
    t5 = {"d_model": WIDTH, "d_kv": 32, "d_ff": WIDTH, "num_layers": BLOCKS, "num_heads": 2, "vocab_size": 50}
    yield "bert", _from_transformers("BertConfig", "BertForMaskedLM", usual), tokens
    yield "gpt2", _from_transformers("GPT2Config", "GPT2LMHeadModel", gpt), tokens
    yield "llama", _from_transformers("LlamaConfig", "LlamaForCausalLM", usual), tokens
    yield "t5", _from_transformers("T5Config", "T5EncoderModel", t5), tokens


def _from(library: str, name: str, **sizes: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model: nn.Module = getattr(importlib.import_module(library), name)(**sizes)
        return model

    return make


def _from_transformers(config: str, name: str, sizes: dict[str, Any]) -> Callable[[], nn.Module]:
    return lambda: _from("transformers", name, config=_from("transformers", config, **sizes)())()


def fit(steps: dict[str, Step], phase: str, parts: tuple[str, ...]) -> tuple[dict[str, float], dict[str, float]]:
    """Fit the microseconds of each part of a phase; also returns the relative error by model."""
    seconds = np.array([statistics.median(s.times[phase]) for s in steps.values()])
    counts = np.array([[s.counts[phase][p] for p in parts] for s in steps.values()], dtype=float)
    prices = _least_squares(counts / seconds[:, None])
    errors = counts @ prices / seconds - 1
    return dict(zip(parts, 1e6 * prices, strict=True)), dict(zip(steps, errors, strict=True))


def _least_squares(rows: Any) -> Any:
    """Fit non-negative prices that bring every row nearest to 1: parts with a negative price are left out."""
    left = list(range(rows.shape[1]))
    while left:
        solution = np.linalg.lstsq(rows[:, left], np.ones(len(rows)), rcond=None)[0]
        if solution.min() >= 0:
            break
        left.pop(int(solution.argmin()))
    prices = np.zeros(rows.shape[1])
    prices[left] = solution
    return prices


def recurrent(device: torch.device) -> None:
    """Print the host's time for a step of a recurrent layer, and the whole time, by its sizes."""
    for samples, width, layers in itertools.product((16, 128), (256, 512, 1024), (1, 2, 4)):
        lstm = nn.LSTM(width, width, layers, batch_first=True, device=device)
        x = torch.randn(samples, STEPS, width, device=device, requires_grad=True)
        seconds: dict[str, list[float]] = {"forward": [], "backward": []}
        for _ in range(WARM + 8):
            synchronize(device.type)
            for phase in seconds:
                start = time.perf_counter()
                if phase == "forward":
                    loss = lstm(x)[0].sum()
                else:
                    loss.backward()
                launched = time.perf_counter() - start
                synchronize(device.type)
                seconds[phase] += [launched, time.perf_counter() - start]
        shown = {
            phase: [1e6 * statistics.median(t[2 * WARM :][i::2]) / STEPS for i in (0, 1)]
            for phase, t in seconds.items()
        }
        print(
            f"LSTM of {layers} layers of {width}, {samples} samples, a step: "
            + ", ".join(
                f"{phase} {host:.0f} us launched, {all_:.0f} us in all" for phase, (host, all_) in shown.items()
            )
        )


def main() -> None:
    """Count, time in turns, and print the fits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=22, help="steps of each model that count")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--keep", type=Path, help="a JSON file for all counts and times")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    device = torch.device(options.device)
    made: dict[str, tuple[nn.Module, torch.Tensor]] = {}
    for name, make, given in models(device):
        try:
            made[name] = make().to(device).train(), given
        except ImportError as e:
            print(f"{name} is left out: {e}")
    kept = {}
    for half in (False, True):
        steps = {name: Step(*pair) for name, pair in made.items()}
        for step in steps.values():
            for _ in range(WARM):
                step.take(half)
            step.times = {phase: [] for phase in FITS}
            step.count(half)
        for _ in range(options.turns):
            for step in steps.values():
                step.take(half)
        kept["half" if half else "plain"] = {name: [s.counts, s.times] for name, s in steps.items()}
        for phase, fits in FITS.items():
            print(f"{phase}, {'bf16 autocast' if half else 'plain'}")
            for parts in fits:
                prices, errors = fit(steps, phase, parts)
                print("  " + ", ".join(f"{p} {us:.1f} us" for p, us in prices.items()))
                print(
                    f"    off by {100 * statistics.fmean(map(abs, errors.values())):.1f}% on average: "
                    + ", ".join(f"{n} {100 * e:+.0f}%" for n, e in errors.items())
                )
    if options.keep:
        options.keep.write_text(json.dumps(kept))
    recurrent(device)


if __name__ == "__main__":
    main()
