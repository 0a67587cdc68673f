"""The `Profile` value: a model as layers, each with its operators, parameters and saved activations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pydantic import ConfigDict

from ..core import files
from ..core.display import NotebookValue
from ..core.errors import CorruptFile
from ..core.units import format_bytes, format_count
from .affine import Affine as Affine
from .data_flow import DataFlow

KINDS = {
    "matmul": "matmuls (size in operations)",
    "attention": "fused attention, forward (operations)",
    "attention_backward": "fused attention, backward (operations)",
    "conv": "convolution, forward (operations)",
    "conv_backward": "convolution, backward (operations)",
    "recurrent": "fused recurrent layers (operations)",
    "pointwise": "one value in, one value out, cheap: add, multiply, copy, fill (bytes)",
    "broadcast": "the same, with an input that is expanded: a value for each channel or row (bytes)",
    "update": "as `pointwise`, but in place: optimizer updates (bytes)",
    "special": "one value in, one value out, costly: exp, gelu, tanh and their backwards (bytes)",
    "norm": "layer, group and batch normalisation, and their backwards (bytes)",
    "softmax": "softmax and log-softmax, and their backwards (bytes)",
    "reduce": "sums, means and maxima, pooling (bytes)",
    "gather": "embedding, indexing (bytes)",
    "norm_backward": "layer and group normalisation, backward (bytes)",
    "batch_norm": "batch normalisation over samples and pixels (bytes)",
    "batch_norm_backward": "the same, backward (bytes)",
    "softmax_backward": "softmax and log-softmax, backward (bytes)",
    "pool": "pooling over pixels, forward (bytes)",
    "pool_backward": "the same, backward (bytes)",
    "gather_backward": "embedding, backward: rows with equal indices are summed (bytes)",
    "transpose": "copies that change the order of dims (bytes)",
    "strided": "copies that change the order of dims but the last (bytes)",
    "widen": "casts to a wider type: bf16 to fp32, also when both are added (bytes)",
    "narrow": "casts to a narrower type: fp32 to bf16 (bytes)",
    "cat": "concatenation of tensors (bytes)",
    "recurrent_backward": "fused recurrent layers, backward (operations)",
}
"""Kinds of operators, each with its own measured curve."""

COMPUTE_KINDS = frozenset(
    {"matmul", "attention", "attention_backward", "conv", "conv_backward", "recurrent", "recurrent_backward"}
)
"""Compute-bound kinds; the rest is memory-bound."""

MATMUL_RATE_SHARE = {
    "attention": 0.5,
    "attention_backward": 0.4,
    "conv": 0.6,
    "conv_backward": 0.5,
    "recurrent": 0.3,
    "recurrent_backward": 0.3,
}
"""Share of the matmul rate that other compute-bound kernels reach, if no curve was measured."""

SIMILAR_KINDS = {
    "norm_backward": "norm",
    "batch_norm": "norm",
    "batch_norm_backward": "norm",
    "softmax_backward": "softmax",
    "pool": "reduce",
    "pool_backward": "reduce",
    "gather_backward": "gather",
    "broadcast": "pointwise",
    "transpose": "pointwise",
    "strided": "pointwise",
    "widen": "pointwise",
    "narrow": "pointwise",
    "cat": "pointwise",
    "recurrent_backward": "recurrent",
}
"""The kind whose curve is used for a kind without one."""

_STRICT = ConfigDict(extra="forbid")
_NOTHING = Affine()


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
    """Bytes read and written."""
    count: int = 1
    output: Affine = _NOTHING
    """Bytes of its result in the forward: the cost of keeping it."""
    group: int = 0
    """Operators of a layer with the same number above 0 are kept or recomputed together: they write one value, or draw
    random numbers in sequence."""
    recompute: str = ""
    """Under recomputation: `always` recomputed, because it cannot be kept; `never`, because nothing needs it; empty:
    chosen by cost."""
    is_output: bool = False
    """Whether its result is the layer's output, which the next layer keeps anyway."""
    dims: tuple[int, ...] = ()
    """In the forward, the sizes by which ranks can split it, in the order of op_shapes.py; empty if there are none."""
    dtype: str = ""
    """Compute type, if traced and not fp32: `bf16`, `fp16`."""
    shape: tuple[Affine, ...] = ()
    """Sizes that its time depends on besides its amounts, as in `ShapeTimes`; empty if unknown."""


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """The routed experts of a layer, which `ep` distributes over ranks."""

    __pydantic_config__ = _STRICT
    count: int
    active: int
    """Experts per token."""
    parameters: int
    """Trained parameters of all of them, which the layer counts among its own."""


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
    """Path in the model, such as `blocks.3`; empty for what belongs to the model itself."""
    kind: str
    """Its class."""
    parameters: int
    """Trained parameters (a tied weight counts once, in the first layer that uses it)."""
    frozen: int = 0
    """Parameters that are not trained."""
    tensors: int = 0
    """Number of trained parameter tensors."""
    largest: int = 0
    """Elements of its largest parameter."""
    tied: int = 0
    """Trained parameters that it uses and an earlier layer counts: a rank without that layer has them too."""
    tp_replicated: int = 0
    """Of one rank's part under tensor parallelism: the trained parameters replicated on all of these ranks."""
    ops: tuple[ProfiledOp, ...] = ()
    saved: Affine = _NOTHING
    """Bytes of activations that its forward keeps for its backward."""
    output: Affine = _NOTHING
    """Bytes of its output, which full recomputation keeps."""
    live_forward: Affine = _NOTHING
    """Peak bytes of activations and temporaries of the whole model during its forward."""
    live_backward: Affine = _NOTHING
    """The same during its backward, without gradients of parameters."""
    local_backward: Affine = _NOTHING
    """Memory that its backward needs beyond all kept activations: its own part of `live_backward`."""
    depth_forward: float = 0.0
    """Longest chain of dependent unit operations in its forward."""
    depth_backward: float = 0.0
    batch_norms: int = 0
    """Number of BatchNorms, whose statistics ranks synchronise."""
    cast: float = 0.0
    """Bytes of autocast's copies of its parameters, if traced under autocast."""
    composite: bool = False
    """It contains other modules, so recomputing it saves memory."""
    shard_unit: bool = False
    """It is sharded as its own unit under zero=3; other layers belong to the unit of the whole model."""
    views: int = 0
    """View operators of its forward, which cost host time only."""
    python_calls: int = 0
    """Python functions that its forward calls, if traced; they cost host time too."""
    repeats: int = 1
    """Number of equal layers in sequence; their names count up from the last number in `name`."""
    experts: ExpertLayer | None = None
    """Its experts, if it is a mixture; of one rank's part under `ep`, those of this rank."""

    def flops(self, phase: str | None = None) -> Affine:
        """Its operations in one phase, or in both; of one of its repeats."""
        return _total(self.ops, phase, lambda op: op.flops)

    def bytes(self, phase: str | None = None) -> Affine:
        """Bytes that its operators read and write."""
        return _total(self.ops, phase, lambda op: op.bytes)


@dataclass(frozen=True, slots=True)
class Profile(NotebookValue):
    """A model and its optimizer, ready to be priced."""

    __pydantic_config__ = _STRICT
    name: str
    batch_size: int
    """Samples per optimizer step, over all ranks."""
    layers: tuple[Layer, ...]
    """In execution order."""
    optimizer: str = "AdamW"
    state_per_parameter: float = 8.0
    """Bytes of optimizer state per trained parameter."""
    optimizer_bytes: float = 28.0
    """Bytes that the optimizer reads and writes per trained parameter."""
    optimizer_ops: float = 14.0
    """Operators that the optimizer launches per parameter tensor."""
    parameter_bytes: int = 4
    """Bytes of one parameter (master copy)."""
    activation_bytes: int = 4
    """Bytes of one activation as counted; other precisions are scaled from it."""
    buffers: float = 0.0
    """Bytes of the model's buffers."""
    input: Affine = _NOTHING
    """Bytes of one batch of inputs and targets."""
    depth: Affine = _NOTHING
    """Longest chain of dependent unit operations in forward and backward of one step; 0 if not traced."""
    origin: str = "formula"
    """`traced` or `formula`."""
    precision: str = ""
    """Precision of the plan that it was traced in, with all casts; empty: other precisions are scaled."""
    notes: tuple[str, ...] = ()
    """Limitations and assumptions of the trace."""
    data_flow: DataFlow | None = None
    """Operators of the forward and the values between them; only if the trace was asked for it."""

    @property
    def parameters(self) -> int:
        """Trained and frozen parameters."""
        return sum((x.parameters + x.frozen) * x.repeats for x in self.layers)

    @property
    def trained(self) -> int:
        """Trained parameters."""
        return sum(x.parameters * x.repeats for x in self.layers)

    @property
    def tensors(self) -> int:
        """Trained parameter tensors."""
        return sum(x.tensors * x.repeats for x in self.layers)

    def flops(self, phase: str | None = None) -> Affine:
        """The model's work: all operations of a phase, or of forward and backward."""
        return functools.reduce(Affine.__add__, (x.flops(phase).times(x.repeats) for x in self.layers), Affine())

    def each(self) -> Iterator[Layer]:
        """All layers in execution order, repeats one by one."""
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
