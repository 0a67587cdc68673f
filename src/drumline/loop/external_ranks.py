"""Runs a verb on the ranks of another launcher: once, on the first rank, with all ranks taking part in its tasks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from ..core import files
from .callbacks import log_note

if TYPE_CHECKING:
    from ..launchers.external_ranks import ExternalRanks

P = ParamSpec("P")
R = TypeVar("R")
CLUSTER = "cluster.toml"
"""The measurement that a run was predicted with, in its folder."""


def joins_ranks(verb: Callable[P, R]) -> Callable[P, R]:
    """Under torchrun, srun or mpiexec, where every rank calls the verb, run it once; every rank gets the result."""

    @functools.wraps(verb)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        from ..core.rank_info import is_launched

        if not is_launched():
            return verb(*args, **kwargs)
        from ..launchers.choice import find_launcher, joined_ranks

        if joined_ranks() or find_launcher() is None:
            return verb(*args, **kwargs)
        return _run_joined(verb, inspect.signature(verb).bind(*args, **kwargs))

    return run


def joins_ranks_to_measure(verb: Callable[P, R]) -> Callable[P, R]:
    """Join the ranks as `joins_ranks` does where no cluster is given, because all of them measure it.

    A question about a given cluster needs no ranks: one rank may ask it alone.
    """
    joined = joins_ranks(verb)

    @functools.wraps(verb)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        from ..core.rank_info import is_launched

        alone = not is_launched() or inspect.signature(verb).bind(*args, **kwargs).arguments.get("cluster") is not None
        return (verb if alone else joined)(*args, **kwargs)

    return run


def _run_joined(verb: Callable[..., R], bound: inspect.BoundArguments) -> R:
    """Join the ranks, and lead or follow them through the verb; a signal before its training ends all of them."""
    from ..launchers.choice import join_ranks
    from ..launchers.early_signals import PreemptedEarly, handling_early_signals

    ranks: ExternalRanks | None = None

    def sets_up() -> bool:
        return ranks is not None and ranks.task == "train_rank"

    with handling_early_signals(trains=verb.__name__ == "train", sets_up=sets_up):
        try:
            ranks = join_ranks()
            assert ranks is not None, "the launcher was found before"
            ranks.own = bound.arguments.get("job")
            if ranks.rank > 0:
                followed: R = ranks.follow(_tasks(), verb.__name__)
                return followed
            return _lead(verb, bound, ranks)
        except PreemptedEarly:
            if ranks is not None:
                ranks.preempted()
            raise


def current_ranks() -> ExternalRanks | None:
    """The joined ranks on which the verb in progress runs; None if it starts its own. Needs torch only if launched."""
    from ..core.rank_info import is_launched

    if not is_launched():
        return None
    from ..launchers.choice import joined_ranks

    return joined_ranks()


def _lead(verb: Callable[..., R], bound: inspect.BoundArguments, ranks: ExternalRanks) -> R:
    """Run the verb on the first rank, and report its outcome to the others."""
    from ..launchers.choice import running_on
    from ..launchers.early_signals import PreemptedEarly
    from ..launchers.external_ranks import error_fields

    try:
        with running_on(ranks):
            _fit(bound, verb, ranks)
            result = verb(*bound.args, **bound.kwargs)
        ranks.finish({"verb": verb.__name__, "result": result})
    except PreemptedEarly:
        log_note("preempted before the first step: there is nothing to save")
        raise
    except BaseException as e:
        ranks.finish({"verb": verb.__name__, "error": error_fields(e)})
        raise
    return result


def _fit(bound: inspect.BoundArguments, verb: Callable[..., Any], ranks: ExternalRanks) -> None:
    """Use the launcher's number of ranks; refuse a plan or an option for another."""
    from .forecast import AUTO
    from .inputs import load_plan

    given, parameters = bound.arguments, inspect.signature(verb).parameters
    if given.get("ranks") is not None:
        ranks.check_size(f"--ranks {given['ranks']}", given["ranks"])
    if "ranks" in parameters:
        given["ranks"] = ranks.size
    if "devices" in parameters and given.get("devices") is None and given.get("cluster") is None:
        given["devices"] = ranks.size
    if "plan" in parameters and (plan := given.get("plan", AUTO)) != AUTO:
        ranks.check_size(f"the plan {load_plan(plan)}", load_plan(plan).processes)
        given["ranks"] = load_plan(plan).ranks  # without the processes of parameter servers
    if "output" in parameters and "plan" in parameters and given.get("cluster") is None and given.get("output"):
        given["cluster"] = _kept_measurement(Path(given["output"]), ranks)


def _kept_measurement(folder: Path, ranks: ExternalRanks) -> Path | None:
    """The measurement of the run's first start, if this host has none: a restart never measures again."""
    from .measure import machine_file

    kept, cached = folder / CLUSTER, machine_file(ranks.size)
    ranks.run_folder = folder
    if cached.exists():
        keep_measurement(cached, ranks)
        return None
    return kept if kept.exists() else None


def keep_measurement(file: Path, ranks: ExternalRanks) -> None:
    """Copy a measurement to the folder of the run in progress, unless it has one."""
    if ranks.run_folder is not None and not (ranks.run_folder / CLUSTER).exists():
        files.write_text(ranks.run_folder / CLUSTER, file.read_text())


def _tasks() -> dict[str, Callable[..., Any]]:
    """Tasks that the first rank may ask of the others."""
    from ..measurement.bench import bench_rank
    from ..measurement.machine import measure_rank
    from .measure import read_measurement, store_measurement
    from .rank_tasks import train_rank, verify_rank

    tasks = (train_rank, verify_rank, measure_rank, bench_rank, read_measurement, store_measurement)
    return {task.__name__: task for task in tasks}
