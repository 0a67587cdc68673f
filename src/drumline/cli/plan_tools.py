"""`drumline plan --from` and `--emit`: plans read from, or written as, another tool's config."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from .common import print_json

if TYPE_CHECKING:
    from ..loop.other_tools import ConvertedPlan


def plan_for_tools(
    target: str,
    cluster: str | None,
    source: str | None,
    given: str | None,
    tool: str | None,
    inputs: dict[str, Any],
    *,
    output: str | None,
    as_json: bool,
) -> None:
    """Read or search for a plan, write it for the tool, and print what became of every key."""
    from ..loop.other_tools import ConversionRequest, convert_plan

    inputs = {**inputs, "notify": _to_stderr}
    converted = convert_plan(
        ConversionRequest(target, source=source, given=given, tool=tool, cluster=cluster, **inputs)
    )
    if as_json:
        print_json(_document(converted))
    else:
        _print(converted, output)
    if output:
        _write(converted, output, f"{target}, from {source}")
        if not as_json:
            print(f"written to {output}")


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr)


def _document(converted: ConvertedPlan) -> dict[str, Any]:
    """The JSON document."""
    value: dict[str, Any] = {
        "plan": str(converted.plan),
        "ranks": converted.plan.ranks,
        "batch_size": converted.profile.batch_size,
        "candidates": converted.candidates,
    }
    if converted.estimate is not None:
        e = converted.estimate
        value |= {"step_seconds": e.step_seconds, "memory_bytes": e.memory_bytes, "fits": e.fits}
        value |= {"uncorrected_step_seconds": e.uncorrected_seconds}
    if converted.config is not None:
        config = converted.config
        value |= {
            "left_open": list(config.auto),
            "no_effect": dict(config.ignored),
            "unknown": dict(config.unknown),
            "notes": list(config.notes),
        }
    if (emitted := converted.emitted) is not None:
        value["emitted"] = {
            "tool": emitted.tool,
            "text": emitted.text,
            "script": dict(emitted.script),
            "notes": list(emitted.notes),
        }
    return value


def _print(converted: ConvertedPlan, output: str | None) -> None:
    """The config goes to standard output, or to the file; notes about it to the other stream."""
    from ..loop.other_tools import config_lines
    from ..reports.console import console
    from ..reports.plan_text import estimate_lines

    emitted = converted.emitted
    file = sys.stdout if emitted is None or output else sys.stderr
    if converted.config is not None:
        print(config_lines(converted.config, converted.plan), file=file)
        if converted.candidates > 1:
            print(f"the fastest that fits of {converted.candidates} plans that the config allows", file=file)
    if emitted is not None and not output:
        print(emitted.text, end="")
    if emitted is not None and str(emitted):
        print(f"{emitted.tool}, {converted.plan}:\n{emitted}", file=file)
    if emitted is None and converted.estimate is not None:
        out = console()
        out.print("")
        out.print(estimate_lines(converted.estimate))


def _write(converted: ConvertedPlan, output: str, comment: str) -> None:
    from ..core import files

    if converted.emitted is not None:
        files.write_text(output, converted.emitted.text)
    else:
        converted.plan.save(output, comment=comment)
