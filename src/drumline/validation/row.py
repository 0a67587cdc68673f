"""One published run, with every number that its prediction needs, from the cells of its row."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.errors import InputError
from . import words
from .cells import Cells, Silent
from .sheets import Sheet, domain_of, link_of, network_of, sheet_of

KINDS = ("analytic", "allocated", "reserved", "smi")
"""What a published memory counts: a formula, live tensors, the allocator's share, or all of the device."""


@dataclass(frozen=True, slots=True)
class Run:
    """One published run, with every number that its prediction needs."""

    line: int
    source: str
    name: str
    year: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    gated: bool
    tied: bool
    vocabulary: int
    sequence: int
    causal: bool
    predicted: float
    batch: int
    slice: float
    micro: float
    sheet: Sheet
    ranks: int
    node: int
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
    sequence_split: bool
    recompute: str
    order: int
    software: words.Software
    seconds: float | None
    memory: float | None
    kind: str
    """What that memory counts: one of KINDS."""
    first: bool
    """Whether it is of the first rank, and not of the fullest."""
    state: str
    """What was done to the cluster before; runs of different states are not compared."""


def run_of(cells: Cells, line: int) -> Run:
    """The run that a row tells of."""
    sheet = _sheet(cells)
    axes = _axes(cells)
    layers, hidden, heads = cells.count("layers"), cells.count("hidden"), cells.count("heads")
    kv_heads, inner = cells.count("kv_heads", heads), cells.count("ffn")
    vocabulary, sequence = cells.count("vocab"), cells.count("seq_len")
    ranks, batch, dp = axes["ranks"], axes["batch"], axes["dp"]
    slice_ = cells.number("micro_batch")
    if batch < dp * slice_:
        raise Silent("global_batch", f"global_batch({batch}) is less than dp({dp}) * micro_batch({slice_:g})")
    node = cells.count("gpus_per_node", sheet.node)
    domain = domain_of(cells.text("intra_link"), node)
    zero, recompute, software = _software(cells, sheet)
    seconds, memory = _seconds(cells, batch, sequence, ranks), _memory(cells)
    if seconds is None and memory is None:
        raise Silent("iteration_time_s", "no time, no throughput and no memory was published")
    maps = 2 * hidden**2 + 2 * hidden * kv_heads * hidden / heads + 2 * hidden * inner
    _believe(seconds, 6 * layers * maps * batch * sequence / ranks, sheet, software.precision)
    family = cells.text("model_family").lower()
    gated, tied = _form(cells, family, (layers, hidden, heads, kv_heads, inner, vocabulary, sequence))
    masked = "bert" in family
    return Run(
        line=line,
        source=cells.text("source"),
        name=cells.text("source_row"),
        year=cells.count("year"),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        inner=inner,
        gated=gated,
        tied=tied,
        vocabulary=vocabulary,
        sequence=sequence,
        causal=not masked,
        predicted=_MASKED if masked else 1.0,
        slice=slice_,
        micro=batch / (dp * slice_),
        sheet=sheet,
        node=domain,
        link=link_of(cells.text("intra_link"), sheet),
        network=network_of(cells.text("inter_link"), sheet, node, domain),
        **axes,
        zero=zero,
        shard=words.shard_of(cells.text("zero_fsdp"), dp, node),
        ep=1,
        sequence_split=cells.text("sp").lower().startswith("yes") and axes["tp"] > 1,
        recompute=recompute,
        order=words.schedule_of(cells.text("schedule"), axes["pp"], axes["virtual"]),
        software=software,
        seconds=seconds,
        memory=memory,
        kind=_kind(cells.text("memory_kind")),
        first="rank shown" in cells.text("memory_kind"),
        state=words.state_of(cells.text("note")),
    )


def _sheet(cells: Cells) -> Sheet:
    try:
        return sheet_of(cells.text("gpu"), cells.at("gpu"))
    except InputError as e:
        raise Silent("gpu", e.what) from None  # a table of many machines is read for those that are known


def _axes(cells: Cells) -> dict[str, int]:
    """How the ranks are arranged; their product must be all of them."""
    tp, pp, cp, ranks = cells.count("tp"), cells.count("pp"), cells.count("cp", 1), cells.count("n_gpus")
    dp = cells.count("dp", max(1, ranks // (tp * pp * cp)))
    if dp * tp * pp * cp != ranks:
        raise Silent("dp", f"dp({dp}) * tp({tp}) * pp({pp}) * cp({cp}) is not n_gpus({ranks})")
    if cells.count("ep", 1) > 1:
        raise Silent("ep", f"ep is {cells.text('ep')}, and no column holds the experts")
    batch, virtual = cells.count("global_batch"), cells.count("vpp", 1)
    return {"tp": tp, "pp": pp, "cp": cp, "dp": dp, "ranks": ranks, "batch": batch, "virtual": virtual}


def _software(cells: Cells, sheet: Sheet) -> tuple[int, str, words.Software]:
    """(zero, recomputation, the rest) from their words."""
    zero, recompute = words.zero_of(cells.text("zero_fsdp")), words.recompute_of(cells.text("recompute"))
    if zero is None:
        raise Silent("zero_fsdp", f"zero_fsdp is {cells.text('zero_fsdp')!r}")
    if recompute is None:
        raise Silent("recompute", f"recompute is {cells.text('recompute')!r}")
    precision = words.precision_of(cells.text("precision"))
    if precision is None or precision not in sheet.peaks:
        said, known = cells.text("precision"), ", ".join(sheet.peaks)
        raise Silent("precision", f"precision is {said!r}, {sheet.type} has {known}")
    return (
        zero,
        recompute,
        words.software_of(
            precision=precision,
            words=cells.text("precision"),
            zero=zero,
            zero_text=cells.text("zero_fsdp"),
            schedule=cells.text("schedule"),
            year=cells.count("year"),
            note=cells.text("note"),
        ),
    )


def _believe(seconds: float | None, work: float, sheet: Sheet, precision: str) -> None:
    """Nothing is faster than its peak: a row that is does not say all (padding left out, another precision)."""
    if seconds is not None and work / seconds > sheet.peaks[precision]:
        rate, peak = work / seconds / 1e12, sheet.peaks[precision] / 1e12
        reason = f"{rate:.3g} TFLOP/s at least, where {sheet.type} has {peak:.3g} in {precision}"
        raise Silent("iteration_time_s", reason)


_DENSE = 1.3
"""More parameters than this times those of its shape, and a model has experts that the columns do not hold."""
_MASKED = 0.156
"""The share of places that a masked language model predicts: 20 of 128, 80 of 512."""


def _form(cells: Cells, family: str, shape: tuple[int, int, int, int, int, int, int]) -> tuple[bool, bool]:
    """(gated, tied): as the family's name says, else the form whose parameters are nearest to the published number."""
    layers, hidden, heads, kv_heads, inner, vocabulary, sequence = shape
    usual = ("llama" in family, "llama" not in family)
    if not cells.text("params_b"):
        return usual
    given = cells.number("params_b") * 1e9
    body = layers * (2 * hidden**2 + 2 * hidden * kv_heads * hidden // heads)

    def count(form: tuple[bool, bool]) -> float:
        gated, tied = form
        return body + layers * (2 + gated) * hidden * inner + (1 + (not tied)) * vocabulary * hidden

    def off(form: tuple[bool, bool]) -> float:
        return abs(count(form) / given - 1)

    gates = (True,) if "llama" in family else (False, True)
    ties = (True,) if "tied" in family else (True, False)
    best = min(((g, t) for g in gates for t in ties), key=off)
    most = count((True, False)) + sequence * hidden
    if given > _DENSE * most:
        known = f"a dense model of this shape has {most / 1e9:.3g} at most"
        raise Silent("params_b", f"params_b is {given / 1e9:g}, {known}")
    stated = usual if "tied" not in family else (usual[0], True)
    return best if off(best) < off(stated) - 0.05 else stated


def _seconds(cells: Cells, batch: int, sequence: int, ranks: int) -> float | None:
    """Seconds of a step: as published, or from a throughput."""
    for key in ("iteration_time_s", "iter_s_derived"):
        if cells.text(key):
            return cells.number(key)
    if cells.text("tokens_per_s_per_gpu"):
        return batch * sequence / (cells.number("tokens_per_s_per_gpu") * ranks)
    return batch / cells.number("samples_per_s") if cells.text("samples_per_s") else None


def _memory(cells: Cells) -> float | None:
    """Bytes of a device that a run took."""
    if not cells.text("memory_gb_per_gpu"):
        return None
    unit = 2.0**30 if cells.text("memory_kind").startswith("GiB") or "smi" in cells.text("memory_kind") else 1e9
    return cells.number("memory_gb_per_gpu") * unit


def _kind(text: str) -> str:
    """What a published memory counts, from its own words; a maximum that names nothing is of tensors alive."""
    low = text.lower()
    for kind, word in (("smi", "smi"), ("analytic", "analytic"), ("allocated", "allocated"), ("reserved", "reserved")):
        if word in low:
            return kind
    return "reserved" if "peak" in low else "allocated"
