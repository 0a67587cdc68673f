"""The `Plan` value and its notation: `dp=4,zero=3,micro=8`, the same in the command line, in files and in code.

A key is defined once, as a field of `Plan`: its type, meaning and tested values. `keys.py` derives the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..core import files
from ..core.display import NotebookValue
from ..core.errors import PlanError
from ..core.mesh import Mesh
from ..schedules import ALL_REDUCE_WORDS, ASYNCHRONOUS, OLD_WORDS
from .keys import (
    MEASURED,
    BytesKey,
    ChoiceKey,
    CountKey,
    FlagKey,
    LayersKey,
    PatternKey,
    TileKey,
    keys_of,
    nearest_valid,
    plan_key,
    read_values,
    word_of,
)

_COUNT, _FLAG = CountKey(), FlagKey()

COORDINATED = ("server", "async", "stale", "hogwild")
"""Values of `sync` whose replicas do not meet: a coordinator hands out work, and parameters live outside of them."""
INDEPENDENT = ("local", "gossip")
"""Values of `sync` whose replicas take optimizer steps by themselves and average weights."""
OUTER_RATES = (0.7, 0.9)
"""Rate and momentum of `outer=nesterov`, as in DiLoCo."""
WHOLE_BATCHES = ("async", "hogwild")
"""Values of `sync` whose replicas compute whole batches, not slices of them."""


@dataclass(frozen=True, slots=True)
class Plan(NotebookValue):
    """Mesh axes and the choices below them. `Plan.parse("dp=4,zero=3")` and `str(plan)` are inverse."""

    dp: int = plan_key(1, _COUNT, "data-parallel replicas", tested=None)
    shard: int = plan_key(
        0,
        CountKey(least=0),
        "how many replicas share one sharded copy; 0: all of them",
        tested=None,
        elsewhere="it shards over all replicas",
    )
    zero: int = plan_key(
        0,
        ChoiceKey(0, 1, 2, 3),
        "what is sharded: nothing, optimizer state, + gradients, + parameters",
        tested=(0, 1, 2, 3),
        elsewhere="it does not support this sharding",
    )
    tp: int = plan_key(1, _COUNT, "tensor-parallel ranks", tested=None, elsewhere="it has no tensor parallelism")
    cp: int = plan_key(1, _COUNT, "context-parallel ranks", tested=None, elsewhere="it has no context parallelism")
    ep: int = plan_key(
        1,
        _COUNT,
        "expert-parallel ranks: experts are split over this many neighbours of the data-parallel ranks",
        tested=None,
        elsewhere="it has no expert parallelism",
    )
    pp: int = plan_key(1, _COUNT, "pipeline stages", tested=None, elsewhere="it has no pipelines")
    virtual: int = plan_key(
        1, _COUNT, "pipeline stages per rank", tested=None, elsewhere="its pipelines have one stage per rank"
    )
    split: tuple[str, ...] = plan_key(
        (),
        LayersKey(),
        "where stages begin: at named layers; `measured`: by times measured before training; `auto`: by counted work",
        tested=None,
        elsewhere="it chooses the stage boundaries itself",
    )
    schedule: str = plan_key(
        "1f1b",
        ChoiceKey("naive", "gpipe", "1f1b", "interleaved", "zero-bubble", *ASYNCHRONOUS),
        "pipeline order; the last two never drain between steps, and compute on older weights",
        tested=("naive", "gpipe", "1f1b", "interleaved", "zero-bubble", *ASYNCHRONOUS),
        elsewhere="it has one pipeline order, 1f1b",
    )
    micro: int = plan_key(1, _COUNT, "micro-batches per step", tested=None)
    tile: tuple[int, int] = plan_key(
        (1, 1), TileKey(), "spatial tiles of an image batch", tested=None, elsewhere="it has no spatial parallelism"
    )
    halo: bool = plan_key(
        True,
        _FLAG,
        "whether tiles exchange border rows; without, each sees padding there, which is approximate",
        tested=(True, False),
        elsewhere="it has no tiles",
    )
    recompute: str = plan_key(
        "none",
        ChoiceKey("none", "selective", "full"),
        "which activations are recomputed in the backward",
        tested=("none", "selective", "full"),
        elsewhere="it does not support this recomputation",
    )
    offload: str = plan_key(
        "none",
        ChoiceKey("none", "optimizer", "all"),
        "which states are in host memory",
        tested=("none", "optimizer", "all"),
        elsewhere="it does not support this offloading",
    )
    chunk: int = plan_key(
        1, _COUNT, "memory-centric tiling of the largest layers", tested=None, elsewhere="it does not tile layers"
    )
    precision: str = plan_key(
        "fp32",
        ChoiceKey("fp32", "tf32", "bf16", "fp16", "bf16-pure", "fp8"),
        "compute type; weights stay fp32 but in `bf16-pure`; the last two are approximate: see docs/precision.md",
        tested=("fp32", "tf32", "bf16", "fp16", "bf16-pure", "fp8"),
        elsewhere="it does not support this type",
    )
    sync: str = plan_key(
        "allreduce",
        PatternKey(
            r"allreduce|server|async|hogwild|stale:(0|[1-9]\d{0,6})|local:[1-9]\d{0,6}|gossip(:random)?",
            *("allreduce", "server", "async", "stale:k", "hogwild", "local:k", "gossip", "gossip:random"),
            least={"stale": 0, "local": 1},
        ),
        "how replicas agree on the weights",
        tested=None,
        elsewhere="its replicas synchronise in every step",
    )
    servers: int = plan_key(
        1,
        _COUNT,
        "parameter servers of `sync=server`, `async` and `stale:k`: processes in addition to the replicas",
        tested=None,
        elsewhere="it has no parameter servers",
    )
    backup: int = plan_key(
        0,
        CountKey(least=0),
        "gradients of a step that `sync=server` does not wait for: the slowest are dropped",
        tested=None,
        elsewhere="it waits for every gradient",
    )
    damping: str = plan_key(
        "none",
        ChoiceKey("none", "inverse"),
        "weight of stale gradients; `inverse`: 1 / (1 + staleness)",
        tested=("none", "inverse"),
        elsewhere="it has no stale gradients",
    )
    outer: str = plan_key(
        "none",
        PatternKey(r"none|nesterov(:\d*\.?\d+:\d*\.?\d+)?", "none", "nesterov", "nesterov:RATE:MOMENTUM"),
        "optimizer on the average of `sync=local:k` (DiLoCo); `nesterov` alone is nesterov:0.7:0.9",
        tested=None,
        elsewhere="it has no outer optimizer",
    )
    sync_first: int = plan_key(
        0,
        CountKey(least=0),
        "steps of `sync=local:k` at the start that average after every step (post-local SGD)",
        tested=None,
        elsewhere="it has no local steps",
    )
    across: int = plan_key(
        0,
        CountKey(least=0),
        "steps between averages over all hosts, while `sync=local:k` averages inside each host; 0: all at once",
        tested=None,
        elsewhere="it has no local steps",
    )
    allreduce: str = plan_key(
        "auto",
        ChoiceKey(*ALL_REDUCE_WORDS, old=OLD_WORDS),
        "algorithm that sums gradients; `native`: the backend's own; `auto`: native, hierarchical between CPU hosts",
        tested=ALL_REDUCE_WORDS,
        elsewhere="the backend chooses the algorithm",
    )
    backend: str = plan_key(
        "auto",
        ChoiceKey("auto", "gloo", "nccl", "shm", "mpi", "threads"),
        "transport; `auto` is nccl on GPUs, shm on one host, gloo otherwise; `mpi`: by mpiexec; `threads`: one process",
        tested=("auto", "gloo", "nccl", "shm", "mpi", "threads"),
        elsewhere="it does not support this transport",
    )
    compress: str = plan_key(
        "none",
        ChoiceKey("none", "fp16", "powersgd"),
        "gradient compression",
        tested=("none", "fp16", "powersgd"),
        elsewhere="it does not support this compression",
    )
    bucket: int = plan_key(
        25 * 2**20,
        BytesKey(),
        "bytes of gradients per message",
        tested=None,
        elsewhere="it has no bucket size under this strategy",
    )
    compile: bool = plan_key(False, _FLAG, "fuse the graph", tested=(False, True), elsewhere="it has no key for it")
    graph: bool = plan_key(
        False, _FLAG, "replay steps as CUDA graphs", tested=(False, True), elsewhere="it has no graphs"
    )
    static: bool = plan_key(
        False,
        _FLAG,
        "DDP may assume that every step uses the same parameters in the same order",
        tested=(False, True),
        elsewhere="it does not use DDP",
    )

    def __post_init__(self) -> None:
        for name, default, key in _CHECKS:
            value = getattr(self, name)
            if value is not default and not key.type.check(value):
                raise PlanError(
                    f"{name}={word_of(key.type.write(value))}",
                    rule=f"{name} is {key.type.rule_for(value)}",
                    fix=nearest_valid(self, name),
                )
        if self.shard and self.dp % self.shard:
            raise PlanError(
                f"shard={self.shard} with dp={self.dp}", rule=f"shard divides dp: {self.dp} % {self.shard} != 0"
            )
        replicas, name = (self.shard, "shard") if self.zero and self.shard else (self.dp, "dp")
        if replicas % self.ep:
            small = [n for n in range(1, math.isqrt(replicas) + 1) if replicas % n == 0]
            near = min((m for n in small for m in (n, replicas // n)), key=lambda n: (abs(n - self.ep), -n))
            raise PlanError(
                f"ep={self.ep} with {name}={replicas}",
                rule=f"ep divides {name}, of whose ranks it is a part: {replicas} % {self.ep} != 0",
                fix=f"ep={near}",
            )

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.mesh.size

    @property
    def processes(self) -> int:
        """Number of processes: one per rank and per parameter server, or one in all if replicas are threads."""
        return 1 if self.backend == "threads" else self.ranks + self.server_processes

    @property
    def sync_mode(self) -> str:
        """The word of `sync`, without its number: `stale` of `stale:4`."""
        return self.sync.partition(":")[0]

    @property
    def sync_steps(self) -> int:
        """The number of `sync`: 4 of `stale:4` and of `local:4`; 0 where there is none."""
        number = self.sync.partition(":")[2]
        return int(number) if number.isdigit() else 0

    @property
    def has_coordinator(self) -> bool:
        """Whether a process in addition to the replicas decides who computes what: see docs/asynchronous.md."""
        return self.sync_mode in COORDINATED

    @property
    def slices(self) -> int:
        """Parts of a batch that replicas compute at the same time: one each, or 1 where each computes whole batches."""
        return 1 if self.sync in WHOLE_BATCHES else self.dp

    @property
    def steps_alone(self) -> bool:
        """Whether each replica takes optimizer steps by itself, and replicas average weights, not gradients."""
        return self.sync_mode in INDEPENDENT

    @property
    def outer_rates(self) -> tuple[float, float] | None:
        """Rate and momentum of the outer optimizer; None without one."""
        _, *numbers = self.outer.split(":")
        if self.outer == "none":
            return None
        return (float(numbers[0]), float(numbers[1])) if numbers else OUTER_RATES

    @property
    def server_processes(self) -> int:
        """Processes in addition to one per replica: parameter servers, or the coordinator of `sync=hogwild`."""
        if not self.has_coordinator:
            return 0
        return 1 if self.sync_mode == "hogwild" else self.servers

    @property
    def splits_model(self) -> bool:
        """Whether ranks work on different parts of the model or of a sample."""
        return self.pp * self.tp * self.cp * self.tile[0] * self.tile[1] > 1

    @property
    def keeps_batches_in_flight(self) -> bool:
        """Whether the pipeline does not drain between batches, which then compute on older weights."""
        return self.pp > 1 and self.schedule in ASYNCHRONOUS

    @property
    def begins(self) -> tuple[str, ...]:
        """The layers that begin a stage, if given by name."""
        return () if self.split == MEASURED else self.split

    @property
    def equation(self) -> str:
        """The product that must equal the number of ranks: `pp(2) x dp(4)`."""
        tiles = self.tile[0] * self.tile[1]
        factors = (("pp", self.pp), ("dp", self.dp), ("tile", tiles), ("cp", self.cp), ("tp", self.tp))
        return " x ".join(f"{name}({n})" for name, n in factors if n > 1) or "dp(1)"

    @property
    def shards(self) -> int:
        """Number of ranks that share one sharded copy."""
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
        """Whether the result equals that of one device, up to rounding."""
        return (
            (self.sync in ("allreduce", "server", "stale:0") or (self.dp == 1 and self.outer == "none"))
            and self.backup == 0
            and self.compress == "none"
            and not self.keeps_batches_in_flight
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
        try:
            return cls(**read_values(KEYS, table, where))
        except PlanError as e:
            raise PlanError(e.what, where=e.where or where, rule=e.rule, fix=e.fix) from None

    def table(self) -> dict[str, Any]:
        """The keys that differ from their defaults, in the order of the notation; `dp` always."""
        return {
            name: key.type.write(value)
            for name, default, key in _CHECKS
            if (value := getattr(self, name)) != default or name == "dp"
        }

    def save(self, path: str | Path, comment: str = "") -> None:
        """Write the TOML form."""
        files.write_toml(path, self.table(), comment)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read the TOML form."""
        return cls.from_table(files.read_toml(path, PlanError), where=str(path))

    def __str__(self) -> str:
        return ",".join(f"{name}={word_of(value)}" for name, value in self.table().items())


KEYS = keys_of(Plan)
"""The definitions of all keys, by name."""
CHOICES: dict[str, tuple[str, ...]] = {
    name: tuple(map(str, key.type.choices))
    for name, key in KEYS.items()
    if isinstance(key.type, ChoiceKey) and name != "zero"
}
"""The words that each key of words takes."""
_CHECKS = tuple((f.name, f.default, KEYS[f.name]) for f in fields(Plan))
