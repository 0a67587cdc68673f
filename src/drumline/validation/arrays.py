"""Runs as the arrays that the closed form reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..costs.fitted.inputs import Array, Layouts, Machines, Models, recomputed
from .row import KINDS, Run


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs side by side; what was not published is not a number."""

    models: Models
    layouts: Layouts
    machines: Machines
    seconds: Array
    memory: Array
    kind: Array
    """Index into `row.KINDS`."""
    sources: tuple[str, ...]
    chips: tuple[str, ...]
    best: Array
    """Share of peak that the best published product on this chip reached."""
    context: Array
    """Bytes that the framework takes by itself."""
    first: Array
    """1 where the memory is of the first rank."""

    def __len__(self) -> int:
        return len(self.sources)

    def take(self, rows: npt.NDArray[np.intp]) -> Runs:
        """Some of the runs."""
        return Runs(
            self.models.take(rows),
            self.layouts.take(rows),
            self.machines.take(rows),
            seconds=self.seconds[rows],
            memory=self.memory[rows],
            kind=self.kind[rows],
            sources=tuple(self.sources[i] for i in rows),
            chips=tuple(self.chips[i] for i in rows),
            best=self.best[rows],
            context=self.context[rows],
            first=self.first[rows],
        )


def arrays(runs: Sequence[Run]) -> Runs:
    """The runs, column by column."""
    again = [recomputed(r.recompute) for r in runs]
    models = Models.of(
        layers=[r.layers for r in runs],
        hidden=[r.hidden for r in runs],
        heads=[r.heads for r in runs],
        kv_heads=[r.kv_heads for r in runs],
        inner=[r.inner for r in runs],
        gated=[r.gated for r in runs],
        vocabulary=[r.vocabulary for r in runs],
        tied=[r.tied for r in runs],
        sequence=[r.sequence for r in runs],
        causal=[r.causal for r in runs],
        predicted=[r.predicted for r in runs],
        experts=1.0,
        active=1.0,
    )
    layouts = Layouts.of(
        tp=[r.tp for r in runs],
        pp=[r.pp for r in runs],
        virtual=[r.virtual for r in runs],
        dp=[r.dp for r in runs],
        zero=[r.zero for r in runs],
        shard=[r.shard for r in runs],
        cp=[r.cp for r in runs],
        ep=[r.ep for r in runs],
        sequence_split=[r.sequence_split for r in runs],
        slice=[r.slice for r in runs],
        micro=[r.micro for r in runs],
        again_products=[a[0] for a in again],
        again_attention=[a[1] for a in again],
        again_passes=[a[2] for a in again],
        order=[r.order for r in runs],
        fused=[r.software.fused for r in runs],
        fusion=[r.software.fusion for r in runs],
        low=[r.software.low for r in runs],
        gradient=[r.software.gradient for r in runs],
        master=[r.software.master for r in runs],
        added=[r.software.added for r in runs],
        copied=[r.software.copied for r in runs],
        overlap_dp=[r.software.overlap_dp for r in runs],
        overlap_tp=[r.software.overlap_tp for r in runs],
        # gradients of sharded parameters travel in 16 bits, and so do parameters; an optimizer that is sharded without
        # overlap still sums everywhere, and then keeps its part
        wire=[2.0 if r.zero == 3 else r.software.gradient for r in runs],
        spread=2.0,
        ahead=[r.software.overlap_dp for r in runs],
        scattered=[r.software.overlap_dp for r in runs],
        often=0.0,
    )
    machines = Machines.of(
        peak=[r.sheet.peaks[r.software.precision] for r in runs],
        peak16=[r.sheet.peaks["fp16" if r.software.low else r.software.precision] for r in runs],
        bandwidth=[r.sheet.bandwidth for r in runs],
        memory=[r.sheet.memory for r in runs],
        link=[r.link for r in runs],
        node=[min(r.node, r.ranks) for r in runs],
        network=[r.network for r in runs],
        start=0.0,
        start_network=0.0,
        power=[r.sheet.power for r in runs],
    )
    return Runs(
        models,
        layouts,
        machines,
        seconds=_numbers([r.seconds for r in runs]),
        memory=_numbers([r.memory for r in runs]),
        kind=np.array([float(KINDS.index(r.kind)) for r in runs]),
        sources=tuple(r.source for r in runs),
        chips=tuple(r.sheet.chip for r in runs),
        best=np.array([r.sheet.best for r in runs]),
        context=np.array([r.sheet.context for r in runs]),
        first=np.array([float(r.first) for r in runs]),
    )


def _numbers(values: Sequence[float | None]) -> Array:
    return np.array([np.nan if v is None else v for v in values], dtype=np.float64)
