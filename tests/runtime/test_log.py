"""The log of a run: the same fields on the screen, in JSON lines, TensorBoard and Weights & Biases."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import os
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import small_jobs
from rich.console import Console

from drumline.cli.screen import Screen
from drumline.cli.train import check_log_options
from drumline.clusters import load
from drumline.core.errors import CorruptFile, InputError
from drumline.datasets.stream import Stream
from drumline.reports import StepRecord
from drumline.reports.step_records import earlier_steps, read_steps, step_line
from drumline.runtime.telemetry.log import RunFacts, StepLog, fit_fields, peak_of, step_fields, wrap_fields
from drumline.runtime.telemetry.sinks import JsonLinesFile, JsonLinesStream, TensorBoard, Wandb, finite_numbers
from drumline.runtime.training.step_reports import tokens

FACTS = RunFacts(100, 4, predicted=0.5, work=0.0, work_per_sample=2e12, peak=100e12, memory_limit=80e9)


def report(step: int, **changes: Any) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 2.5,
        "grad_norm": 1.25,
        "seconds": 0.4,
        "samples": 32,
        "memory_bytes": 20e9,
        "tokens": 32 * 1024,
        "data_seconds": 0.1,
        "probed": False,
        "slowest": None,
        "skipped": 0,
        "note": "",
        "checkpoint_age": None,
        **changes,
    }


def test_rates_per_device() -> None:
    r = StepLog(FACTS).record(report(9))
    whole = 0.4 + 0.1  # a rank that waits for its data trains nothing
    assert r.samples_per_second == pytest.approx(8 / whole) and r.tokens_per_second == pytest.approx(8 * 1024 / whole)
    assert r.tflops == pytest.approx(32 * 2 / 4 / whole) and r.mfu == pytest.approx(32 * 2e12 / 4 / whole / 100e12)
    assert r.drift == pytest.approx(-0.2) and r.eta_seconds == pytest.approx(90 * 0.5)
    assert r.data_share == pytest.approx(0.2) and r.memory_share == pytest.approx(0.25)


def test_unknown_values() -> None:
    r = StepLog(RunFacts(10, 1)).record(report(0, tokens=0, memory_bytes=0.0))
    assert (r.tokens_per_second, r.tflops, r.mfu, r.drift, r.memory_share, r.slowest_rank) == (None,) * 6
    line = wrap_fields(step_fields(r, 10), 1000)
    assert "MFU N/A" in line and "predicted" not in line and "FLOP/s" not in line and "tokens/s" not in line


def test_peak_of_the_precision() -> None:
    h100 = load("dgx-h100")
    assert peak_of(h100, "bf16") == peak_of(h100, "bf16-pure") == h100.device.peak["bf16"]
    assert (
        peak_of(dataclasses.replace(h100, device=dataclasses.replace(h100.device, peak={"bf16": 1.0})), "fp8") is None
    )


def test_drift_uses_the_last_steps_without_the_profiled_one() -> None:
    log = StepLog(FACTS)
    for i in range(5):
        log.record(report(i, seconds=0.6))
    assert log.record(report(5, seconds=60.0, probed=True)).drift == pytest.approx(0.2)
    for i in range(30):
        last = log.record(report(6 + i, seconds=0.5))
    assert last.drift == pytest.approx(0.0)
    log.predicted = 0.25
    assert log.record(report(40, seconds=0.5)).drift == pytest.approx(1.0)


def test_first_step_counts_until_the_second() -> None:
    log = StepLog(FACTS)
    assert log.record(report(0, seconds=50.0)).drift == pytest.approx(99.0)
    assert log.record(report(1, seconds=0.5)).drift == pytest.approx(0.0)
    assert log.record(report(2, seconds=0.7)).drift == pytest.approx(0.2)


def test_memory_and_slowest_rank_persist() -> None:
    log = StepLog(FACTS)
    log.record(report(0, slowest=(2, "forward", 1.5)))
    r = log.record(report(1, memory_bytes=1e9))
    assert (r.slowest_rank, r.slowest_phase, r.slowest_factor, r.memory_bytes) == (2, "forward", 1.5, 20e9)
    assert "slow rank 2 (forward 1.50x)" in step_fields(r, 100)
    assert not any("rank 2" in field for field in step_fields(log.record(report(2, slowest=(2, "data", 1.004))), 100))
    assert "slowest rank 2 (data 1.10x)" in step_fields(log.record(report(2, slowest=(2, "data", 1.1))), 100)


def test_log_line() -> None:
    r = StepLog(FACTS).record(report(9, skipped=2, checkpoint_age=125.0, slowest=(1, "data", 1.04)))
    assert "  ".join(step_fields(r, 100)) == (
        "step 10/100  loss 2.5000  grad 1.250  400 ms (predicted 500 ms, recent steps 20.0% faster)  all ranks: 65536 tokens/s, 64 samples/s  "
        "18.6 GiB (25%)  per device: 32.0 TFLOP/s, MFU 32.0%  eta 45.0 s  data 20%  slowest rank 1 (data 1.04x)  skipped 2  "
        "checkpoint 2.08 min ago"
    )


def test_staleness_and_waiting_in_the_line() -> None:
    log = StepLog(FACTS)
    r = log.record(report(0, staleness=[2, 3], elapsed=0.5))
    assert (r.staleness, r.mean_staleness, r.wait_share, r.worker) == ((2, 3), 2.5, None, None)
    r = log.record(report(1, staleness=(), elapsed=1.0, wait_seconds=[0.0, 0.1, 0.0, 0.4], worker=3, dropped=2))
    assert r.wait_seconds == (0.0, 0.1, 0.0, 0.4) and r.mean_staleness == 2.5 and r.elapsed == 1.0
    assert r.wait_share == pytest.approx(0.125) and (r.longest_wait_rank, r.longest_wait_share) == (3, 0.4)
    assert step_fields(r, 100)[-4:] == ["wait 12% (rank 3 40%)", "stale 2.5", "worker 3", "dropped 2"]
    even = StepLog(FACTS).record(report(0, wait_seconds=[0.0] * 4))
    assert "wait 0%" in step_fields(even, 100) and even.longest_wait_rank is None
    plain = step_fields(StepLog(FACTS).record(report(0)), 100)
    assert not any(word in field for field in plain for word in ("stale", "wait", "worker", "dropped"))


def test_waiting_is_measured_over_the_last_steps() -> None:
    """Of the time since the last report, whether or not the records between had waits; a lost rank starts anew."""
    log = StepLog(FACTS)
    for i in range(10):
        r = log.record(report(i, elapsed=0.5 * (i + 1), wait_seconds=[2.5, 0.0] if i == 9 else ()))
    assert r.wait_share == pytest.approx(0.25)
    assert log.record(report(10, elapsed=5.5)).wait_share == pytest.approx(0.25)  # until the next report
    for i in range(11, 40):
        r = log.record(report(i, elapsed=0.5 * (i + 1), wait_seconds=[0.0, 0.25] if i % 10 == 9 else ()))
    assert r.wait_share == pytest.approx(0.025) and r.longest_wait_rank == 1
    assert log.record(report(40, elapsed=20.5, wait_seconds=[0.1])).wait_share == pytest.approx(0.2)
    without = StepLog(FACTS)
    assert without.record(report(0, wait_seconds=[0.25, 0.0])).longest_wait_share == 0.5  # 0.4 s and 0.1 s of data


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_lines_fit_a_terminal(width: int) -> None:
    waits = {"staleness": [2, 3], "wait_seconds": [0.1] * 100, "worker": 99, "dropped": 12345}
    r = StepLog(FACTS).record(report(9, skipped=2, checkpoint_age=125.0, slowest=(1, "optimizer", 1.04), **waits))
    text = wrap_fields(step_fields(r, 100_000), width)
    assert all(len(line) <= width for line in text.splitlines())
    assert re.sub(r"\s+", " ", text) == " ".join(step_fields(r, 100_000))
    assert (
        len(fit_fields(step_fields(r, 100_000), width)) <= width
        and fit_fields(step_fields(r, 100), 26) == "step 10/100  loss 2.5000"
    )
    long = wrap_fields(
        ["step 3:", "rank unknown: the gradient of 'a.very.long.name.of.a.weight' was not finite"], width
    )
    assert all(len(line) <= width for line in long.splitlines())


def shown(monkeypatch: pytest.MonkeyPatch, width: int, terminal: bool, **options: Any) -> tuple[Screen, io.StringIO]:
    out = io.StringIO()
    console = Console(
        file=out,
        width=width,
        force_terminal=terminal,
        highlight=False,
        soft_wrap=not terminal,
        no_color=True,
        legacy_windows=False,
    )
    monkeypatch.setattr("drumline.reports.console.console", lambda **_: console)
    screen = Screen(quiet=False, **options)
    screen.open(100)
    return screen, out


def test_terminal_of_40_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, out = shown(monkeypatch, 40, True)
    log = StepLog(FACTS)
    with contextlib.closing(screen):
        for i in range(100):
            screen.step(
                log.record(
                    report(i, note="loss spike: 9 is 12.0 standard deviations above the last 64" if i == 50 else "")
                ),
                profiled=False,
            )
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert "step 100/100  loss 2.5000" in plain and "loss spike" in plain
    assert all(len(line) <= 40 for line in re.split(r"[\r\n]+", plain)), plain


def test_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, out = shown(monkeypatch, 120, False)
    log = StepLog(FACTS)
    with contextlib.closing(screen):
        for i in range(100):
            note = "skipped: the loss is nan at step 7; rank 1: the loss is not finite" if i == 7 else ""
            screen.step(log.record(report(i, note=note)), profiled=i == 4)
    lines = out.getvalue().splitlines()
    assert [line.split()[1] for line in lines if line.startswith("step") and "loss 2.5" in line] == [
        "1/100",
        *(f"{n}/100" for n in range(5, 101, 5)),
    ]
    assert [line for line in lines if "rank 1" in line] == [
        "step 8:  skipped: the loss is nan at step 7  rank 1: the loss is not finite"
    ]
    assert lines[1].endswith("(recorded)")


def test_json_lines_have_the_same_fields(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    screen, out = shown(monkeypatch, 120, False, form="jsonl")
    log = StepLog(FACTS)
    record = log.record(report(3, loss=math.nan, note="skipped"))
    with contextlib.closing(screen):
        screen.step(record, profiled=False)
    [line] = capsys.readouterr().out.splitlines()
    record_json = json.loads(line)
    assert list(record_json) == [f.name for f in dataclasses.fields(StepRecord)]
    assert record_json["loss"] == "nan" and record_json["note"] == "skipped" and out.getvalue() == ""


def test_file_grows_with_every_step_and_reads_back(tmp_path: Path) -> None:
    sink, log = JsonLinesFile(tmp_path / "steps.jsonl"), StepLog(FACTS)
    records = [log.record(report(i, loss=math.inf if i == 1 else 2.0)) for i in range(3)]
    for n, record in enumerate(records, 1):
        sink.write(record)
        assert read_steps(tmp_path / "steps.jsonl") == tuple(records[:n])
    sink.close()
    assert "mfu" in step_line(records[0]) and "checkpoint_age" not in step_line(records[0])
    with pytest.raises(InputError, match="cannot be written"):
        JsonLinesFile(tmp_path / "none" / "steps.jsonl")


def test_records_of_earlier_releases_and_unknown_fields(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text('{"step": 0, "loss": 2.5, "grad_norm": 1.0, "seconds": 0.1, "samples": 8}\n')
    [old] = read_steps(path)
    assert (old.staleness, old.wait_seconds, old.worker, old.dropped, old.elapsed) == ((), (), None, 0, None)
    new = StepLog(FACTS).record(report(3, staleness=[0, 7], wait_seconds=[0.25, 0.0], worker=1, dropped=4, elapsed=2.0))
    path.write_text(step_line(new))
    assert read_steps(path) == (new,) and '"staleness": [0, 7]' in step_line(new)
    path.write_text(step_line(new).replace('"worker"', '"workers"'))
    with pytest.raises(CorruptFile, match="workers"):
        read_steps(path)


def test_resumed_run_appends_to_the_file(tmp_path: Path) -> None:
    """Steps that run again replace their old lines; the partial last line of a killed run is tolerated."""
    path, log = tmp_path / "steps.jsonl", StepLog(FACTS)
    assert earlier_steps(path) == ()
    records = [log.record(report(i)) for i in range(6)]
    path.write_text("".join(map(step_line, records[:5])) + '{"step": 5, "lo')
    assert earlier_steps(path) == tuple(records[:5])
    before = path.read_bytes()
    sink = JsonLinesFile(path, resume=True)
    assert path.read_bytes() == before  # until a step was run
    again = [dataclasses.replace(r, loss=1.0) for r in records[3:]]
    for record in again:
        sink.write(record)
    sink.close()
    assert read_steps(path) == (*records[:3], *again)
    path.write_text(step_line(records[0]) + '{"st{"step": 2}\n' + step_line(records[2]))
    assert earlier_steps(path) == (records[0], records[2])  # the disk was full for a while
    path.write_text('{"step": "no number"}\n')
    with pytest.raises(CorruptFile, match="steps.jsonl"):
        earlier_steps(path)
    JsonLinesFile(path).close()
    assert path.read_bytes() == b""  # a new run


def test_stream_is_left_open() -> None:
    out = io.StringIO()
    sink = JsonLinesStream(out)
    sink.write(StepLog(FACTS).record(report(0)))
    sink.close()
    assert json.loads(out.getvalue())["step"] == 0


def test_tensorboard_scalars(monkeypatch: pytest.MonkeyPatch) -> None:
    points: list[tuple[str, float, int]] = []

    class Writer:
        def __init__(self, folder: str) -> None:
            assert folder == "board"

        def add_scalar(self, name: str, value: float, step: int) -> None:
            points.append((name, value, step))

        def close(self) -> None:
            points.append(("closed", 0, 0))

    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer))
    sink = TensorBoard("board")
    record = StepLog(FACTS).record(report(9, grad_norm=math.nan))
    sink.write(record)
    sink.close()
    assert {n: v for n, v, s in points if s == 9} == finite_numbers(record) and points[-1][0] == "closed"
    assert (
        "grad_norm" not in finite_numbers(record)
        and "note" not in finite_numbers(record)
        and finite_numbers(record)["loss"] == 2.5
    )
    several = finite_numbers(StepLog(FACTS).record(report(9, staleness=[1, 4], wait_seconds=[0.0, 0.5])))
    assert (several["staleness_mean"], several["staleness_max"], several["wait_seconds_max"]) == (2.5, 4.0, 0.5)


def test_wandb_is_offline_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows: list[Any] = []

    class Run:
        def log(self, values: dict[str, float], step: int) -> None:
            rows.append((step, values))

        def finish(self) -> None:
            rows.append("finished")

    def init(**given: Any) -> Run:
        rows.append((os.environ["WANDB_MODE"], given["project"], given["config"]))
        return Run()

    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    monkeypatch.setenv("WANDB_MODE", "disabled")
    Wandb("run", tmp_path, {})
    monkeypatch.delenv("WANDB_MODE")
    sink = Wandb("run", tmp_path, {"plan": "dp=2"})
    record = StepLog(FACTS).record(report(9))
    sink.write(record)
    sink.close()
    monkeypatch.delenv("WANDB_MODE", raising=False)
    assert rows == [
        ("disabled", "drumline", {}),
        ("offline", "drumline", {"plan": "dp=2"}),
        (9, finite_numbers(record)),
        "finished",
    ]


@pytest.mark.parametrize(
    ("make", "package"), [(lambda: TensorBoard("x"), "tensorboard"), (lambda: Wandb("x", Path(), {}), "wandb")]
)
def test_missing_extra_names_its_install_command(monkeypatch: pytest.MonkeyPatch, make: Any, package: str) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=f"--{package} needs the package {package}, which is not installed") as caught:
        make()
    assert caught.value.fix == f"pip install 'drumline[{package}]'"


def test_invalid_options() -> None:
    with pytest.raises(InputError, match="--log-format is text or jsonl\n  try:   Did you mean 'jsonl'"):
        check_log_options("json", None)
    with pytest.raises(InputError, match="--log-every 0"):
        check_log_options("text", 0)


def test_tokens() -> None:
    def of(kind: str) -> int:
        job = small_jobs.make("gpt")
        return tokens(Stream(job, small_jobs.Samples(kind), dp=2).batch(0))

    assert of("tokens") == 7 * 5 and of("vector") == 0 and of("image") == 0
