"""The `Job`: the user's model, loss, optimizer and data. The result of training depends on the job, not on the plan
(beyond rounding).

Its file form is `path.py:name`, with a digest of the file after `@`. This module does not import torch.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import files
from .errors import CorruptFile, JobError, nearest
from .job_functions import is_module, loss_of_output, refuse_object, takes_names
from .regular_files import sha256

if TYPE_CHECKING:
    import torch
    from torch import nn

    from .callbacks import Callback

_REQUIRED: Any = None
"""The default of a field that has none: a loss may be left out, and fields without a default cannot come after it."""
_REFERENCE = re.compile(r"(?P<path>.+?\.py)(?::(?P<name>[A-Za-z_]\w*))?(?:@(?P<digest>[0-9a-f]{8,64}))?\Z")


_EXAMPLES = {
    "model": "lambda: Net()",
    "loss": "F.cross_entropy",
    "optimizer": "lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)",
    "data": "lambda: dataset",
}
"""Example of each field that must be a function."""


@dataclass(frozen=True, eq=False)
class Job:
    """A model, its loss, its optimizer and its data."""

    model: Callable[[], nn.Module]
    """Makes the model. Called after the seed was set, and whenever a fresh model is needed."""
    loss: Callable[..., Any] = None  # type: ignore[assignment]  # replaced below: it is never None afterwards
    """(output, target) -> the mean over the given samples, or (sum, weight). None: the model returns its loss."""
    optimizer: Callable[[Any], torch.optim.Optimizer] = _REQUIRED
    """(parameters) -> the optimizer; `(named_parameters)` gets pairs (name, parameter) instead."""
    data: Callable[[], Any] = _REQUIRED
    """Makes a map-style dataset, an `IterableDataset` or a `DataLoader` of (input, target), or of mappings."""
    batch_size: int = _REQUIRED
    """Samples per optimizer step, over all ranks."""
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None
    """(optimizer) -> a learning-rate scheduler; it advances once per applied step."""
    clip: float | None = None
    """Largest global norm of the gradients."""
    seed: int = 0
    """Seed of the weights, the data order and dropout."""
    steps: int = 100
    """Default number of optimizer steps of `train`."""
    collate: Callable[[list[Any]], Any] | None = None
    """Samples -> (input, target); torch's default_collate by default."""
    evaluate: Callable[[Any, Any], Mapping[str, Any]] | None = None
    """(output, target) -> metrics by name, each a mean over the given samples, or (sum, weight)."""
    validation: Callable[[], Any] | None = None
    """Makes the dataset of `engine.evaluate()`; the training data by default."""
    sample_weight: Callable[[Any, Any], Any] | None = None
    """(input, target) -> the weight of the mean, if that is not the number of samples."""
    workers: int = 0
    """Processes per rank that load the next batches; 0 loads them between the steps. The batches are the same."""
    evaluate_every: int = 0
    """Steps of `train` between evaluations; 0 evaluates at the end only."""
    monitor: str = "loss"
    """The metric of an evaluation that `ReduceLROnPlateau` waits for."""
    callbacks: Callable[[], Sequence[Callback]] | None = None
    """Makes the callbacks of `train`: after each step, after each evaluation; they may stop it."""
    ema: float | None = None
    """Decay of the averaged weights (0.999: about the last 1000 steps): evaluated, saved and exported."""
    source: str = ""
    """Source: `path.py:name`."""
    digest: str = ""
    """SHA-256 of that file."""

    def __post_init__(self) -> None:
        if self.loss is None:
            object.__setattr__(self, "loss", loss_of_output)
        for key in ("model", "optimizer", "schedule", "data", "validation", "callbacks"):
            refuse_object(key, getattr(self, key))
        for key in ("model", "loss", "optimizer", "data"):
            if not callable(getattr(self, key)):
                raise JobError(
                    f"Job.{key} is {getattr(self, key)!r}",
                    rule=f"{key} is a function (docs/jobs.md)",
                    fix=f"{key}={_EXAMPLES[key]}",
                )
        for key, least in (("batch_size", 1), ("steps", 1), ("workers", 0), ("evaluate_every", 0)):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise JobError(f"Job.{key} is {value!r}", rule=f"{key} is a whole number of at least {least}")
        for key in ("schedule", "collate", "evaluate", "validation", "sample_weight", "callbacks"):
            if getattr(self, key) is not None and not callable(getattr(self, key)):
                raise JobError(f"Job.{key} is {getattr(self, key)!r}", rule=f"{key} is a function, or None")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise JobError(f"Job.seed is {self.seed!r}", rule="seed is a whole number")
        if self.clip is not None and not (isinstance(self.clip, int | float) and self.clip > 0):
            raise JobError(f"Job.clip is {self.clip!r}", rule="clip > 0, or None")

        if self.ema is not None and not (isinstance(self.ema, float) and 0.0 < self.ema < 1.0):
            raise JobError(f"Job.ema is {self.ema!r}", rule="0 < ema < 1, the decay of the averaged weights, or None")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Job):
            return NotImplemented
        if self.source and other.source:
            return (self.source, self.digest) == (other.source, other.digest)
        return self is other

    def __hash__(self) -> int:
        return hash((self.source, self.digest)) if self.source else id(self)

    @property
    def model_returns_loss(self) -> bool:
        """Whether the model returns its loss: the job has none."""
        return self.loss is loss_of_output

    def optimizer_on(self, named: Iterable[tuple[str, Any]]) -> torch.optim.Optimizer:
        """The optimizer on parameters that are given with their names, which it gets if it asks for them."""
        pairs = list(named)
        return self.optimizer(pairs if takes_names(self.optimizer) else [p for _, p in pairs])

    @property
    def reference(self) -> str:
        """The file form: `path.py:name@digest`."""
        if not self.source:
            raise JobError("this job was made in memory", rule="only a job that was loaded from a file has a file form")
        return f"{self.source}@{self.digest}"

    @property
    def name(self) -> str:
        """A short name: the file without its ending."""
        return Path(self.source.rpartition(":")[0]).stem if self.source else "job"

    @classmethod
    def load(cls, reference: str) -> Job:
        """Run the file of `path.py`, `path.py:name` or `path.py:name@digest` and return its job."""
        match = _REFERENCE.match(reference)
        if not match:
            raise JobError(f"{reference!r} names no job", rule="a job is path.py, path.py:name or path.py:name@digest")
        path, name = Path(match["path"]), match["name"] or "job"
        made, digest = load_object(path, name, match["digest"] or "")
        if not isinstance(made, Job) and (not callable(made) or is_module(made)):
            raise JobError(
                f"{path}: {name} is of type {type(made).__name__}, not a Job",
                rule="it is a dl.Job, or a function that returns one",
                fix="def job(): return dl.Job(model=..., loss=..., optimizer=..., data=..., batch_size=...)",
            )
        job = made if isinstance(made, Job) else call_user_code(made, f"{path}: {name}()")
        if not isinstance(job, Job):
            raise JobError(f"{path}: {name}() gave {type(job).__name__}", rule="it returns a drumline.Job")
        return replace(job, source=f"{path}:{name}", digest=digest)

    def __str__(self) -> str:
        return f"job {self.source or 'in memory'}: batches of {self.batch_size}, {self.steps} steps, seed {self.seed}"


def load_object(path: Path, name: str, expected: str = "") -> tuple[Any, str]:
    """Run a Python file; the object of that name in it, and the digest of the file, which begins as `expected`."""
    text = files.read_text(path, JobError)
    digest = sha256(path, JobError)
    if expected and not digest.startswith(expected):
        raise JobError(
            f"{path} has changed",
            rule=f"its digest is {digest[:16]}, not {expected[:16]}",
            fix="run it with the file as it was, or without the digest",
        )
    module = _run_file(path, text, digest)
    if not hasattr(module, name):
        names = [k for k, v in vars(module).items() if isinstance(v, Job) or callable(v)]
        raise JobError(f"{path} has no {name!r}", where=str(path), fix=nearest(name, names))
    return getattr(module, name), digest


def call_user_code(function: Callable[..., Any], where: str, *arguments: Any) -> Any:
    """Call a function of the user; exceptions become a JobError that names the line, without a traceback."""
    try:
        return function(*arguments)
    except (JobError, CorruptFile):
        raise
    except Exception as e:
        raise JobError(f"{where} raised {_describe(e)}", where=user_line(e), fix=_known_field(e)) from e


def _run_file(path: Path, text: str, digest: str) -> Any:
    """Run the text as a module of its own, with its folder on the path, as `python path.py` would.

    Python's import is not used: its cache identifies files by size and second, and could run another text.
    """
    location = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()
    name = f"drumline_job_{path.stem}_{location[:8]}_{digest[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    sys.modules[name] = module
    try:
        exec(compile(text, str(path), "exec", dont_inherit=True), vars(module))  # noqa: S102  # the user's own file
    except JobError:
        del sys.modules[name]
        raise
    except (Exception, SystemExit) as e:
        del sys.modules[name]
        raise JobError(f"{path} raised {_describe(e)}", where=user_line(e)) from e
    return module


def _known_field(e: Exception) -> str:
    """The field that is meant, where a job was given one that it does not have."""
    unknown = re.search(r"Job\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(e))
    if not unknown:
        return ""
    names = [f.name for f in fields(Job)]
    return nearest(unknown[1], names) or f"fields of a Job: {', '.join(names)}"


def _describe(e: BaseException) -> str:
    text = str(e).strip().splitlines()
    return f"{type(e).__name__}: {text[0]}" if text else type(e).__name__


def user_line(e: BaseException) -> str:
    """The innermost line of the user's own code that the error passed through."""
    frames = traceback.extract_tb(e.__traceback__)
    if isinstance(e, SyntaxError):
        return f"{e.filename}, line {e.lineno}"
    package = str(Path(__file__).parents[1])
    own = [f for f in frames if "site-packages" not in f.filename and not f.filename.startswith(package)]
    return f"{own[-1].filename}, line {own[-1].lineno}: {own[-1].line}" if own else ""
