"""Published runs as columns, and their predicted step time and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..costs.fitted.constants import MEMORY_CONSTANTS, TIME_CONSTANTS, Constants
from ..costs.fitted.constants_file import FittedConstants
from ..costs.fitted.host_waits import WaitConstants
from ..costs.fitted.inputs import LayoutColumns, MachineColumns, ModelColumns, recompute_fractions
from ..costs.fitted.memory import StepMemory, step_memory
from ..costs.fitted.step import StepTimes, step_times
from ..costs.plan_columns import Array
from .published_run import MEMORY_KINDS, PublishedRun
from .run_mixture import HEAD_WIDTH, KV_LATENT, QUERY_LATENT, VALUE_WIDTH


@dataclass(frozen=True, slots=True)
class RunColumns:
    """Runs, one per row; NaN where nothing was published."""

    models: ModelColumns
    layouts: LayoutColumns
    machines: MachineColumns
    seconds: Array
    memory: Array
    memory_kind: Array
    """Index into MEMORY_KINDS."""
    sources: tuple[str, ...]
    chips: tuple[str, ...]
    best: Array
    """Fraction of peak that the best published matmul on this chip reached."""
    context: Array
    """Memory of the framework itself."""
    first_rank: Array
    """1 where the memory is that of the first rank."""

    def __len__(self) -> int:
        return len(self.sources)

    def take(self, rows: npt.NDArray[np.intp]) -> RunColumns:
        """Select runs."""
        return RunColumns(
            self.models.take(rows),
            self.layouts.take(rows),
            self.machines.take(rows),
            seconds=self.seconds[rows],
            memory=self.memory[rows],
            memory_kind=self.memory_kind[rows],
            sources=tuple(self.sources[i] for i in rows),
            chips=tuple(self.chips[i] for i in rows),
            best=self.best[rows],
            context=self.context[rows],
            first_rank=self.first_rank[rows],
        )


def run_columns(runs: Sequence[PublishedRun]) -> RunColumns:
    """One row per run."""
    return RunColumns(
        _models(runs),
        _layouts(runs),
        _machines(runs),
        seconds=_or_nan([r.seconds for r in runs]),
        memory=_or_nan([r.memory for r in runs]),
        memory_kind=np.array([float(MEMORY_KINDS.index(r.memory_kind)) for r in runs]),
        sources=tuple(r.source for r in runs),
        chips=tuple(r.sheet.chip for r in runs),
        best=np.array([r.sheet.best for r in runs]),
        context=np.array([r.sheet.context for r in runs]),
        first_rank=np.array([float(r.first_rank) for r in runs]),
    )


def _models(runs: Sequence[PublishedRun]) -> ModelColumns:
    return ModelColumns.of(
        layers=[r.layers for r in runs],
        hidden=[r.hidden for r in runs],
        heads=[r.heads for r in runs],
        kv_heads=[r.kv_heads for r in runs],
        ffn=[r.ffn for r in runs],
        gated=[r.gated for r in runs],
        vocabulary=[r.vocabulary for r in runs],
        tied=[r.tied for r in runs],
        sequence=[r.sequence for r in runs],
        causal=[r.causal for r in runs],
        predicted_fraction=[r.predicted_fraction for r in runs],
        experts=[r.mixture.experts if r.mixture else 1 for r in runs],
        active_experts=[r.mixture.active_experts if r.mixture else 1 for r in runs],
        expert_ffn=[r.mixture.expert_ffn if r.mixture else r.ffn for r in runs],
        routed_nodes=[r.mixture.routed_nodes if r.mixture else 1 for r in runs],
        shared_experts=[r.mixture.shared_experts if r.mixture else 0 for r in runs],
        dense_layers=[r.mixture.dense_layers if r.mixture else r.layers for r in runs],
        head_width=[HEAD_WIDTH if r.latent else r.hidden / r.heads for r in runs],
        value_width=[VALUE_WIDTH if r.latent else r.hidden / r.heads for r in runs],
        query_latent=[QUERY_LATENT * r.latent for r in runs],
        kv_latent=[KV_LATENT * r.latent for r in runs],
    )


def _layouts(runs: Sequence[PublishedRun]) -> LayoutColumns:
    recompute = [recompute_fractions(r.recompute) for r in runs]
    return LayoutColumns.of(
        tp=[r.tp for r in runs],
        pp=[r.pp for r in runs],
        virtual=[r.virtual for r in runs],
        dp=[r.dp for r in runs],
        zero=[r.zero for r in runs],
        shard=[r.shard for r in runs],
        cp=[r.cp for r in runs],
        ep=[r.ep for r in runs],
        sequence_parallel=[r.sequence_parallel for r in runs],
        micro_batch_size=[r.micro_batch_size for r in runs],
        micro=[r.micro for r in runs],
        recompute_matmuls=[a[0] for a in recompute],
        recompute_attention=[a[1] for a in recompute],
        recompute_elementwise=[a[2] for a in recompute],
        schedule=[r.schedule for r in runs],
        fused_attention=[r.software.fused_attention for r in runs],
        portable_attention=[r.software.portable_attention for r in runs],
        elementwise_fusion=[r.software.elementwise_fusion for r in runs],
        fp8=[r.software.fp8 for r in runs],
        gradient_bytes=[r.software.gradient_bytes for r in runs],
        master_weights=[r.software.master_weights for r in runs],
        fused_accumulation=[r.software.fused_accumulation for r in runs],
        flat_buffers=[r.software.flat_buffers for r in runs],
        overlap_dp=[r.software.overlap_dp for r in runs],
        overlap_tp=[r.software.overlap_tp for r in runs],
        overlap_ep=[r.software.overlap_ep for r in runs],
        # zero=3 sends gradients in 16 bits, as all parameters are; a sharded optimizer without overlap all-reduces
        gradient_message_bytes=[2.0 if r.zero == 3 else r.software.gradient_bytes for r in runs],
        parameter_message_bytes=2.0,
        overlap_parameters=[r.software.overlap_dp for r in runs],
        reduce_scatter=[r.software.overlap_dp for r in runs],
        reduce_every_micro_batch=0.0,
        host_waits=[r.software.host_waits for r in runs],
    )


def _machines(runs: Sequence[PublishedRun]) -> MachineColumns:
    return MachineColumns.of(
        peak=[r.sheet.peaks[r.software.precision] for r in runs],
        peak16=[r.sheet.peaks["fp16" if r.software.fp8 else r.software.precision] for r in runs],
        bandwidth=[r.sheet.bandwidth for r in runs],
        memory=[r.sheet.memory for r in runs],
        link=[r.link for r in runs],
        devices_per_node=[min(r.devices_per_node, r.ranks) for r in runs],
        network=[r.network for r in runs],
        link_startup=0.0,
        network_startup=0.0,
        power_fraction=[r.sheet.power for r in runs],
    )


def _or_nan(values: Sequence[float | None]) -> Array:
    return np.array([np.nan if v is None else v for v in values], dtype=np.float64)


def constants_of(runs: RunColumns, fitted: FittedConstants) -> Constants:
    """The constants of every run's device."""
    known = {chip: fitted.of(chip, float(best)) for chip, best in zip(runs.chips, runs.best, strict=True)}
    names = (*TIME_CONSTANTS, *MEMORY_CONSTANTS)
    return Constants(**{name: np.array([known[chip][name] for chip in runs.chips]) for name in names})


def predict_times(runs: RunColumns, constants: Constants, waits: WaitConstants | None = None) -> StepTimes:
    """Step time of every run, by part."""
    full = device_fraction(runs, constants) if waits else 0.0
    return step_times(runs.models, runs.layouts, runs.machines, constants, waits=waits, full=full)


def device_fraction(runs: RunColumns, constants: Constants) -> Array:
    """Part of the memory of its device that each run is predicted to use on its fullest rank."""
    kind = float(MEMORY_KINDS.index("smi"))
    memory = step_memory(runs.models, runs.layouts, constants, kind=kind, context=runs.context)
    return memory.total / runs.machines.memory


def predict_memory(runs: RunColumns, constants: Constants) -> StepMemory:
    """Memory of every run by part, in the meaning of its source."""
    return step_memory(
        runs.models, runs.layouts, constants, kind=runs.memory_kind, context=runs.context, first=runs.first_rank
    )


def predict(runs: RunColumns, fitted: FittedConstants) -> tuple[Array, Array]:
    """(seconds, bytes) of every run."""
    constants = constants_of(runs, fitted)
    return predict_times(runs, constants, fitted.waits).total, predict_memory(runs, constants).total
