"""Refuses plans that cannot split a model, with the numbers and a plan that works."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from ...core.errors import PlanError, TraceError
from ...partition.capture import CapturedGraph
from ...partition.tensor_splits import TensorSplits
from ...partition.weight_matmuls import heads_in
from ...plans import Plan


def refuse_uneven_heads(plan: Plan, captured: CapturedGraph, choice: TensorSplits) -> None:
    """Refuse query heads that do not divide over the ranks; fewer key heads may stay whole."""
    n = plan.tp
    heads_of = {module: heads_in(captured.graph.nodes, module) for module, _, _ in choice.uneven_heads}
    wrong = next(((module, heads) for module, heads in heads_of.items() if heads % n), None)
    if wrong is None:
        return
    shared = math.gcd(*heads_of.values())
    near = min((k for k in range(1, shared + 1) if shared % k == 0), key=lambda k: (abs(k - n), -k))
    same = math.gcd(shared, n)
    raise PlanError(
        f"tp={n} cannot share the {wrong[1]} heads of {wrong[0] or 'the model'}",
        where=f"plan {plan}",
        rule=f"every rank has whole heads: {wrong[1]} % {n} != 0",
        fix=f"tp={near}, or on as many ranks {replace(plan, tp=same, dp=plan.dp * n // same)}",
    )


def check_stage_names(plan: Plan) -> None:
    """Refuse `split` with more or fewer names than the stages that begin with one."""
    names, stages = plan.begins, plan.pp * plan.virtual
    if len(names) != stages - 1:
        raise PlanError(
            f"split={'+'.join(names)} makes {len(names) + 1} stages, and the plan has {stages}",
            where=f"plan {plan}",
            rule=f"split names where every stage but the first begins: pp({plan.pp}) x virtual({plan.virtual}) - 1 = "
            f"{stages - 1}",
            fix=str(replace(plan, split=names[: stages - 1] if len(names) >= stages else ())),
        )


@contextmanager
def suggest_replicas(plan: Plan) -> Iterator[None]:
    """Add to the error of a model that cannot be captured a plan that runs it uncaptured."""
    try:
        yield
    except TraceError as e:
        way = f"{replicated_plan(plan)}, which runs the model as it is"
        raise TraceError(e.what, where=e.where, rule=e.rule, fix=f"{e.fix}; or {way}" if e.fix else way) from e


def replicated_plan(plan: Plan) -> Plan:
    """A plan for the same ranks, all of them replicas."""
    return replace(plan, dp=plan.ranks, pp=1, virtual=1, split=(), schedule="1f1b", tp=1, cp=1, tile=(1, 1), halo=True)
