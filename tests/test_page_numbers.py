"""Every measured number of a page has a producer: a block that a script writes, or a line of the table below.

Read are README.md and docs/*.md without code, pictures of code and blocks that a script writes; docs/log has
measurements with their dates instead. A producer is a constant of the code, the bound of a test or benchmark, or a
published number: a file, and text that the file contains.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
API = ("api.md", "api-messages.md", "api-theory.md")
PAGES = [ROOT / "README.md", *(p for p in sorted((ROOT / "docs").glob("*.md")) if p.name not in API)]

UNITS = r"ns|us|ms|s|seconds?|microseconds?|milliseconds?|min|minutes?|hours?|%|percent|times"
NUMBER = re.compile(rf"(?<![\w.])\d[\d,]*(?:\.\d+)?(?: to \d[\d,.]*)? ?(?:{UNITS})(?![\w/^]| h\b)")
BLOCKS = (
    re.compile(r"^```.*?^```", re.S | re.M),
    re.compile(r"^<!-- (?!/|end)[^>]*-->.*?^<!-- (?:/|end)[^>]*-->", re.S | re.M),
    re.compile(r"^    .*$", re.M),
    re.compile(r"`[^`\n]*`"),
    re.compile(r"\]\([^)]*\)"),
)
MARK = re.compile(r"^<!-- (?!/|end)(\w[\w -]*?)(?: [\d ]+)? -->$", re.M)

WRITERS = {
    "README.md": {"numbers": "docs/paste_numbers.py", "collectives": "docs/paste_numbers.py"},
    "cluster-file.md": {"keys": "docs/paste_cluster_file.py"},
    "collectives.md": {"listing": "docs/paste_listing.py"},
    "cost.md": dict.fromkeys(("forms", "growth", "collectives"), "docs/paste_cost.py"),
    "data.md": {"data": "benchmarks/data.py"},
    "design.md": {"map": "docs/paste_map.py"},
    "faults.md": {"soak": "benchmarks/soak.py", "recovery": "benchmarks/recovery.py"},
    "gpu.md": dict.fromkeys(("predicted", "unseen", "engine"), "benchmarks/predict_gpu.py"),
    "known-runs.md": {"runs": "docs/paste_known_runs.py"},
    "planning.md": {"reserve": "docs/paste_planning.py", "pairs": "docs/paste_planning.py"},
    "runs.md": {"overhead": "benchmarks/overhead.py", "pages": "benchmarks/pages.py"},
    "simulate-steps.md": {"layout": "docs/paste_layout.py"},
    "validate.md": {
        **dict.fromkeys(("summary", "sources", "groups"), "docs/paste_validate.py"),
        "sweep": "docs/paste_sweep.py",
    },
}
"""Page -> block -> the script that writes it; the page names the script."""
COMPARED = {"pipelines.md": ("tests/reports/test_pipelines_page.py", {"orders", "unequal", "picture"})}
"""Blocks that a test compares with what the code draws and counts."""

_SOURCE = "src/drumline/"
_ALONE = _SOURCE + "planner/objectives.py"
_HANG = _SOURCE + "comm/hang_limit.py", "FACTOR, SHORTEST, START, WARM = 5.0, 10.0, 300.0, 3"
_BUSY = _SOURCE + "launchers/hang_watch.py", "_BUSY = 6"
_IMBALANCE = _SOURCE + "costs/expert_split.py", "IMBALANCE = 1.1"
_MTBF = _SOURCE + "theory/checkpoint_interval.py", 'USUAL_DEVICE_MTBF = "50000h"'
_TOLERANCES = _SOURCE + "runtime/verification/tolerances.py"
_WORKERS = "tests/simulator/test_workers.py"
_GPU = "benchmarks/predict_gpu.py"
_RATIOS = "tests/validation/test_schedule_ratios.py"
PRODUCERS: dict[str, dict[str, tuple[str, str]]] = {
    "asynchronous.md": {
        "saves at least 20% of the best exact plan's step": (_ALONE, "LEAST_SAVING = 0.2"),
        "even workers both agree to rounding (: 1%)": (_WORKERS, 'rel=0.01 if word.startswith("stale") else 1e-9'),
        "with one slow worker within 2%": (_WORKERS, "rel=0.02"),
        "with jitter of 20%": (_WORKERS, "uneven(jitter=0.2)"),
        "within 10%, or 20% where workers queue": (_WORKERS, "rel=0.2 if queues else 0.1"),
    },
    "calibration.md": {
        "longer than 9 s": (_SOURCE + "costs/observed_runs.py", "REFERENCE_SECONDS, LENGTH_POWER = 9.0, 0.25"),
        "20% of a difference": (
            _SOURCE + "measurement/speed_probe.py",
            "PERSISTENCE_BEFORE, PERSISTENCE_AROUND = 0.2, 0.3",
        ),
    },
    "collectives.md": {"at least 5%": (_SOURCE + "planner/gradient_algorithms.py", "LEAST_GAIN = 0.05")},
    "costs-mp.md": {"each go n - 1 times": (_SOURCE + "costs/collectives.py", "(near - 1) * cluster")},
    "data-parallel.md": {
        "(1% and 25%)": (_TOLERANCES, 'COMPRESSED = {"fp16": 1e-2, "powersgd": 0.25}'),
        "50,000 hours": _MTBF,
    },
    "data.md": {"more than 10%": (_SOURCE + "costs/input_pipeline.py", "BOUND = 0.1")},
    "doctor.md": {"within 8 seconds": (_SOURCE + "measurement/doctor/backend_matrix.py", "TIMEOUTS = (2.0, 6.0)")},
    "dry-run.md": {"within 5%": ("tests/runtime/test_dry_run_engine.py", "pytest.approx(counted, rel=0.05)")},
    "experts.md": {"1.1 times": _IMBALANCE},
    "faults.md": {
        "at least 10 s (": _HANG,
        "; 5 min while all": _HANG,
        "30 min before": _BUSY,
        "after 5 min, or": _HANG,
    },
    "gpu.md": {
        "at most 10% (worst 20%) for the step, and 5%": (
            _GPU,
            "within 10% on average and 20% at worst, memory within 5%",
        ),
        "6% and 20% at worst": (_GPU, "within 6% on average and 20% at worst"),
        "34 us": (_SOURCE + "costs/typical_rates.py", '"forward": 3.4e-5'),
        "within 25%": ("tests/costs/test_typical_rates.py", "WITHIN = 0.25"),
        "43 to 87%": ("tests/costs/test_typical_rates.py", 'too fast" in PAGE.read_text()'),
        "stays 50%": (_SOURCE + "costs/tuning.py", "UNMEASURED_ERROR = 0.5"),
    },
    "launchers.md": {
        "120 s before the time limit": (_SOURCE + "launchers/slurm.py", "_GRACE = 120"),
        "asked to end has 120 s": (_SOURCE + "launchers/kubernetes.py", '"terminationGracePeriodSeconds": 120'),
    },
    "limits.md": {"less than 2%": (_ALONE, "TIE = 0.02"), "1.1 times": _IMBALANCE},
    "mpi.md": {"95% of what mpi4py": ("benchmarks/mpi4py_tests.py", "SHARE, SHARE_OF_REAL = 0.9, 0.95")},
    "mpiexec.md": {"at most 1.5 times": ("benchmarks/netns.py", "at most 1.5x")},
    "pipelines.md": {
        "within 5%": (_RATIOS, "for one in ratios) < 0.05"),
        "more than 2%": (_RATIOS, "TIE = 0.02"),
        "up to 8% too fast": (_RATIOS, "for r in beyond) < 0.09"),
        "at most 5% longer": (_SOURCE + "partition/stage_boundaries.py", "SLACK = 1.05"),
    },
    "planning.md": {
        "to 3%": (_SOURCE + "planner/break_even.py", "TOLERANCE = 1.03"),
        "a reserve: 10%": (_SOURCE + "planner/reserve.py", "GPU_RESERVE = 0.1"),
        "at most 2% above the shortest": (_ALONE, "TIE = 0.02"),
        "ties, 5% where": (_ALONE, "UNMEASURED_TIE = 0.05"),
        "Why 2%": (_ALONE, "TIE = 0.02"),
        "50,000 hours": _MTBF,
        "saves at least 20% of the step": (_ALONE, "LEAST_SAVING = 0.2"),
    },
    "precision.md": {
        "within 5% of one device in bf16 with": (_TOLERANCES, '"bf16-pure": 5e-2'),
        "within 5% in 150 steps": ("tests/runtime/test_bf16_pure.py", "<= 0.05 * master"),
        "more than 20% higher": ("tests/runtime/test_bf16_pure.py", "> 1.2 * master"),
        "within 25% of the largest": (_TOLERANCES, '"float8": 0.25'),
        "within 5% of one device in bf16.": (_TOLERANCES, '"fp8": 5e-2'),
    },
    "reports.md": {
        "longer than 0.25 s": (_SOURCE + "reports/fault_section.py", "LEAST_GAP = 0.25"),
        "less than 2 s": ("tests/reports/test_page_in_browser.py", "assert quickest(browser, path) <= 2"),
    },
    "runs.md": {
        "120 s after its last heartbeat": (_SOURCE + "runtime/checkpoint/lock.py", "DEAD = 120.0"),
        "at least 1.94 times": ("docs/runs.md", "`slowest rank 1 (backward 1.94x)`"),
        "below 5%": (_SOURCE + "runtime/training/slowest_rank.py", "_HARMLESS = 0.05"),
        "messages take 20%": (_SOURCE + "runtime/training/link_probe.py", "SHARE = 0.2"),
        "at most 1%": (_SOURCE + "runtime/training/link_probe.py", "_BUDGET = 0.01"),
        "at least 10 s; 300 s, or": _HANG,
        "after 300 s, with": _HANG,
        "has 300 s too": _HANG,
        "limit is 300 s": _HANG,
        "with 95% intervals": ("benchmarks/engine_peers/ratios.py", "95% interval"),
    },
    "simulate-steps.md": {
        "102.6 s": ("tests/load/test_load.py", "102.6 s"),
        "more than 0.5%": (_SOURCE + "simulator/step.py", "LARGEST_STRETCH = 0.005"),
        "(5 minutes unless given": (_SOURCE + "loop/step_simulation.py", 'restart: str | float = "5min"'),
        "50,000 hours": _MTBF,
    },
    "spatial.md": {"within 25%": (_TOLERANCES, "WITHOUT_HALO = 0.25")},
    "validate.md": {
        "more than 10%": (_SOURCE + "validation/result.py", "MIN_LAYOUTS, MIN_SPREAD = 5, 0.10"),
        "2.5 times as many backward": (_SOURCE + "costs/fitted/compute.py", "2.5 * causal"),
        "beyond 90%": (_SOURCE + "costs/fitted/host_waits.py", "NEARLY_FULL = 0.9"),
        "up to 5% and": (_SOURCE + "validation/robust_fit.py", "HUBER = 0.05"),
        "a regret above 2%": ("docs/validate.md", "| 0.61 | 4.5% |"),
    },
}
"""Page -> phrase with a number -> its producer: a file, and what is in it."""


def prose(text: str) -> str:
    """A page in one line, without code and without the blocks that a script writes."""
    for pattern in BLOCKS:
        text = pattern.sub("", text)
    return " ".join(text.split())


def without_producer(text: str, listed: dict[str, tuple[str, str]]) -> list[str]:
    """Numbers of a page that no phrase of the table has."""
    words = prose(text)
    for phrase in sorted(listed, key=len, reverse=True):
        words = words.replace(phrase, " ")
    return [words[max(0, m.start() - 40) : m.end() + 20] for m in NUMBER.finditer(words)]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.name))
def test_every_number_has_a_producer(page: Path) -> None:
    text, listed = page.read_text(), PRODUCERS.get(page.name, {})
    assert without_producer(text, listed) == [], "paste it by a script, or name its producer in PRODUCERS"
    assert [phrase for phrase in listed if phrase not in prose(text)] == [], "gone from the page"


def test_every_producer_has_the_number() -> None:
    named = {producer for phrases in PRODUCERS.values() for producer in phrases.values()}
    assert [(file, words) for file, words in sorted(named) if words not in (ROOT / file).read_text()] == []
    assert PRODUCERS.keys() <= {page.name for page in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.name))
def test_every_pasted_block_names_its_script(page: Path) -> None:
    text, writers = page.read_text(), WRITERS.get(page.name, {})
    marks = set(MARK.findall(text))
    if page.name in COMPARED:
        test, compared = COMPARED[page.name]
        marks = {mark.split()[0] for mark in marks}
        assert marks == compared and page.name in (ROOT / test).read_text()
        return
    assert marks == writers.keys()
    for mark, script in writers.items():
        assert mark in (ROOT / script).read_text(), f"{script} does not write {mark}"
        assert script in text or "`make numbers`" in text, f"{page.name} does not name {script}"


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("It takes 60 ms.", 1),
        ("It is 1.32 times as fast, or 5% to 11%.", 3),
        ("from 7.0 to 7.5 s\nof one core, 23\nms each", 2),
        ("| a | 0.40 s |\n|---|---|\n| b | +2.5% |", 2),
        ("`60 ms`, and\n\n    60 ms\n\n```text\n60 ms\n```\n", 0),
        ("<!-- data -->\n60 ms\n<!-- /data -->\nand <!-- end -->", 0),
        ("4 s^2 h operations of 100 samples/s, 300 GB/s, 2 stages", 0),
    ],
)
def test_numbers_are_found(text: str, numbers: int) -> None:
    assert len(without_producer(text, {})) == numbers
