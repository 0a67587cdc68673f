"""`drumline launch --launcher ray` on a real Ray of one node. RAY_SITE may name a folder that ray is installed in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launched import document, environment, run, same_weights, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def test_ray(tmp_path: Path) -> None:
    site = os.environ.get("RAY_SITE", "")
    path = os.pathsep.join(filter(None, [environment()["PYTHONPATH"], site]))
    there = subprocess.run([sys.executable, "-c", "import ray"], env=environment(PYTHONPATH=path), capture_output=True)
    if there.returncode:
        pytest.skip("ray is not installed: pip install ray, or --target FOLDER and RAY_SITE=FOLDER")
    words = train("dp=2,backend=gloo", "run", "--save-every", "5")
    launch = [sys.executable, "-m", "drumline", "launch", "--launcher", "ray", "--ranks", "2"]
    variables = {
        "PYTHONPATH": path,
        "RAY_TMPDIR": str(tmp_path.parent),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
    }
    done = run([*launch, *words], tmp_path, timeout=500, **variables)
    losses = document(done)["losses"]
    clean = run([sys.executable, "-m", "drumline", *train("dp=2,backend=gloo", "clean", "--save-every", "5")], tmp_path)
    assert losses == document(clean)["losses"]
    assert same_weights(tmp_path / "run", tmp_path / "clean")
    bad = run([*launch, *train("dp=4", "bad")], tmp_path, timeout=500, **variables)
    assert bad.returncode == 2, bad.stderr[-3000:]
    assert bad.stderr.count("the plan dp=4 needs 4 ranks, but ray started 2") == 1
