"""`dl.verify`: proof that a plan computes what one device would."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.errors import InputError
from .callbacks import Notify, Progress, ignore_progress, log_note
from .external_ranks import joins_ranks
from .forecast import AUTO, check_ranks, forecast
from .inputs import check_local, load_job, load_plan
from .main_guard import rank_job
from .rank_tasks import run_job_ranks, verify_rank

if TYPE_CHECKING:
    from ..runtime.verification.verify import Verification
    from .inputs import ClusterInput, JobInput, PlanInput


@joins_ranks
def verify(
    job: JobInput,
    plan: PlanInput,
    *,
    steps: int = 10,
    ranks: int | None = None,
    cluster: ClusterInput = None,
    notify: Notify = log_note,
    progress: Progress = ignore_progress,
) -> Verification:
    """Run `steps` optimizer steps under the plan and on one device, and compare losses, gradients and parameters.

    `plan` may be `auto`: the plan that `train` would choose for `cluster`. The result has `passed`, `errors` (largest
    relative error by dtype) and `first_divergence` (a layer's name, or None).
    """
    from ..plans import check

    if steps < 1:
        raise InputError(f"steps={steps}", rule="at least one step")
    loaded = load_job(job)
    if plan == AUTO:
        chosen = forecast(loaded, AUTO, ranks, cluster, corrections=True, notify=notify, progress=progress).plan
    else:
        chosen = load_plan(plan)
        check_ranks(chosen, ranks)
    check(chosen)
    check_local(chosen)
    results: list[Verification | None] = run_job_ranks(
        verify_rank, rank_job(job, loaded), str(chosen), steps, ranks=chosen.processes
    )
    return next(result for result in results if result is not None)
