"""`drumline plan`: the fastest plan that fits, why it wins, and why each other lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from ..errors import InputError

if TYPE_CHECKING:
    from ..cost import Estimate


def plan(
    target: str = typer.Argument(..., metavar="JOB", help="path.py, path.py:name, profile.json or a zoo name."),
    cluster: str = typer.Option(None, "--cluster", help="A cluster file or a name of the catalogue (default: here)."),
    devices: int = typer.Option(None, "--devices", help="How many devices there are."),
    memory: str = typer.Option(None, "--memory", help="Memory of a device, such as 40GB."),
    precision: str = typer.Option(None, "--precision", help="fp32 or bf16 (default: bf16 on GPUs that have it)."),
    batch: int = typer.Option(None, "--batch", help="Samples per step, instead of the job's or the model's own."),
    top: int = typer.Option(10, "--top", help="How many candidates to show."),
    output: str = typer.Option(None, "--output", "-o", help="Write the best plan to a TOML file."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
) -> None:
    """Find the fastest plan that fits, and say why."""
    from ..plan.plan import CHOICES, Plan
    from ..report.text import console, estimate_lines, plans_table
    from ..search import search
    from .common import cluster_of, print_json, profile_of

    if batch is not None and not 1 <= batch <= 10_000_000:
        raise InputError(f"--batch {batch}", rule="from 1 to 10,000,000 samples")
    if top < 1:
        raise InputError(f"--top {top}", rule="at least one candidate")
    if precision is not None and precision not in CHOICES["precision"]:
        raise InputError(f"--precision {precision}", rule=f"one of {', '.join(CHOICES['precision'])}")
    found = profile_of(target, batch=batch)
    machines, fleet = cluster_of(cluster, devices, memory, say=not as_json)
    answer, estimates = search(found, machines, precision=precision, fleet=fleet)
    best = answer.candidates[0]
    if output:
        comment = f"{target} on {machines.name}: {answer.explanation}"
        Plan.parse(best.plan).save(output, comment=comment)
    if as_json:
        print_json(
            {
                "plans": [
                    {
                        "plan": c.plan, "step_seconds": c.step_seconds, "memory_bytes": c.memory_bytes,
                        "fits": c.fits, "reason": c.reason, **host_bytes(estimates[c.plan]),
                    }
                    for c in answer.candidates[:top]
                ],
                "candidates": len(answer.candidates), "seconds": answer.seconds, "explanation": answer.explanation,
                "cluster": machines.name, "devices": machines.devices, "batch_size": found.batch_size,
                "parts": estimates[best.plan].parts, "memory_parts": estimates[best.plan].memory_parts,
                **host_bytes(estimates[best.plan]),
            }
        )  # fmt: skip
        return
    out = console()
    where = f"{machines.devices} x {machines.device.name} ({machines.name})"
    out.print(f"{found.name}, batches of {found.batch_size}, on {where}\n")
    out.print(plans_table(answer, top=top, width=out.width))
    out.print("")
    out.print(estimate_lines(estimates[best.plan]))
    out.print("")
    out.print(answer.explanation)
    origin = machines.origin_of("device.peak")
    out.print(f"{len(answer.candidates)} candidates in {answer.seconds:.2f} s; rates: {origin}")
    if output:
        out.print(f"written to {output}")


def host_bytes(e: Estimate) -> dict[str, float]:
    """What a rank has in host memory and may have, where something is offloaded."""
    return {"host_bytes": e.host_bytes, "host_limit": e.host_limit} if e.host_bytes else {}
