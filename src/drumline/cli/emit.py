"""`drumline plan` across tools: a plan that is read from another tool's config, or written as one."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..core.errors import DoesNotFit, InputError, PlanError, nearest
from .common import cluster_of, plan_of, print_json, profile_of
from .corrections import cluster_file, with_corrections
from .setting import setting_of

if TYPE_CHECKING:
    from ..clusters import Cluster
    from ..costs import Estimate
    from ..models import Profile
    from ..plans import Plan
    from ..plans.emit import Emitted, Setting
    from ..plans.imported import Imported


@dataclass(frozen=True, slots=True)
class Wanted:
    """The options of `drumline plan` that matter here."""

    target: str
    source: str | None
    """Another tool's config, to be read."""
    given: str | None
    """A plan, instead of one that is searched for."""
    tool: str | None
    """Whose configuration is written."""
    cluster: str | None
    devices: int | None
    memory: str | None
    changes: list[str] | None
    precision: str | None
    batch: int | None
    objective: str
    output: str | None
    as_json: bool
    corrections: bool = True
    """Whether what runs on the machine taught is used."""

    def check(self) -> None:
        """Refuse what cannot be, before anything is traced or measured."""
        from ..plans.emit import TOOLS

        if self.tool is not None and self.tool not in TOOLS:
            raise InputError(f"--emit {self.tool}", rule=f"one of {', '.join(TOOLS)}", fix=nearest(self.tool, TOOLS))
        if self.source is not None and self.given is not None:
            raise InputError("--from and --plan", rule="both say the plan", fix="one of them")


@dataclass(frozen=True, slots=True)
class Chosen:
    """A plan and what is known about it."""

    plan: Plan
    profile: Profile
    machines: Cluster | None = None
    """None where the plan was given and nothing had to be priced."""
    estimate: Estimate | None = None
    asked: Imported | None = None
    candidates: int = 1
    others: tuple[tuple[Plan, Estimate], ...] = ()
    """The other plans that fit, best first, where one was searched for."""


def elsewhere(wanted: Wanted, *, alone: bool) -> None:
    """Read, choose, write, and say what became of every key. `alone`: no other question is asked beside it."""
    wanted.check()
    if not alone:
        raise InputError(
            "--from and --emit with another question",
            rule="they answer with a plan, and nothing beside it",
            fix="ask the other question with --plan",
        )
    chosen = _chosen(wanted)
    done = None
    if wanted.tool is not None:
        done = _emitted(wanted.tool, chosen, _setting(wanted, chosen))
    if wanted.as_json:
        print_json(_document(chosen, done))
        _write(wanted, chosen, done)
    else:
        _print(wanted, chosen, done)


def _emitted(tool: str, chosen: Chosen, setting: Setting) -> Emitted:
    """The configuration; where a part of the plan cannot be expressed, also the next best plan that can."""
    from ..plans.emit import emit

    try:
        return emit(tool, chosen.plan, setting)
    except PlanError as refused:
        fix = _next_best(tool, chosen, setting)
        raise PlanError(refused.what, where=refused.where, rule=refused.rule, fix=fix or refused.fix) from None


def _next_best(tool: str, chosen: Chosen, setting: Setting) -> str:
    """The fastest of the other plans that the tool can express, and what it costs."""
    from ..plans.emit import emit

    for plan, e in chosen.others:
        try:
            emit(tool, plan, setting)
        except PlanError:
            continue
        assert chosen.estimate is not None
        slower = 100 * (e.step_seconds / chosen.estimate.step_seconds - 1)
        return f"--plan {plan}: the fastest that it can express, {slower:.1f}% slower"
    return ""


def _chosen(wanted: Wanted) -> Chosen:
    profile = profile_of(wanted.target)
    if wanted.given is not None:
        sized = profile if wanted.batch is None else dataclasses.replace(profile, batch_size=wanted.batch)
        plan = plan_of(wanted.given)
        if wanted.precision is not None and wanted.precision != plan.precision:
            if "precision" in plan.table():
                raise InputError(
                    f"--precision {wanted.precision} beside --plan {plan}", rule="a step computes in one type"
                )
            plan = dataclasses.replace(plan, precision=wanted.precision)
        named = wanted.cluster is not None
        return Chosen(plan, sized, _machines(wanted, wanted.devices)[0] if named else None)
    if wanted.source is not None:
        return _read(wanted, profile)
    return _searched(wanted, profile)


def _machines(wanted: Wanted, devices: int | None) -> tuple[Cluster, Cluster]:
    machines, fleet = cluster_of(wanted.cluster, devices, wanted.memory, changes=wanted.changes, say=not wanted.as_json)
    machines = with_corrections(machines, cluster_file(wanted.cluster, devices), use=wanted.corrections)
    return machines, dataclasses.replace(fleet, corrections=machines.corrections)


def _searched(wanted: Wanted, profile: Profile) -> Chosen:
    from ..planner import search
    from ..plans import Plan

    sized = profile if wanted.batch is None else dataclasses.replace(profile, batch_size=wanted.batch)
    machines, fleet = _machines(wanted, wanted.devices)
    answer, estimates = search(sized, machines, precision=wanted.precision, fleet=fleet, objective=wanted.objective)
    best = answer.candidates[0].plan
    others = tuple((Plan.parse(c.plan), estimates[c.plan]) for c in answer.candidates[1:] if c.fits)
    return Chosen(Plan.parse(best), sized, machines, estimates[best], None, answer.scored, others)


def _read(wanted: Wanted, profile: Profile) -> Chosen:
    """The config's plan; what it leaves open is decided by price."""
    from ..planner.within import batch_of, choose
    from ..plans.config import ranks_of, read

    assert wanted.source is not None
    named = ranks_of(wanted.source)
    ranks = wanted.devices or named
    if wanted.tool is not None and wanted.cluster is None and ranks:
        asked = read(wanted.source, ranks)
        if not set(asked.free) - {"bucket", "shard"}:  # nothing to decide, so nothing to price
            batch = batch_of(asked, profile.batch_size, wanted.batch)
            return Chosen(asked.plan, dataclasses.replace(profile, batch_size=batch), asked=asked)
    machines, _ = _machines(wanted, ranks)
    asked = read(wanted.source, machines.devices)
    found = choose(profile, machines, asked, batch=wanted.batch, precision=wanted.precision)
    plan, e = found.ranked[0]
    if not e.fits:
        _told(asked, plan, file=sys.stderr)
        raise DoesNotFit(
            f"the config's plan does not fit {machines.devices} x {machines.device.name}",
            where=f"plan {plan}",
            rule=_short(e),
            fix=f"`drumline plan {wanted.target}` for one that fits",
        )
    return Chosen(plan, found.profile, machines, e, asked, len(found.ranked))


def _short(e: Estimate) -> str:
    from ..core.units import format_bytes

    if e.lacks[0] == "host":
        return f"host memory: {format_bytes(e.host_bytes)} > {format_bytes(e.host_limit)}"
    parts = ", ".join(f"{key} {format_bytes(n)}" for key, n in e.memory_parts.items() if n)
    return f"{format_bytes(e.memory_bytes)} > {format_bytes(e.memory_limit)} ({parts})"


def _setting(wanted: Wanted, chosen: Chosen) -> Setting:
    return setting_of(wanted.target, chosen.profile, chosen.plan, chosen.machines, chosen.asked)


def _document(chosen: Chosen, done: Emitted | None) -> dict[str, Any]:
    """The JSON document."""
    value: dict[str, Any] = {
        "plan": str(chosen.plan),
        "ranks": chosen.plan.ranks,
        "batch_size": chosen.profile.batch_size,
        "candidates": chosen.candidates,
    }
    if chosen.estimate is not None:
        e = chosen.estimate
        value |= {"step_seconds": e.step_seconds, "memory_bytes": e.memory_bytes, "fits": e.fits}
        value |= {"uncorrected_step_seconds": e.uncorrected_seconds}
    if chosen.asked is not None:
        asked = chosen.asked
        value |= {
            "left_open": list(asked.auto),
            "no_effect": dict(asked.ignored),
            "unknown": dict(asked.unknown),
            "notes": list(asked.notes),
        }
    if done is not None:
        value["emitted"] = {
            "tool": done.tool,
            "text": done.text,
            "script": dict(done.script),
            "notes": list(done.notes),
        }
    return value


def _print(wanted: Wanted, chosen: Chosen, done: Emitted | None) -> None:
    """The configuration on standard output, or in the file; what there is to say about it beside it."""
    file = sys.stdout if done is None or wanted.output else sys.stderr
    if chosen.asked is not None:
        _told(chosen.asked, chosen.plan, file)
        if chosen.candidates > 1:
            print(f"the fastest that fits of {chosen.candidates} plans that the config allows", file=file)
    if done is not None and not wanted.output:
        print(done.text, end="")
    if done is not None and str(done):
        print(f"{done.tool}, {chosen.plan}:\n{done}", file=file)
    if done is None and chosen.estimate is not None:
        from ..reports.text import console, estimate_lines

        out = console()
        out.print("")
        out.print(estimate_lines(chosen.estimate))
    if wanted.output:
        _write(wanted, chosen, done)
        print(f"written to {wanted.output}", file=file)


def _told(asked: Imported, plan: Plan, file: Any) -> None:
    """What became of the keys of a config; the plan on top is the one that was chosen."""
    print("\n".join([f"plan {plan}", *str(asked).splitlines()[1:]]), file=file)


def _write(wanted: Wanted, chosen: Chosen, done: Emitted | None) -> None:
    from ..core import files

    if wanted.output and done is not None:
        files.write_text(wanted.output, done.text)
    elif wanted.output:
        chosen.plan.save(wanted.output, comment=f"{wanted.target}, from {wanted.source}")
