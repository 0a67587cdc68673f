"""The processes of a plan with a coordinator: the first `dp` ranks are workers, the others parameter servers.

Workers are worlds of one rank, the servers are a world of their own: a process that fails is replaced without the
others. Servers publish their addresses in the store of all ranks.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...comm.environment import RankInfo, connect, device_of
from ...comm.rank_status import rank_status
from ...comm.remote_calls import CallClient, CallerGone, connect_to_server
from ...comm.rendezvous import default_timeout, shared_store
from ...core.errors import InputError, PlanError
from ...core.job import Job
from ...core.rank_info import REPLACED, STORE, local_size, rank_info
from ...plans import Plan, check
from ...schedules import update_rule
from ...torchkit.modules import BatchNormBase
from ..checkpoint.folder import complete_checkpoints
from ..engine import Engine
from ..guards.guard import Guards
from ..training.checkpoint_policy import CheckpointPolicy, TrainingCheckpoints, steps_left
from .coordinator import Coordinator
from .first_server import FirstServer, RecordedUpdate
from .hogwild import HogwildServer, HogwildWorker
from .invitation import Invitation, job_reference, withdraw_invitation
from .server import ParameterServer
from .worker import PATIENCE, Find, TrainingOver, WorkerEngine

ENDED = "ended"
"""In place of an address: the training is over."""

Emit = Callable[[dict[str, Any]], None]


@dataclass(slots=True)
class ServerWatch:
    """Observes the updates of a parameter server, for a verification."""

    round: int
    """Counts runs of the same processes."""
    begin: Callable[[Engine], None]
    """Called with the engine before the first update."""
    in_turns: bool = False
    """Whether one worker computes at a time."""
    updates: list[RecordedUpdate] = field(default_factory=list)
    """Every update, on the first server."""


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of this process in a plan."""

    where: RankInfo
    store: dist.Store
    local: bool
    """Whether all processes share a host."""
    replaced: int

    @classmethod
    def of(cls, plan: Plan, round: int = 0) -> _Place:
        """From the environment of the launcher; `round` counts runs of the same processes."""
        check(plan)
        where = rank_info()
        if where.size != plan.processes:
            raise PlanError(
                f"the plan {plan} is for {plan.processes} processes, but {where.size} were started",
                rule=f"dp({plan.dp}) workers + {plan.server_processes} for the parameters != {where.size}",
            )
        local = local_size(where) == where.size
        if plan.sync_mode == "hogwild" and not local:
            raise PlanError(
                f"the plan {plan} on several hosts", rule="sync=hogwild shares memory on one host", fix="sync=async"
            )
        return cls(
            where,
            dist.PrefixStore(f"servers{round}", shared_store(where, default_timeout())),
            local,
            int(os.environ.get(REPLACED, "0")),
        )

    def find(self, server: int) -> str:
        """The address of a server, as it was published last."""
        address = self.store.get(f"address{server}").decode()
        if address == ENDED:
            raise TrainingOver
        return address

    def publish(self, server: int, address: str) -> None:
        """Let others find a server."""
        self.store.set(f"address{server}", address)


def is_worker(plan: Plan) -> bool:
    """Whether this process is a worker of a plan with a coordinator."""
    return rank_info().rank < plan.dp


def make_worker(
    job: Job, plan: Plan, *, guards: Guards | None = None, dtype: torch.dtype | None = None, round: int = 0
) -> WorkerEngine:
    """This process as a worker, connected to the servers."""
    place = _Place.of(plan, round)
    return _attached(job, plan, place.where, place.where.rank, place.find, guards, dtype)


def make_joining_worker(folder: Path) -> WorkerEngine:
    """This process as one more worker of the training in a run folder."""
    invitation = Invitation.read(folder)
    if not invitation.job:
        raise InputError(f"the job of {folder} exists only in memory", rule="a worker that joins loads the job's file")
    plan = Plan.parse(invitation.plan)

    def find(server: int) -> str:
        try:
            return Invitation.read(folder).addresses[server]
        except InputError:
            raise TrainingOver from None

    number = plan.processes + secrets.randbelow(2**30)
    for address in invitation.addresses:
        try:
            CallClient(address, number).close()
        except (OSError, CallerGone, ValueError) as e:
            raise InputError(
                f"the training in {folder} has ended: its parameter servers do not answer",
                where=str(e),
                rule="a worker joins while the training runs",
                fix="if a server has just failed, it is being replaced: try again",
            ) from None
    return _attached(Job.load(invitation.job), plan, RankInfo(), number, find, None, None)


def _attached(
    job: Job, plan: Plan, where: RankInfo, worker: int, find: Find, guards: Guards | None, dtype: torch.dtype | None
) -> WorkerEngine:
    alone = RankInfo(0, 1, where.local_rank, where.launcher)
    connect(part=alone)
    own = replace(plan, dp=1, sync="allreduce", servers=1, backup=0, damping="none", backend="auto")
    kind = HogwildWorker if plan.sync_mode == "hogwild" else WorkerEngine
    device = device_of(where)
    if plan.sync_mode == "hogwild" and device.type != "cpu":
        raise PlanError(f"the plan {plan} on GPUs", rule="sync=hogwild shares the memory of a host", fix="sync=async")
    engine = kind(job, own, where=alone, device=device, dtype=dtype, guards=guards)
    engine.attach(worker, find, plan.server_processes)
    return engine


def serve(
    job: Job,
    plan: Plan,
    emit: Emit,
    *,
    steps: int,
    guards: Guards | None = None,
    saves: CheckpointPolicy | None = None,
    dtype: torch.dtype | None = None,
    watch: ServerWatch | None = None,
) -> dict[str, Any]:
    """Run this process as a parameter server until training ends."""
    place = _Place.of(plan, watch.round if watch else 0)
    index = place.where.rank - plan.dp
    part = RankInfo(index, plan.server_processes, place.where.local_rank, place.where.launcher)
    connect(backend="gloo", part=part, store=dist.PrefixStore(f"group{place.replaced}", place.store))
    engine = Engine(job, plan, where=part, device=torch.device("cpu"), dtype=dtype, guards=guards)
    _check_norms(engine, emit if index == 0 else None)
    if saves is not None and place.replaced:
        saves = _after_failure(saves, emit if index == 0 else lambda _: None)
    checkpoints = TrainingCheckpoints(engine, saves, lambda text: emit({"message": text})) if saves else None
    initial = {name: b.clone() for name, b in engine.model.named_buffers()}
    if checkpoints is not None:
        checkpoints.begin()
    restored = [name for name, b in engine.model.named_buffers() if not torch.equal(b, initial[name])]
    del initial
    steps_left(engine, steps)
    server = _make_server(engine, plan, index, steps, place, checkpoints, emit, watch, restored)
    place.publish(index, server.calls.address)
    if isinstance(server, FirstServer):
        finders = [lambda i=i: place.find(i) for i in range(1, plan.server_processes)]
        server.connect([connect_to_server(find, -1, patience=PATIENCE) for find in finders])
        if saves is not None:
            addresses = tuple(place.find(i) for i in range(plan.server_processes))
            Invitation(job_reference(job), str(plan), addresses).write(Path(saves.folder).parent)
    server.serve()
    if index == 0 and saves is not None:
        withdraw_invitation(Path(saves.folder).parent)
    rank_status().place("ending")
    if checkpoints is not None:
        checkpoints.end()
    place.publish(index, ENDED)
    server.calls.close()
    return _result(server, checkpoints)


def _make_server(
    engine: Engine,
    plan: Plan,
    index: int,
    steps: int,
    place: _Place,
    checkpoints: TrainingCheckpoints | None,
    emit: Emit,
    watch: ServerWatch | None,
    restored: list[str],
) -> ParameterServer:
    if watch is not None:
        watch.begin(engine)
    if index > 0:
        return ParameterServer(engine, index=index, local=place.local, checkpoints=checkpoints)
    rule = update_rule(
        plan.sync_mode,
        plan.dp,
        steps,
        stale=plan.sync_steps,
        backup=plan.backup,
        damping=plan.damping,
        first=engine.position,
        applied=frozenset(range(engine.position + len(engine.batches_missing))) - engine.batches_missing,
        in_turns=watch is not None and watch.in_turns,
    )
    coordinator = Coordinator(rule, plan.dp)
    engine.coordinator = coordinator  # type: ignore[attr-defined]  # saved with a checkpoint
    kind = HogwildServer if plan.sync_mode == "hogwild" else FirstServer
    server = kind(engine, coordinator, local=place.local, checkpoints=checkpoints, emit=emit, restored=restored)
    if watch is not None:
        server.history = watch.updates
    return server


def _after_failure(saves: CheckpointPolicy, emit: Emit) -> CheckpointPolicy:
    """Where the successor of a failed server begins: at the newest checkpoint that this run has saved."""
    begun = Path(os.environ[STORE]).parent.stat().st_mtime if STORE in os.environ else 0.0
    own = [path for path in complete_checkpoints(Path(saves.folder)) if path.stat().st_mtime >= begun - 1]
    if not own:
        emit({"message": f"the parameter servers begin again at {saves.resume or 'step 0'}: no checkpoint is complete"})
    return replace(saves, resume=str(own[0])) if own else saves


def _check_norms(engine: Engine, emit: Emit | None) -> None:
    """Say what workers do with the statistics of BatchNorm, or refuse them where the plan promises exactness."""
    plan = engine.plan
    norms = [name for name, module in engine.model.named_modules() if isinstance(module, BatchNormBase)]
    if not norms or plan.dp == 1:
        return
    if plan.exact:
        raise PlanError(
            f"layer {norms[0]!r}{f' and {len(norms) - 1} more' if norms[1:] else ''}: BatchNorm under sync={plan.sync}",
            where=f"plan {plan}",
            rule="its statistics span the whole batch, and workers of a parameter server do not meet in the forward",
            fix=f"the nearest plan that runs: dp={plan.dp}; with sync=stale:1 each worker normalises its own slice",
        )
    if emit is not None:
        slices = "batch" if plan.sync_mode in ("async", "hogwild") else "slice of the batch"
        emit({"message": f"BatchNorm: each worker normalises with its own {slices}; running statistics are averaged"})


def _result(server: ParameterServer, checkpoints: TrainingCheckpoints | None) -> dict[str, Any]:
    """A server's result, in the form of a training's."""
    seconds = (
        server.farewell()
        if isinstance(server, FirstServer)
        else {"step_seconds": 0.0, "data_seconds": 0.0, "preempted": False}
    )
    return {
        **seconds,
        "peak_bytes": 0.0,
        "parts": {},
        "spans": [],
        "probed": 0,
        "last": [],
        "seconds_by_phase": {},
        "own_by_phase": {},
        "counted": 0,
        "evaluation": {},
        "save_stall": None if checkpoints is None or not checkpoints.stalls else max(checkpoints.stalls),
        "device": "cpu",
        "division": None,
        "lanes": [],
    }
