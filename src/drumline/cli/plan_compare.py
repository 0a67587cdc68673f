"""`drumline plan --cluster a --cluster b`: the best plan on each of several clusters, side by side."""

from __future__ import annotations

from typing import Any

from ..core.errors import DoesNotFit
from .common import print_json


def compare_clusters(target: str, clusters: list[str], inputs: dict[str, Any], *, as_json: bool) -> None:
    """Plan for every cluster, and print one row each, the fastest first; raise if the model fits on none."""
    rows, refusal = [], None
    for name in dict.fromkeys(clusters):
        try:
            rows.append(_row(name, target, inputs))
        except DoesNotFit as e:
            refusal = e
            rows.append({"cluster": name, "reason": str(e).splitlines()[0]})
    if refusal is not None and all("plan" not in row for row in rows):
        raise refusal
    rows.sort(key=lambda row: row.get("step_seconds", float("inf")))
    if as_json:
        print_json({"clusters": rows})
        return
    _print(rows)


def _row(name: str, target: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """The best plan on one cluster, and that of the user if one is given."""
    from ..loop.plan import ask, search_plans

    question = ask(target, name, **inputs)
    search = search_plans(question)
    best, batch = search.estimates[str(search.best)], question.profile.batch_size
    given = search.estimates[str(question.given)] if question.given is not None else None
    return {
        "cluster": name,
        "device": question.cluster.device.name,
        "devices": question.cluster.devices,
        "plan": best.plan,
        "step_seconds": best.step_seconds,
        "samples_per_second": batch / best.step_seconds,
        "memory_bytes": best.memory_bytes,
        "memory_limit": best.memory_limit,
        "error": best.error,
        "batch_size": batch,
        **({"given": {"plan": given.plan, "step_seconds": given.step_seconds, "fits": given.fits}} if given else {}),
    }


def _print(rows: list[dict[str, Any]]) -> None:
    """A block of lines for each cluster, which is readable at any width."""
    from ..core.units import format_bytes, format_seconds
    from ..reports.console import console

    out = console()
    fastest = next(row["step_seconds"] for row in rows if "plan" in row)
    for row in rows:
        if "plan" not in row:
            out.print(f"{row['cluster']}: {row['reason']}\n")
            continue
        slower = row["step_seconds"] / fastest
        rank = "the fastest" if slower == 1 else f"{slower:.2f} times as long"
        out.print(f"{row['cluster']}, {row['devices']} x {row['device']}: {rank}")
        out.print(f"  {row['plan']}")
        step, rate = format_seconds(row["step_seconds"]), row["samples_per_second"]
        out.print(f"  step {step} (+-{100 * row['error']:.0f}%), {rate:.4g} samples/s")
        out.print(f"  memory {format_bytes(row['memory_bytes'])} of {format_bytes(row['memory_limit'])}")
        if "given" in row:
            fits = "" if row["given"]["fits"] else ", which does not fit"
            out.print(f"  your plan: step {format_seconds(row['given']['step_seconds'])}{fits}")
        out.print("")
