"""The `Profile` value: a model as layers, each with its operators, parameters and saved activations.

Every amount that depends on the batch is *affine* in the number n of samples that one rank runs at once:
a fixed part (reading a weight, adding a gradient) and a part per sample (the activations).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pydantic import ConfigDict

from ..core import files
from ..core.errors import CorruptFile
from ..core.units import format_bytes, format_count

KINDS = {
    "matmul": "products of matrices (size in operations)",
    "attention": "fused attention, forward (operations)",
    "attention_backward": "fused attention, backward (operations)",
    "conv": "convolution, forward (operations)",
    "conv_backward": "convolution, backward (operations)",
    "recurrent": "fused recurrent layers (operations)",
    "pointwise": "one value in, one value out, cheap: add, multiply, copy, fill (bytes)",
    "update": "the same, but in place: what an optimizer does (bytes)",
    "special": "one value in, one value out, costly: exp, gelu, tanh and their backwards (bytes)",
    "norm": "layer, group and batch normalisation, and their backwards (bytes)",
    "softmax": "softmax and log-softmax, and their backwards (bytes)",
    "reduce": "sums, means and maxima, pooling (bytes)",
    "gather": "embedding, indexing (bytes)",
    "norm_backward": "layer and group normalisation, backward (bytes)",
    "batch_norm": "batch normalisation over samples and places (bytes)",
    "batch_norm_backward": "the same, backward (bytes)",
    "softmax_backward": "softmax and log-softmax, backward (bytes)",
    "pool": "pooling over places, forward (bytes)",
    "pool_backward": "the same, backward (bytes)",
    "gather_backward": "embedding, backward: rows are added up where their indices are equal (bytes)",
    "transpose": "copies that change the order of dims (bytes)",
    "strided": "copies that change the order of dims but the last (bytes)",
    "widen": "values become wider ones: bf16 to fp32, or both are added (bytes)",
    "narrow": "values become narrower ones: fp32 to bf16 (bytes)",
    "cat": "several tensors are laid one after the other (bytes)",
    "recurrent_backward": "fused recurrent layers, backward (operations)",
}
"""The kinds of operators, each with its own measured curve."""

COMPUTE_KINDS = frozenset(
    {
        "matmul",
        "attention",
        "attention_backward",
        "conv",
        "conv_backward",
        "recurrent",
        "recurrent_backward",
    }
)
"""Those that are bound by compute; the rest is bound by memory."""

MATMUL_RATE_SHARE = {
    "attention": 0.5,
    "attention_backward": 0.4,
    "conv": 0.6,
    "conv_backward": 0.5,
    "recurrent": 0.3,
    "recurrent_backward": 0.3,
}
"""The share of the matmul rate that other compute kernels reach, where no curve was measured."""

SIMILAR_KINDS = {
    "norm_backward": "norm",
    "batch_norm": "norm",
    "batch_norm_backward": "norm",
    "softmax_backward": "softmax",
    "pool": "reduce",
    "pool_backward": "reduce",
    "gather_backward": "gather",
    "transpose": "pointwise",
    "strided": "pointwise",
    "widen": "pointwise",
    "narrow": "pointwise",
    "cat": "pointwise",
    "recurrent_backward": "recurrent",
}
"""Whose curve stands in for a kind that has none."""

_STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True)
class Affine:
    """`fixed + per_sample * n`."""

    __pydantic_config__ = _STRICT
    fixed: float = 0.0
    per_sample: float = 0.0

    def at(self, n: float) -> float:
        """The amount for n samples."""
        return self.fixed + self.per_sample * n

    def __add__(self, other: Affine) -> Affine:
        return Affine(self.fixed + other.fixed, self.per_sample + other.per_sample)


@dataclass(frozen=True, slots=True)
class ProfiledOp:
    """An operator, or `count` equal ones."""

    __pydantic_config__ = _STRICT
    OLD_KEYS: ClassVar[dict[str, str]] = {"again": "recompute", "handed": "is_output"}
    name: str
    """The operator, such as `addmm`."""
    kind: str
    """One of KINDS."""
    phase: str
    """`forward` or `backward`."""
    flops: Affine
    """Operations: a multiplication and an addition are two."""
    bytes: Affine
    """Read and written."""
    count: int = 1
    output: Affine = Affine()
    """Bytes of the values that it makes, in the forward: what keeping its result would cost."""
    group: int = 0
    """Operators of a layer with the same number above 0 are kept together or computed again together: they write one
    value, or draw random numbers one after the other."""
    recompute: str = ""
    """Under recomputation: `always` computed again, since it cannot be kept; `never`, since nothing needs it; or free
    to be chosen."""
    is_output: bool = False
    """What it makes is what the layer hands on, which the next one keeps anyway."""
    dims: tuple[int, ...] = ()
    """In the forward, the sizes that ranks can share it by, as shapes.py reads them; empty where there are none."""
    dtype: str = ""
    """The type that it computes in, where it was traced and is not fp32: `bf16`, `fp16`."""
    shape: tuple[Affine, ...] = ()
    """The sizes that its time depends on beside its amounts, as `cost.clouds` reads them; empty if unknown."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A unit of the model that is sharded, recomputed and listed as one: a transformer block, a residual block, ..."""

    __pydantic_config__ = _STRICT
    OLD_KEYS: ClassVar[dict[str, str]] = {
        "common": "tp_replicated",
        "entered": "python_calls",
        "norms": "batch_norms",
        "unit": "shard_unit",
    }
    name: str
    """Where it stands in the model, such as `blocks.3`; the empty name is what belongs to the model itself."""
    kind: str
    """Its class."""
    parameters: int
    """Numbers that are trained (a tied weight counts once, where it is met first)."""
    frozen: int = 0
    """Parameters that are not trained."""
    tensors: int = 0
    """How many trained parameter tensors hold them."""
    largest: int = 0
    """The numbers in its largest parameter."""
    tied: int = 0
    """Trained numbers that it reads and an earlier layer counts: a rank that has it without that one holds them too."""
    tp_replicated: int = 0
    """Of one rank's part under tensor parallelism: the trained numbers that all of these ranks have."""
    ops: tuple[ProfiledOp, ...] = ()
    saved: Affine = Affine()
    """Bytes of activations that its forward keeps for its backward."""
    output: Affine = Affine()
    """Bytes of what it hands to the next layer: what full recomputation keeps of it."""
    live_forward: Affine = Affine()
    """The most bytes of activations and temporaries alive during its forward, of the whole model."""
    live_backward: Affine = Affine()
    """The same during its backward; gradients of parameters are not counted."""
    local_backward: Affine = Affine()
    """What its backward needs beyond all that was kept: the part of `live_backward` that is its own."""
    depth_forward: float = 0.0
    """Longest chain of dependent unit operations in its forward."""
    depth_backward: float = 0.0
    batch_norms: int = 0
    """BatchNorms in it, whose statistics the ranks must agree on."""
    cast: float = 0.0
    """Bytes of copies of its parameters that autocast makes, where it was traced under autocast."""
    composite: bool = False
    """It holds other modules, so recomputing it saves memory."""
    shard_unit: bool = False
    """It is sharded as a group of its own under zero=3; what is not belongs to the group of the whole model."""
    views: int = 0
    """Operators of its forward that only look at a tensor in another way: they cost its host something."""
    python_calls: int = 0
    """Python functions that its forward enters, where it was traced: they cost its host something, too."""
    repeats: int = 1
    """How many equal layers stand in a row; their names count up from the last number in `name`."""

    def flops(self, phase: str | None = None) -> Affine:
        """Its operations in one phase, or in both; of one of its repeats."""
        return _total(self.ops, phase, lambda op: op.flops)

    def bytes(self, phase: str | None = None) -> Affine:
        """What its operators read and write."""
        return _total(self.ops, phase, lambda op: op.bytes)


@dataclass(frozen=True, slots=True)
class Profile:
    """A model and its optimizer, ready to be priced."""

    __pydantic_config__ = _STRICT
    name: str
    batch_size: int
    """Samples per optimizer step, over all ranks."""
    layers: tuple[Layer, ...]
    """In the order in which they run."""
    optimizer: str = "AdamW"
    state_per_parameter: float = 8.0
    """Bytes of optimizer state per trained number."""
    optimizer_bytes: float = 28.0
    """Bytes that the optimizer reads and writes per trained number."""
    optimizer_ops: float = 14.0
    """Operators that the optimizer launches per parameter tensor."""
    parameter_bytes: int = 4
    """Bytes of one parameter (master copy)."""
    activation_bytes: int = 4
    """Bytes of one activation as counted here; other precisions are scaled from it."""
    buffers: float = 0.0
    """Bytes of the model's buffers."""
    input: Affine = Affine()
    """Bytes of one batch of inputs and targets."""
    depth: Affine = Affine()
    """Longest chain of dependent unit operations in forward and backward of one step; 0 where it was not traced."""
    origin: str = "formula"
    """`traced` or `formula`."""
    precision: str = ""
    """The plan's precision that it was traced in, with every cast; empty: others are scaled from what is counted."""
    notes: tuple[str, ...] = ()
    """What the tracer could not see, or had to assume."""

    @property
    def parameters(self) -> int:
        """Trained and frozen numbers."""
        return sum((x.parameters + x.frozen) * x.repeats for x in self.layers)

    @property
    def trained(self) -> int:
        """Trained numbers."""
        return sum(x.parameters * x.repeats for x in self.layers)

    @property
    def tensors(self) -> int:
        """Trained parameter tensors."""
        return sum(x.tensors * x.repeats for x in self.layers)

    def flops(self, phase: str | None = None) -> Affine:
        """The model's work: all operations of a phase, or of forward and backward."""
        return functools.reduce(Affine.__add__, (_times(x.flops(phase), x.repeats) for x in self.layers), Affine())

    def each(self) -> Iterator[Layer]:
        """Every layer in the order in which they run, repeats one by one."""
        for x in self.layers:
            for _ in range(x.repeats):
                yield x

    def save(self, path: str | Path) -> None:
        """Write the JSON form."""
        files.write_json(path, self)

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read the JSON form back."""
        return files.from_plain(cls, files.read_json(path), str(path), CorruptFile)

    def __str__(self) -> str:
        return (
            f"profile {self.name}: {format_count(self.parameters)} parameters, "
            f"{format_count(self.flops().at(1), 'FLOP')} and "
            f"{format_bytes(sum(x.saved.per_sample * x.repeats for x in self.layers))} of activations a sample "
            f"({self.origin})"
        )


def _total(ops: tuple[ProfiledOp, ...], phase: str | None, of: Callable[[ProfiledOp], Affine]) -> Affine:
    chosen = [op for op in ops if phase in (None, op.phase)]
    return Affine(sum(of(op).fixed * op.count for op in chosen), sum(of(op).per_sample * op.count for op in chosen))


def _times(a: Affine, k: int) -> Affine:
    return Affine(a.fixed * k, a.per_sample * k)
