"""A real Jupyter kernel: jobs and functions defined in cells run on ranks, without a file and without a guard."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "first_hour.ipynb"
CELLS = [
    """
import torch
import torch.nn.functional as F
import drumline as dl
from drumline.clusters import Cluster, DeviceSpec, Link, Node

device = DeviceSpec("core", "cpu", 1e10, 1e10, {"fp32": 1e10}, 1e-5, threads=1)
here = Cluster("here", device, Node(2, Link(1e-4, 1e9)))
""",
    """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 4)

    def forward(self, x):
        return self.layer(x)

def data():
    return [(torch.full((8,), float(i % 4)), i % 4) for i in range(20)]
""",
    """
job = dl.Job(Net, F.cross_entropy, lambda p: torch.optim.SGD(p, lr=0.1), data, batch_size=10, steps=3)
run = dl.train(job, "dp=2", cluster=here, output="run", corrections=False)
print(len(run.losses), "steps on", run.ranks, "ranks")
run
""",
    """
print(dl.spawn(lambda: int(__import__("os").environ["RANK"]) * 10, ranks=2))
""",
    "dl.verify(job, 'nonsense=2')",
]


def run_notebook(cells: list[str], folder: Path, *, timeout: int = 280) -> list[Any]:
    """The outputs of each cell, as nbformat has them; a cell that raises shows it as its output."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the Jupyter packages, about each other
        import nbformat
        from nbclient import NotebookClient

        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
        client = NotebookClient(
            notebook,
            timeout=timeout,
            kernel_name="python3",
            allow_errors=True,
            resources={"metadata": {"path": str(folder)}},
        )
        client.execute()
    return [cell.outputs for cell in notebook.cells]


def text_of(outputs: Any) -> str:
    return "".join(o.get("text", "") for o in outputs if o.output_type == "stream" and o.name == "stdout")


def test_a_job_from_cells_on_two_ranks(tmp_path: Path) -> None:
    _, _, trained, spawned, refused = run_notebook(CELLS, tmp_path)
    assert text_of(trained) == "3 steps on 2 ranks\n", trained
    shown = next(o.data["text/html"] for o in trained if o.output_type == "execute_result")
    assert "dp=2" in shown and "data:image/svg+xml" in shown
    assert text_of(spawned) == "[0, 10]\n", spawned
    (error,) = refused
    assert "PlanError: " in error.traceback[0] and len(error.traceback) == 1, error


def test_the_first_hour_has_no_outputs() -> None:
    notebook = json.loads(EXAMPLE.read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) >= 8
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)


@pytest.mark.slow
@pytest.mark.timeout(1500)  # it measures the machine
def test_the_first_hour_runs(tmp_path: Path) -> None:
    notebook = json.loads(EXAMPLE.read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    outputs = run_notebook(cells, tmp_path, timeout=1200)
    errors = [o for each in outputs for o in each if o.output_type == "error"]
    assert errors == []
    assert "passed: True" in "".join(map(text_of, outputs))
    assert sum("text/html" in o.get("data", {}) for each in outputs for o in each) >= 5
