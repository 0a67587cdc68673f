"""Float32 means float32: a plan decides how its float32 is computed, and a process keeps its own settings."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import drumline as dl
from drumline.comm.environment import disconnect
from drumline.runtime.engine import initialize
from drumline.runtime.numerics.precision import float32_arithmetic

backends: Any = torch.backends
GPU = torch.device("cuda")
"""Its settings can be changed without one."""

SETTINGS: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "allow_tf32": lambda: setattr(backends.cuda.matmul, "allow_tf32", True),
    "no tf32 at all": lambda: setattr(backends.cudnn, "allow_tf32", False),
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "medium, then allow_tf32": lambda: (
        torch.set_float32_matmul_precision("medium"),
        setattr(backends.cuda.matmul, "allow_tf32", False),
    ),
    "new: matmul tf32": lambda: setattr(backends.cuda.matmul, "fp32_precision", "tf32"),
    "new: matmul ieee": lambda: setattr(backends.cuda.matmul, "fp32_precision", "ieee"),
    "new: all tf32": lambda: setattr(backends, "fp32_precision", "tf32"),
    "new: all ieee": lambda: setattr(backends, "fp32_precision", "ieee"),
    "new: convolutions ieee": lambda: setattr(backends.cudnn.conv, "fp32_precision", "ieee"),
    "new: recurrent ieee": lambda: setattr(backends.cudnn.rnn, "fp32_precision", "ieee"),
    "both": lambda: (
        setattr(backends.cuda.matmul, "allow_tf32", True),
        setattr(backends.cuda.matmul, "fp32_precision", "ieee"),
    ),
}


def read() -> list[object]:
    """All settings, by both interfaces; the older one may refuse."""
    values: list[object] = [
        backends.fp32_precision,
        backends.cuda.matmul.fp32_precision,
        backends.cudnn.conv.fp32_precision,
        backends.cudnn.rnn.fp32_precision,
    ]
    for setting in (
        torch.get_float32_matmul_precision,
        lambda: backends.cuda.matmul.allow_tf32,
        lambda: backends.cudnn.allow_tf32,
    ):
        try:
            values.append(setting())
        except RuntimeError:
            values.append("refused")
    return values


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    """Every test begins and ends with torch's defaults."""
    _reset()
    yield
    _reset()
    disconnect()


def _reset() -> None:
    backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    backends.cuda.matmul.fp32_precision = "none"
    backends.cudnn.allow_tf32 = True


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("chosen", SETTINGS)
def test_plan_decides_and_settings_come_back(chosen: str, precision: str) -> None:
    SETTINGS[chosen]()
    before = read()
    with float32_arithmetic(precision, GPU):
        used = read()[1:4]
        if precision == "fp32":
            assert set(used) <= {"ieee", "none"}
        elif precision == "tf32":
            assert set(used) == {"tf32"}
        else:
            assert read() == before
    assert read() == before


@pytest.mark.parametrize("chosen", ["allow_tf32", "high", "medium", "nothing", "no tf32 at all"])
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_older_interface_stays_readable(chosen: str, precision: str) -> None:
    """Torch's compiler reads it: a user of the older interface must not find both mixed inside a step."""
    SETTINGS[chosen]()
    with float32_arithmetic(precision, GPU):
        assert "refused" not in read()


def test_settings_come_back_after_an_error() -> None:
    SETTINGS["allow_tf32"]()
    before = read()
    with pytest.raises(ZeroDivisionError), float32_arithmetic("fp32", GPU):
        raise ZeroDivisionError
    assert read() == before


class Watching(nn.Linear):
    """Records the settings that its forward meets."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        SEEN.append(backends.cuda.matmul.fp32_precision)
        return super().forward(x)


SEEN: list[str] = []


@pytest.mark.parametrize(("precision", "word"), [("fp32", "ieee"), ("tf32", "tf32")])
def test_step_and_evaluation_use_the_plans_precision(precision: str, word: str) -> None:
    data = [(torch.ones(4), torch.ones(2)) for _ in range(4)]
    job = dl.Job(
        model=lambda: Watching(4, 2),
        loss=nn.functional.mse_loss,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        data=lambda: data,
        batch_size=4,
    )
    engine = initialize(job, f"dp=1,precision={precision}")
    backends.cuda.matmul.allow_tf32 = precision == "fp32"  # the opposite
    before = read()
    SEEN.clear()
    for batch in engine.data(1):
        engine.step(batch)
    engine.evaluate()
    assert [word, word] == SEEN
    assert read() == before


def test_defaults_of_a_new_process() -> None:
    """The defaults that `_reset` sets are torch's own."""
    text = "import sys; sys.path.insert(0, 'tests/runtime'); import test_float32_settings as t; print(t.read())"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(read())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("chosen", ["nothing", "allow_tf32", "new: all tf32"])
@pytest.mark.parametrize("kind", ["matmul", "convolution", "recurrent"])
def test_gpu_computes_float32(chosen: str, kind: str) -> None:
    """Against float64: tf32 has 10 bits, and errors of about 3e-4."""
    torch.manual_seed(0)
    layer = {"matmul": nn.Linear(256, 256), "convolution": nn.Conv2d(16, 64, 3), "recurrent": nn.LSTM(256, 256)}[kind]
    x = torch.randn(*((8, 16, 32, 32) if kind == "convolution" else (8, 16, 256)), device="cuda")

    def computed(dtype: torch.dtype) -> torch.Tensor:
        y = layer.to("cuda", dtype)(x.to(dtype))
        return (y[0] if isinstance(y, tuple) else y).detach().double()

    exact = computed(torch.float64)
    SETTINGS[chosen]()
    errors = {}
    for precision in ("fp32", "tf32"):
        with float32_arithmetic(precision, GPU):
            errors[precision] = float((computed(torch.float32) - exact).norm() / exact.norm())
    assert errors["fp32"] < 2e-6
    if kind != "convolution":  # cuDNN has faster kernels than those of tf32 for some
        assert errors["tf32"] > 2e-5
