"""`drumline plan --list`: the models of the zoo and the clusters of the catalogue."""

from __future__ import annotations

from typing import Any

from .common import print_json


def print_names(*, as_json: bool) -> None:
    """Print both lists, for a person or as one JSON document."""
    models, clusters = _models(), _clusters()
    if as_json:
        print_json({"models": models, "clusters": clusters})
        return
    from ..core.units import format_count
    from ..reports.console import console

    out = console()
    widest = max(len(x["name"]) for x in (*models, *clusters)) + 2
    out.print("JOB, its parameters (* --sequence):")
    for m in models:
        out.print(f"  {m['name']:{widest}}{format_count(m['parameters'])}{' *' if m['sequence'] else ''}")
    out.print("mlp and lstm take any LAYERSxWIDTH.\n")
    out.print("--cluster, the devices of a node:")
    for c in clusters:
        out.print(f"  {c['name']:{widest}}{c['devices_per_node']} x {c['device']}")


def _models() -> list[dict[str, Any]]:
    from ..models import zoo

    return [
        {"name": name, "parameters": zoo.profile(name).parameters, "sequence": zoo.has_sequence(name)}
        for name in zoo.names()
    ]


def _clusters() -> list[dict[str, Any]]:
    from ..clusters.catalogue import catalogue, load

    rows = []
    for name in catalogue():
        c = load(name)
        rows.append(
            {
                "name": name,
                "device": c.device.name,
                "devices_per_node": c.node.devices,
                "memory_bytes": c.device.memory,
                "network": c.network is not None,
            }
        )
    return rows
