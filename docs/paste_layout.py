"""Write the table of simulate-steps.md: by how much timelines are stretched to end with the estimate.

python docs/paste_layout.py
"""

from __future__ import annotations

import re
from pathlib import Path

from drumline.clusters import load
from drumline.costs import Estimate, OperatorCostModel, cost_model
from drumline.models import zoo
from drumline.plans import Plan
from drumline.simulator.step import StepLayout, lay_out, layout_differences

PAGE = Path(__file__).with_name("simulate-steps.md")
BLOCK = re.compile(r"(<!-- layout -->\n).*?(<!-- /layout -->)", re.S)
CASES = {
    "gpt:1.3b": (
        "dp=8",
        "dp=4,pp=2,micro=8",
        "dp=2,pp=4,micro=8",
        "pp=8,micro=8",
        "pp=4",
        "dp=4,pp=4",
        "pp=4,micro=2,schedule=naive",
        "pp=4,micro=2,schedule=gpipe",
        "pp=4,micro=16,schedule=interleaved,virtual=2",
        "pp=4,micro=8,schedule=pipedream-2bw",
    ),
    "gpt:7b": ("tp=8", "dp=8,zero=3,micro=8", "dp=64,zero=3,micro=2", "dp=64,shard=4,zero=3,micro=2"),
    "gpt:13b": ("dp=8,zero=1,offload=optimizer,micro=8",),
    "gpt:30b": ("pp=8,micro=16", "pp=8,micro=16,schedule=zero-bubble"),
    "gpt:175b": ("dp=4,tp=8,pp=12,micro=96,recompute=full",),
    "llama:8b": ("pp=4,micro=8", "pp=4,micro=8,schedule=zero-bubble"),
    "resnet50": ("dp=8", "pp=4,micro=4"),
}
"""Plans by model, in bf16 on `dgx-h100`."""


def layouts() -> dict[tuple[str, str], tuple[StepLayout, Estimate]]:
    """The layout and the estimate of every case."""
    both = {}
    for name, texts in CASES.items():
        profile = zoo.profile(name)
        for text in texts:
            plan = Plan.parse(f"{text},precision=bf16")
            cluster = load("dgx-h100").with_devices(plan.ranks)
            estimate = cost_model(profile, cluster, "bf16").estimate(plan)
            layout = lay_out(OperatorCostModel(profile, cluster, "bf16").step(plan), estimate)
            both[name, text] = layout, estimate
    return both


def shares() -> dict[tuple[str, str], tuple[float, float, float]]:
    """By case, as shares of the estimate: how much longer the layout is, of that its bubble and its communication."""
    result = {}
    for case, (layout, estimate) in layouts().items():
        differences, whole = layout_differences(layout.step, estimate.parts), estimate.step_seconds
        longer = layout.seconds / layout.stretch - whole
        result[case] = tuple(s / whole for s in (longer, differences.get("bubble", 0.0), differences["communication"]))
    return result


def table() -> str:
    """The cases with the length of the timeline before it was stretched, the largest difference first."""
    rows = {case: [100 * share for share in own] for case, own in shares().items()}
    lines = [
        "| model | plan | layout, compared with the estimate | bubble | communication |",
        "|---|---|---:|---:|---:|",
    ]
    for (name, text), own in sorted(rows.items(), key=lambda item: (-abs(round(item[1][0], 1)), item[0])):
        lines.append(f"| {name} | `{text}` | {' | '.join(f'{round(x, 1) + 0.0:+.1f}%' for x in own)} |")
    return "\n".join(lines)


def pasted(page: str) -> str:
    """Replace the table of the page."""
    rows = table()
    return BLOCK.sub(lambda m: f"{m[1]}{rows}\n{m[2]}", page)


if __name__ == "__main__":
    PAGE.write_text(pasted(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
