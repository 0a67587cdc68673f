"""The `Plan` value and its notation: `dp=4,zero=3,micro=8`. One vocabulary in the command line, in files, in code."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..core import files
from ..core.errors import PlanError, nearest
from ..core.mesh import Mesh
from ..core.units import parse_bytes

CHOICES: dict[str, tuple[str, ...]] = {
    "schedule": ("naive", "gpipe", "1f1b", "interleaved", "zero-bubble"),
    "recompute": ("none", "selective", "full"),
    "offload": ("none", "optimizer", "all"),
    "precision": ("fp32", "tf32", "bf16", "fp16", "bf16-pure", "fp8"),
    "allreduce": ("auto", "ring", "doubling", "halving", "tree", "server", "hierarchical"),
    "backend": ("auto", "gloo", "nccl", "shm", "mpi", "threads"),
    "compress": ("none", "fp16", "powersgd"),
}
"""The words that each key of words takes."""

MEASURED = ("measured",)
"""What `split` is where the stages are cut by measured times."""
_SWITCHES = ("compile", "static", "halo")
"""Keys that are true or false."""
_COUNTS = ("dp", "shard", "tp", "cp", "ep", "pp", "virtual", "micro", "chunk")
LARGEST = 10_000_000


@dataclass(frozen=True, slots=True)
class Plan:
    """Mesh axes and every choice below them. `Plan.parse("dp=4,zero=3")` and `str(plan)` are inverse."""

    dp: int = 1
    """Data-parallel replicas."""
    shard: int = 0
    """How many of the replicas share one sharded copy; 0 means all of them."""
    zero: int = 0
    """What is sharded: nothing, optimizer state, + gradients, + parameters."""
    tp: int = 1
    """Tensor-parallel ranks."""
    cp: int = 1
    """Context-parallel ranks."""
    ep: int = 1
    """Expert-parallel ranks: over how many neighbours of the data-parallel ranks the experts lie."""
    pp: int = 1
    """Pipeline stages."""
    virtual: int = 1
    """Pipeline stages per rank."""
    split: tuple[str, ...] = ()
    """Where stages begin: by hand, as names of the layers that begin one, written with `+` between them; `measured`, by
    times that are taken before the training; nothing (`auto`): by counted work."""
    schedule: str = "1f1b"
    """Pipeline order."""
    micro: int = 1
    """Micro-batches per step."""
    tile: tuple[int, int] = (1, 1)
    """Spatial tiles of an image batch."""
    halo: bool = True
    """Whether tiles get the rows of their neighbours; without, each sees padding there, which is approximate."""
    recompute: str = "none"
    """Activations kept, or computed again."""
    offload: str = "none"
    """What lives in host memory."""
    chunk: int = 1
    """Memory-centric tiling of the largest layers."""
    precision: str = "fp32"
    """Compute type."""
    sync: str = "allreduce"
    """How replicas agree."""
    allreduce: str = "auto"
    """The algorithm that carries gradients."""
    backend: str = "auto"
    """The transport: `auto` is nccl for CUDA devices, shm on one host and gloo otherwise; `threads`: one process."""
    compress: str = "none"
    """How gradients are compressed."""
    bucket: int = 25 * 2**20
    """Bytes of gradients per message."""
    compile: bool = False
    """Fuse the graph."""
    static: bool = False
    """Replication may rely on every step using the same parameters in the same order."""

    def __post_init__(self) -> None:
        for key in _COUNTS:
            value = getattr(self, key)
            least = 0 if key == "shard" else 1
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= LARGEST:
                raise PlanError(f"{key}={value}", rule=f"{key} is a whole number from {least} to {LARGEST}")
        if self.zero not in (0, 1, 2, 3):
            raise PlanError(f"zero={self.zero}", rule="zero is 0, 1, 2 or 3")
        for key, words in CHOICES.items():
            if getattr(self, key) not in words:
                word = str(getattr(self, key))
                raise PlanError(f"{key}={word}", rule=f"{key} is {', '.join(words)}", fix=nearest(word, words))
        if not re.fullmatch(r"allreduce|server|async|(stale|local):[1-9]\d{0,6}", self.sync):
            raise PlanError(f"sync={self.sync}", rule="sync is allreduce, server, async, stale:k or local:k")
        if self.shard and self.dp % self.shard:
            raise PlanError(
                f"shard={self.shard} with dp={self.dp}", rule=f"shard divides dp: {self.dp} % {self.shard} != 0"
            )
        whole, key = (self.shard, "shard") if self.zero and self.shard else (self.dp, "dp")
        if whole % self.ep:
            small = [n for n in range(1, math.isqrt(whole) + 1) if whole % n == 0]
            near = min((m for n in small for m in (n, whole // n)), key=lambda n: (abs(n - self.ep), -n))
            raise PlanError(
                f"ep={self.ep} with {key}={whole}",
                rule=f"ep divides {key}, of whose ranks it is a part: {whole} % {self.ep} != 0",
                fix=f"ep={near}",
            )
        if len(self.split) > 1 and not {"auto", *MEASURED}.isdisjoint(self.split):
            raise PlanError(
                f"split={'+'.join(self.split)}", rule="split is auto, measured, or names of layers with + between them"
            )
        if self.bucket < 1 or min(self.tile) < 1:
            raise PlanError(f"bucket={self.bucket}, tile={_tile(self.tile)}", rule="both are positive")

    @property
    def ranks(self) -> int:
        """How many ranks it takes."""
        return self.mesh.size

    @property
    def processes(self) -> int:
        """How many processes are started: one a rank, except where replicas are threads."""
        return 1 if self.backend == "threads" else self.ranks

    @property
    def splits_model(self) -> bool:
        """Whether ranks have different parts of the model, or of a sample."""
        return self.pp * self.tp * self.cp * self.tile[0] * self.tile[1] > 1

    @property
    def begins(self) -> tuple[str, ...]:
        """The layers that begin a stage, where they are given by name."""
        return () if self.split == MEASURED else self.split

    @property
    def equation(self) -> str:
        """The product that must equal the number of ranks: `pp(2) x dp(4)`."""
        tiles = self.tile[0] * self.tile[1]
        factors = (("pp", self.pp), ("dp", self.dp), ("tile", tiles), ("cp", self.cp), ("tp", self.tp))
        return " x ".join(f"{name}({n})" for name, n in factors if n > 1) or "dp(1)"

    @property
    def shards(self) -> int:
        """Over how many ranks one sharded copy lies."""
        return (self.shard or self.dp) if self.zero else 1

    @property
    def mesh(self) -> Mesh:
        """The ranks by axis, outermost first, so that tensor parallelism stays inside a node."""
        shard = self.shard or self.dp if self.zero else 1
        axes = (
            ("pp", self.pp),
            ("replica", self.dp // shard),
            ("shard", shard),
            ("tile", self.tile[0] * self.tile[1]),
            ("cp", self.cp),
            ("tp", self.tp),
        )
        return Mesh(tuple((name, n) for name, n in axes if n > 1))

    @property
    def exact(self) -> bool:
        """Whether it computes what one device would, up to rounding."""
        return (
            self.sync in ("allreduce", "server")
            and self.compress == "none"
            and self.precision not in ("bf16-pure", "fp8")
            and self.halo
        )

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Read the notation `dp=4,zero=3`; the empty text is one rank."""
        table: dict[str, Any] = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            key, equals, value = (x.strip() for x in part.partition("="))
            if not equals or not value:
                raise PlanError(f"{part!r} in the plan {text!r}", rule="a plan is key=value,key=value,...")
            if key in table:
                raise PlanError(f"{key!r} is given twice in the plan {text!r}")
            table[key] = value
        return cls.from_table(table, where=f"plan {text!r}")

    @classmethod
    def from_table(cls, table: Mapping[str, Any], where: str) -> Plan:
        """Read a table of keys, as in a file; values may be text as in the notation."""
        known = {f.name: f for f in fields(cls)}
        values: dict[str, Any] = {}
        for key, value in table.items():
            if key not in known:
                raise PlanError(f"unknown key {key!r} in a plan", where=where, fix=nearest(key, known))
            values[key] = _read(key, value, where)
        try:
            return cls(**values)
        except PlanError as e:
            raise PlanError(e.what, where=e.where or where, rule=e.rule, fix=e.fix) from None

    def table(self) -> dict[str, Any]:
        """The keys that differ from their defaults, in the order of the notation; `dp` always."""
        table: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if value != f.default or f.name == "dp":
                table[f.name] = _tile(value) if f.name == "tile" else list(value) if f.name == "split" else value
        return table

    def save(self, path: str | Path, comment: str = "") -> None:
        """Write the TOML form."""
        files.write_toml(path, self.table(), comment)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read the TOML form."""
        return cls.from_table(files.read_toml(path, PlanError), where=str(path))

    def __str__(self) -> str:
        return ",".join(f"{key}={_word(value)}" for key, value in self.table().items())


def _read(key: str, value: Any, where: str) -> Any:
    """One value of the notation, from text or from a TOML value."""
    try:
        if key in _COUNTS or key == "zero":
            if isinstance(value, str):
                return int(value)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError("a whole number")
            return value
        if key == "bucket":
            return int(parse_bytes(value))
        if key == "tile":
            rows, columns = str(value).split("x")
            return int(rows), int(columns)
        if key == "split":
            names = tuple(value.split("+")) if isinstance(value, str) else tuple(map(str, value))
            return () if names == ("auto",) else names
        if key in _SWITCHES:
            return {"true": True, "false": False}[str(value).lower()]
        return str(value)
    except (ValueError, KeyError, TypeError):
        kind = {
            "bucket": "a size such as 25MiB",
            "tile": "rows x columns such as 2x2",
            **dict.fromkeys(_SWITCHES, "true or false"),
        }
        raise PlanError(f"{key}={value}", where=where, rule=f"{key} is {kind.get(key, 'a whole number')}") from None


def _word(value: Any) -> str:
    if isinstance(value, list):
        return "+".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _tile(tile: tuple[int, int]) -> str:
    return f"{tile[0]}x{tile[1]}"
