"""One published run with every number that its prediction needs, read from one row of a table."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..core.errors import InputError
from . import run_mixture, run_text
from .datasheets import (
    DataSheet,
    parse_datasheet,
    parse_link_domain,
    parse_network_bandwidth,
    parse_node_bandwidth,
)

_UNSTATED = re.compile(r"auto\b.*|not stated.*|unknown|n/?a|-|\d+\.\.\d+", re.IGNORECASE | re.DOTALL)
"""Text in place of a number that means: the source does not say."""
_REMARK = re.compile(r"^~\s*|\s*\(.*\)$", re.DOTALL)
"""Remarks around a number: `~0.3`, `8 (assumed)`."""


MEMORY_KINDS = ("analytic", "allocated", "reserved", "smi")
"""Meaning of a published memory: a formula, live tensors, allocator reservations, or the whole device."""


class Unstated(Exception):
    """The row lacks something that its prediction needs: (column, reason)."""


class RunRow:
    """The cells of one row, by column."""

    def __init__(self, row: dict[str, str], where: str) -> None:
        self._row, self.where = row, where

    def text(self, key: str) -> str:
        """A cell, without surrounding spaces."""
        return (self._row.get(key) or "").strip()

    def at(self, key: str) -> str:
        """File, line and column of a cell."""
        return f"{self.where}: {key}"

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number; the default where it is not stated, and `Unstated` without a default."""
        text = self.text(key)
        if not text:
            if default is None:
                raise Unstated(key, f"{key} is empty")
            return default
        try:
            value = float(_REMARK.sub("", text))
        except ValueError:
            if _UNSTATED.fullmatch(text) and default is not None:
                return default
            if _UNSTATED.fullmatch(text):
                raise Unstated(key, f"{key} is {text!r}, not a number") from None
            raise InputError(f"{key} is {text!r}", where=self.at(key), rule="a number, or nothing") from None
        if not 0 < value < 1e18:
            raise InputError(f"{key} is {text}", where=self.at(key), rule="more than 0, and finite")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number, at least 1."""
        value = self.number(key, default)
        if value != int(value):
            raise InputError(f"{key} is {value:g}", where=self.at(key), rule="a whole number")
        return int(value)


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """One published run; fields as in `ModelColumns`, `LayoutColumns` and `MachineColumns`."""

    line: int
    source: str
    name: str
    year: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    gated: bool
    tied: bool
    vocabulary: int
    sequence: int
    causal: bool
    predicted_fraction: float
    batch: int
    micro_batch_size: float
    micro: float
    sheet: DataSheet
    ranks: int
    devices_per_node: int
    link: float
    network: float
    tp: int
    pp: int
    virtual: int
    dp: int
    zero: int
    shard: int
    cp: int
    ep: int
    mixture: run_mixture.RunMixture | None
    """The experts, if the model has any."""
    latent: bool
    """Whether keys and values are expanded from a latent width, as in DeepSeek-V2 and V3."""
    sequence_parallel: bool
    recompute: str
    schedule: int
    software: run_text.RunSoftware
    seconds: float | None
    memory: float | None
    memory_kind: str
    """One of MEMORY_KINDS."""
    first_rank: bool
    """Whether the memory is that of the first rank, not of the fullest."""
    cluster_state: str
    """Changes of the cluster before the run; runs in different states are not compared."""


def parse_run(row: RunRow, line: int) -> PublishedRun:
    """Read the run of a row."""
    sheet = _datasheet(row)
    axes = _axes(row)
    layers, hidden, heads = row.count("layers"), row.count("hidden"), row.count("heads")
    mixture = run_mixture.parse_mixture(row, layers)
    kv_heads, ffn = row.count("kv_heads", heads), row.count("ffn", mixture.equal_ffn if mixture else None)
    vocabulary, sequence = row.count("vocab"), row.count("seq_len")
    ranks, batch, dp = axes["ranks"], axes["batch"], axes["dp"]
    size = row.number("micro_batch")
    if batch < dp * size:
        raise Unstated("global_batch", f"global_batch({batch}) is less than dp({dp}) * micro_batch({size:g})")
    node = row.count("gpus_per_node", sheet.node)
    domain = parse_link_domain(row.text("intra_link"), node)
    zero, recompute, software = _software(row, sheet)
    seconds, memory = _seconds(row, batch, sequence, ranks), _memory(row)
    if seconds is None and memory is None:
        raise Unstated("iteration_time_s", "no time, no throughput and no memory was published")
    if axes["ep"] > 1 and mixture is None:
        raise Unstated("ep", f"ep is {axes['ep']}, and no column has the experts")
    weights = 2 * hidden * kv_heads * hidden / heads + 2 * hidden * ffn
    weights += 2 * hidden**2 if not run_mixture.is_latent(row) else 0
    _check_plausible(seconds, 6 * layers * weights * batch * sequence / ranks, sheet, software.precision)
    family = row.text("model_family").lower()
    gated, tied = (
        (True, False)
        if mixture
        else _gated_and_tied(row, family, (layers, hidden, heads, kv_heads, ffn, vocabulary, sequence))
    )
    masked = "bert" in family
    return PublishedRun(
        line=line,
        source=row.text("source"),
        name=row.text("source_row"),
        year=row.count("year"),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        gated=gated,
        tied=tied,
        vocabulary=vocabulary,
        sequence=sequence,
        causal=not masked,
        predicted_fraction=_MASKED if masked else 1.0,
        micro_batch_size=size,
        micro=batch / (dp * size),
        sheet=sheet,
        devices_per_node=domain,
        link=parse_node_bandwidth(row.text("intra_link"), sheet),
        network=parse_network_bandwidth(row.text("inter_link"), sheet, node, domain),
        **axes,
        zero=zero,
        shard=run_text.parse_shard(row.text("zero_fsdp"), dp, node),
        mixture=mixture,
        latent=run_mixture.is_latent(row),
        sequence_parallel=row.text("sp").lower().startswith("yes") and axes["tp"] > 1,
        recompute=recompute,
        schedule=run_text.parse_schedule(row.text("schedule"), axes["pp"], axes["virtual"]),
        software=software,
        seconds=seconds,
        memory=memory,
        memory_kind=_memory_kind(row.text("memory_kind")),
        first_rank="rank shown" in row.text("memory_kind"),
        cluster_state=run_text.parse_cluster_state(row.text("note")),
    )


def _datasheet(row: RunRow) -> DataSheet:
    try:
        return parse_datasheet(row.text("gpu"), row.at("gpu"))
    except InputError as e:
        raise Unstated("gpu", e.what) from None  # rows of unknown machines are skipped


def _axes(row: RunRow) -> dict[str, int]:
    """Sizes of the parallel axes; their product must be the number of ranks."""
    tp, pp, cp, ranks = row.count("tp"), row.count("pp"), row.count("cp", 1), row.count("n_gpus")
    dp = row.count("dp", max(1, ranks // (tp * pp * cp)))
    if dp * tp * pp * cp != ranks:
        raise Unstated("dp", f"dp({dp}) * tp({tp}) * pp({pp}) * cp({cp}) is not n_gpus({ranks})")
    batch, virtual, ep = row.count("global_batch"), row.count("vpp", 1), row.count("ep", 1)
    return {"tp": tp, "pp": pp, "cp": cp, "dp": dp, "ep": ep, "ranks": ranks, "batch": batch, "virtual": virtual}


def _software(row: RunRow, sheet: DataSheet) -> tuple[int, str, run_text.RunSoftware]:
    """(zero, recomputation, software) from their text."""
    zero, recompute = run_text.parse_zero(row.text("zero_fsdp")), run_text.parse_recompute(row.text("recompute"))
    if zero is None:
        raise Unstated("zero_fsdp", f"zero_fsdp is {row.text('zero_fsdp')!r}")
    if recompute is None:
        raise Unstated("recompute", f"recompute is {row.text('recompute')!r}")
    precision = run_text.parse_precision(row.text("precision"))
    if precision is None or precision not in sheet.peaks:
        known = ", ".join(sheet.peaks)
        raise Unstated("precision", f"precision is {row.text('precision')!r}, {sheet.type} has {known}")
    return (
        zero,
        recompute,
        run_text.infer_software(
            precision=precision,
            precision_text=row.text("precision"),
            zero=zero,
            zero_text=row.text("zero_fsdp"),
            schedule=row.text("schedule"),
            year=row.count("year"),
            note=row.text("note"),
        ),
    )


def _check_plausible(seconds: float | None, work: float, sheet: DataSheet, precision: str) -> None:
    """Skip rows above the peak: they leave something out, such as padding or another precision."""
    if seconds is not None and work / seconds > sheet.peaks[precision]:
        rate, peak = work / seconds / 1e12, sheet.peaks[precision] / 1e12
        reason = f"{rate:.3g} TFLOP/s at least, where {sheet.type} has {peak:.3g} in {precision}"
        raise Unstated("iteration_time_s", reason)


_DENSE = 1.3
"""A model with more parameters than this times its dense shape has experts that its columns do not contain."""
_MASKED = 0.156
"""Fraction of positions that a masked language model predicts: 20 of 128, 80 of 512."""


def _gated_and_tied(row: RunRow, family: str, shape: tuple[int, int, int, int, int, int, int]) -> tuple[bool, bool]:
    """(gated, tied): by the name of the family, or the form whose parameters match the published number best."""
    layers, hidden, heads, kv_heads, ffn, vocabulary, sequence = shape
    usual = ("llama" in family, "llama" not in family)
    if not row.text("params_b"):
        return usual
    given = row.number("params_b") * 1e9
    body = layers * (2 * hidden**2 + 2 * hidden * kv_heads * hidden // heads)

    def count(form: tuple[bool, bool]) -> float:
        gated, tied = form
        return body + layers * (2 + gated) * hidden * ffn + (1 + (not tied)) * vocabulary * hidden

    def off(form: tuple[bool, bool]) -> float:
        return abs(count(form) / given - 1)

    gates = (True,) if "llama" in family else (False, True)
    ties = (True,) if "tied" in family else (True, False)
    best = min(((g, t) for g in gates for t in ties), key=off)
    most = count((True, False)) + sequence * hidden
    if given > _DENSE * most:
        known = f"a dense model of this shape has {most / 1e9:.3g} at most"
        raise Unstated("params_b", f"params_b is {given / 1e9:g}, {known}")
    stated = usual if "tied" not in family else (usual[0], True)
    return best if off(best) < off(stated) - 0.05 else stated


def _seconds(row: RunRow, batch: int, sequence: int, ranks: int) -> float | None:
    """Seconds of a step: as published, or from a throughput."""
    for key in ("iteration_time_s", "iter_s_derived"):
        if row.text(key):
            return row.number(key)
    if row.text("tokens_per_s_per_gpu"):
        return batch * sequence / (row.number("tokens_per_s_per_gpu") * ranks)
    return batch / row.number("samples_per_s") if row.text("samples_per_s") else None


def _memory(row: RunRow) -> float | None:
    """Bytes per device."""
    if not row.text("memory_gb_per_gpu"):
        return None
    unit = 2.0**30 if row.text("memory_kind").startswith("GiB") or "smi" in row.text("memory_kind") else 1e9
    return row.number("memory_gb_per_gpu") * unit


def _memory_kind(text: str) -> str:
    """Meaning of a published memory; a maximum without further words is of live tensors."""
    low = text.lower()
    for kind, word in (("smi", "smi"), ("analytic", "analytic"), ("allocated", "allocated"), ("reserved", "reserved")):
        if word in low:
            return kind
    return "reserved" if "peak" in low else "allocated"
