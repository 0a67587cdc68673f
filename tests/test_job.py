"""Jobs: invalid jobs are refused, files are loaded by reference, and errors of user code have no traceback."""

from __future__ import annotations

import hashlib
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from drumline import Job
from drumline.core.errors import JobError
from drumline.core.job import call_user_code

FILE = """
import drumline as dl

def job():
    return dl.Job(model=list, loss=max, optimizer=list, data=list, batch_size=4)

small = dl.Job(model=list, loss=max, optimizer=list, data=list, batch_size=1)
"""


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Loading a file adds its folder to the path and its module to the table."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith("drumline_job_") or name == "neighbour":
            del sys.modules[name]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "my.py").write_text(FILE)
    return tmp_path / "my.py"


def make(**changes: Any) -> Job:
    return Job(**{"model": list, "loss": max, "optimizer": list, "data": list, "batch_size": 4, **changes})


def refused(reference: str | Path) -> JobError:
    """The error of loading; it never shows a traceback."""
    with pytest.raises(JobError) as caught:
        Job.load(str(reference))
    assert "Traceback" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": None}, "Job.model is None\n  rule:  model is a function"),
        ({"data": [1]}, r"Job.data is a list, not a function(.|\n)*data=lambda: \[...\]"),
        ({"batch_size": 0}, "Job.batch_size is 0\n  rule:  batch_size is a whole number of at least 1"),
        ({"batch_size": 2.0}, "batch_size is 2.0"),
        ({"batch_size": True}, "batch_size is True"),
        ({"steps": 0}, "Job.steps is 0"),
        ({"clip": 0}, "Job.clip is 0\n  rule:  clip > 0, or None"),
        ({"clip": float("nan")}, "Job.clip is nan"),
        ({"clip": "a"}, "Job.clip is 'a'"),
        ({"seed": 1.5}, "Job.seed is 1.5\n  rule:  seed is a whole number"),
        ({"schedule": 3}, "Job.schedule is 3\n  rule:  schedule is a function, or None"),
        ({"collate": "x"}, "Job.collate is 'x'"),
    ],
)
def test_values(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError, match=words):
        make(**changes)


def test_load(path: Path) -> None:
    job = Job.load(str(path))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert (job.batch_size, job.source, job.digest, job.name) == (4, f"{path}:job", digest, "my")
    assert job.reference == f"{path}:job@{digest}"
    assert str(job) == f"job {path}:job: batches of 4, 100 steps, seed 0"
    assert Job.load(f"{path}:small").batch_size == 1


def test_equality(path: Path) -> None:
    assert Job.load(str(path)) == Job.load(f"{path}:job")
    assert hash(Job.load(str(path))) == hash(Job.load(f"{path}:job"))
    assert Job.load(str(path)) != Job.load(f"{path}:small")
    first = Job.load(str(path))
    path.write_text(FILE.replace("batch_size=4", "batch_size=5"))  # as long as before, and in the same second
    assert Job.load(str(path)) != first
    assert Job.load(str(path)).batch_size == 5
    made = make()
    assert made == made  # a job in memory equals itself alone
    assert made != make()
    assert made != 3


def test_digest(path: Path) -> None:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert Job.load(f"{path}:job@{digest}") == Job.load(f"{path}@{digest[:8]}")
    error = refused(f"{path}:job@{'0' * 16}")
    assert error.what == f"{path} has changed"
    assert error.rule == f"its digest is {digest[:16]}, not {'0' * 16}"


@pytest.mark.parametrize("head", [b"\xef\xbb\xbf", b"\r\n"])
def test_the_digest_is_that_of_the_file(path: Path, head: bytes) -> None:
    path.write_bytes(head + path.read_bytes())
    assert Job.load(str(path)).digest == hashlib.sha256(path.read_bytes()).hexdigest()


def test_same_text_in_another_folder(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "job.py").write_text(
            FILE + "from pathlib import Path\nsmall = dl.Job(model=list, loss=max, "
            "optimizer=list, data=list, batch_size=int((Path(__file__).parent / 'n').read_text()))\n"
        )
    (tmp_path / "a" / "n").write_text("2")
    (tmp_path / "b" / "n").write_text("3")
    assert [Job.load(f"{tmp_path}/{name}/job.py:small").batch_size for name in "ab"] == [2, 3]


def test_neighbours_can_be_imported(path: Path) -> None:
    (path.parent / "neighbour.py").write_text("SIZE = 9\n")
    path.write_text(FILE.replace("def job", "import neighbour\ndef job").replace("size=4", "size=neighbour.SIZE"))
    assert Job.load(str(path)).batch_size == 9


@pytest.mark.parametrize(
    "reference", ["", "job", "my.txt", "my.py:", "my.py:1x", "my.py@xyz", "my.py:a:b", "my.py@abc"]
)
def test_invalid_references(reference: str) -> None:
    assert refused(reference).what == f"{reference!r} names no job"


def test_missing_file(path: Path) -> None:
    assert refused(path.parent / "mi.py").fix == "Did you mean 'my.py'?"
    assert "no file" in refused("/nowhere/at/all.py").what


def test_a_folder(tmp_path: Path) -> None:
    (tmp_path / "x.py").mkdir()
    assert "is a folder" in refused(tmp_path / "x.py").what


def test_missing_name(path: Path) -> None:
    error = refused(f"{path}:smal")
    assert error.what == f"{path} has no 'smal'"
    assert error.fix == "Did you mean 'small'?"


def test_a_file_that_raises(path: Path) -> None:
    path.write_text("def f():\n    return 1 / 0\n\nf()\n")
    error = refused(path)
    assert error.what == f"{path} raised ZeroDivisionError: division by zero"
    assert error.where == f"{path}, line 2: return 1 / 0"
    assert refused(path).what == error.what  # a module that failed is not kept


def test_errors_inside_drumline_name_the_users_line(path: Path) -> None:
    path.write_text("from drumline import Plan\n\nplan = Plan.parse('qq=1')\n")
    assert refused(path).where == f"{path}, line 3: plan = Plan.parse('qq=1')"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import sys\nsys.exit(3)\n", "raised SystemExit: 3"),
        ("import torchh\n", "raised ModuleNotFoundError: No module"),
        ("raise ValueError\n", "raised ValueError"),
        ("assert False\n", "raised AssertionError"),
    ],
)
def test_files_that_raise(path: Path, text: str, words: str) -> None:
    path.write_text(text)
    assert words in refused(path).what


def test_syntax_error(path: Path) -> None:
    path.write_text("x = 1\ndef job(:\n")
    error = refused(path)
    assert error.what.startswith(f"{path} raised SyntaxError: invalid syntax")
    assert error.where == f"{path}, line 2"


def test_not_text(path: Path) -> None:
    path.write_bytes(b"x = '\xff'\n")
    assert refused(path).what == f"{path} is not text"
    path.write_bytes(b"x = 1\0\n")
    assert "raised" in refused(path).what


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def job():\n    return 3\n", r"my.py: job\(\) gave int\n  rule:  it returns a drumline.Job"),
        ("def job():\n    pass\n", r"my.py: job\(\) gave NoneType"),
        ("job = 3\n", "my.py: job is of type int"),
        ("import torch\njob = torch.nn.Linear(2, 2)\n", "my.py: job is of type Linear(.|\n)*function that returns one"),
        ("import drumline as dl\ndef job():\n    return dl.Job(model=list, step=3)\n", "Did you mean 'steps'?"),
        ("import drumline as dl\ndef job():\n    return dl.Job(model=list, lr=3)\n", "fields of a Job: model, loss"),
        (
            "import drumline as dl\ndef job():\n    return dl.Job(model=list, optimizer=list)\n",
            "try:   data=lambda: dataset",
        ),
        ("def job(x):\n    pass\n", r"job\(\) raised TypeError: job\(\) missing 1 required positional argument"),
        (
            "def job():\n    raise KeyError('k')\n",
            r"job\(\) raised KeyError: 'k'\n  where: .*my.py, line 2: raise KeyError",
        ),
        ("import drumline as dl\ndef job():\n    return dl.Job(1, 1, 1, 1, 1)\n", "Job.model is 1"),
    ],
)
def test_not_a_job(path: Path, text: str, words: str) -> None:
    path.write_text(text)
    with pytest.raises(JobError, match=words):
        Job.load(str(path))


def test_a_job_in_memory_has_no_file_form() -> None:
    with pytest.raises(JobError, match="this job was made in memory"):
        _ = make().reference
    assert make().name == "job"
    assert str(make()).startswith("job in memory")


def test_guard() -> None:
    assert call_user_code(max, "m", 1, 2) == 2
    with pytest.raises(JobError, match="m raised ValueError: one\n  where: .*test_job.py, line ") as caught:
        call_user_code(_raises, "m")
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(JobError, match="^as it is$"):
        call_user_code(_raises_ours, "m")
    assert "two" not in caught.value.what
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def _raises() -> None:
    raise ValueError("one\ntwo")


def _raises_ours() -> None:
    raise JobError("as it is")
