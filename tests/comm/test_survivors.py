"""When one rank fails, the others raise a clean error, and the launcher names the rank that failed first (F1, F5)."""

from __future__ import annotations

import socket
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import survivor_functions
import torch
import torch.distributed as dist
from torch._utils import ExceptionWrapper

from drumline.comm.process_group.torch_interface import GroupWork
from drumline.comm.signed_store import AlteredStore
from drumline.core.errors import DrumlineError, GaveUp, InputError, RankFailed, StoppedByGuard
from drumline.core.job import call_user_code
from drumline.launchers import spawn
from drumline.launchers.failures import RankEnd, is_follow_up, root_cause

PLANS = {
    2: ("dp=2", "dp=2,zero=1", "dp=2,zero=3", "pp=2,micro=2", "tp=2"),
    3: ("dp=3", "dp=3,zero=1", "dp=3,zero=3", "pp=3,micro=3", "tp=3"),
}


def first_failure(plan: str, how: str, where: str, bad: int, ranks: int) -> RankFailed:
    """The error of a run in which one rank fails."""
    with pytest.raises(DrumlineError) as caught:
        spawn(survivor_functions.train, plan, how, where, bad, ranks=ranks)
    assert isinstance(caught.value, RankFailed), caught.value
    return caught.value


def check_named(error: RankFailed, how: str, bad: int) -> None:
    assert error.rank == bad, str(error)
    if how == "kill":
        assert f"rank {bad} was ended by signal SIGKILL" in error.what
    else:
        assert f"rank {bad} failed: ValueError: a mistake on rank {bad}" in error.what
        assert "survivor_functions.py" in error.trace and "in fail" in error.trace


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("how", ["kill", "raise"])
def test_the_rank_that_failed_is_named(how: str, backend: str) -> None:
    check_named(first_failure(f"dp=2,backend={backend}", how, "backward", 1, 2), how, 1)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("how", ["kill", "raise"])
@pytest.mark.parametrize(("ranks", "plan"), [(n, plan) for n, plans in PLANS.items() for plan in plans])
def test_the_rank_that_failed_is_named_under_every_plan(ranks: int, plan: str, how: str, backend: str) -> None:
    for where in ("forward", "backward"):
        for bad in range(ranks):
            check_named(first_failure(f"{plan},backend={backend}", how, where, bad, ranks), how, bad)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_survivor_raises_out_of_backward(tmp_path: Path, backend: str) -> None:
    note = tmp_path / "note"
    with pytest.raises(RankFailed, match="rank 1 failed: ValueError: a mistake on rank 1"):
        spawn(survivor_functions.survive_in_backward, backend, str(note), ranks=2)
    assert note.read_text().startswith("RuntimeError: ")
    assert is_follow_up(RuntimeError(note.read_text()))


def test_the_error_of_a_work_is_raised_by_its_future() -> None:
    for ended_before in (True, False):
        work = GroupWork([])
        future = None if ended_before else work.get_future()
        work.finish(ValueError("a mistake"))
        with pytest.raises(RuntimeError, match="ValueError: a mistake"):
            (future or work.get_future()).wait()
    done = GroupWork([])
    future = done.get_future()
    done.finish()
    assert future.wait() == [] and done.get_future() is future


def test_a_rank_that_waited_is_never_the_cause() -> None:
    """Also if its error is seen first: a pipeline notices the silence of a rank before that rank has unwound."""
    for text in (
        "rank 0 of the pipeline did not receive the gradient of micro-batch 1",
        "deadlock: rank 0 waits for messages that cannot arrive",
        "rank 0 lost rank 1",
        "[../pair.cc:534] Connection closed by peer [127.0.0.1]:1",
        "rank 0 waits for rank 1, which has died",
    ):
        waited = RankEnd(0, 1.0, DrumlineError(text), is_follow_up(RuntimeError(text)))
        failed = RankEnd(1, 1.3, DrumlineError("ValueError"), is_follow_up(ValueError("ValueError")))
        assert root_cause([waited, failed]) is failed.error, text


def caught(raising: Any, *arguments: Any) -> BaseException:
    """What a function raises, with its traceback."""
    try:
        raising(*arguments)
    except Exception as e:
        return e
    raise AssertionError("nothing was raised")


def fail(error: BaseException) -> None:
    """The user's code."""
    raise error


@pytest.mark.parametrize("word", ["the socket of the printer", "the job timed out", "waited for the licence"])
@pytest.mark.parametrize("kind", [RuntimeError, OSError, ValueError])
def test_the_users_own_error_is_a_cause_whatever_it_says(word: str, kind: type[Exception]) -> None:
    own = caught(fail, kind(word))
    assert not is_follow_up(own)
    assert not is_follow_up(caught(call_user_code, fail, "the loss", kind(word))), "in our error that names the line"
    cause = RankEnd(1, 1.3, DrumlineError(word), is_follow_up(own))
    waited = RankEnd(0, 1.0, DrumlineError("lost"), is_follow_up(RuntimeError("rank 0 lost rank 1")))
    assert root_cause([waited, cause]) is cause.error


def test_errors_of_libraries_that_the_user_calls_are_causes() -> None:
    """A download fails in the standard library; a worker of a DataLoader reports such an error through torch."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = server.getsockname()[1]
    refused = caught(urllib.request.urlopen, f"http://127.0.0.1:{closed}/")
    assert "Connection refused" in str(refused) and not is_follow_up(refused)
    worker = ExceptionWrapper((type(refused), refused, refused.__traceback__), where="in DataLoader worker process 0")
    reported = caught(worker.reraise)
    assert "Connection refused" in str(reported) and not is_follow_up(reported)


def test_errors_out_of_the_backward_and_of_our_groups_are_consequences() -> None:
    class Gone(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("Connection closed by peer")

    own = caught(Gone.apply(torch.ones(1, requires_grad=True)).backward)
    assert not is_follow_up(own), "raised by the user's function, inside of the backward"
    future: torch.futures.Future[None] = torch.futures.Future()
    future.set_exception(RuntimeError("rank 0 waits for rank 1, which has died"))
    assert is_follow_up(caught(future.wait))
    work = GroupWork([])
    work.finish(GaveUp("rank 0 lost rank 1"))
    assert is_follow_up(caught(work.wait))
    assert is_follow_up(caught(fail, dist.DistNetworkError("no words that are known")))


GLOO = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"


def wait_for_gloo() -> None:
    """The user's code calls C++ that raises gloo's error, with no library in Python in between."""
    signal: torch.futures.Future[None] = torch.futures.Future()
    signal.set_exception(RuntimeError(GLOO))
    torch._C.Future.wait(signal)


def wrap_with_cause() -> None:
    """The user's code names its step when the sum over the ranks fails."""
    try:
        wait_for_gloo()
    except RuntimeError as e:
        raise ValueError("step 3 failed") from e


def fail_in_handler() -> None:
    """The user's code has a mistake where it handles the loss of a peer."""
    try:
        wait_for_gloo()
    except RuntimeError:
        print(undefined_name)  # type: ignore[name-defined]  # noqa: F821


def hide() -> None:
    """The user's code decides that the loss of a peer has nothing to do with its own error."""
    try:
        wait_for_gloo()
    except RuntimeError:
        raise ValueError("the socket is wet") from None


def test_an_error_of_gloo_is_told_from_one_that_quotes_it() -> None:
    assert is_follow_up(caught(wait_for_gloo)), "the user waits for a work of gloo itself"
    assert not is_follow_up(caught(fail, RuntimeError(GLOO))), "raised by the user's own line"
    assert not is_follow_up(caught(fail, RuntimeError("NCCL communicator was aborted, says my log")))
    assert not is_follow_up(caught(int, "[a/gloo/b.cc:1] timed out"))


def test_what_is_raised_because_of_a_lost_peer_is_a_consequence() -> None:
    assert is_follow_up(caught(wrap_with_cause))
    assert is_follow_up(caught(fail_in_handler))
    assert not is_follow_up(caught(hide))
    assert is_follow_up(caught(call_user_code, wait_for_gloo, "the loss")), "in our error that names the line"


def test_our_own_errors_go_by_their_type_and_place() -> None:
    """Not by words: the wording of our messages may change, and the guards and the store have causes of their own."""
    code = compile("raise error", "comm.py", "exec")

    def raised_in(module: str, error: BaseException) -> BaseException:
        return caught(exec, code, {"__name__": module, "error": error})

    silent = GaveUp("no word that is in any list")
    assert is_follow_up(raised_in("drumline.comm.shm.core", silent))
    assert is_follow_up(raised_in("drumline.runtime.pipeline.channels", GaveUp("silent")))
    assert not is_follow_up(raised_in("drumline.runtime.numerics.loss_scale", GaveUp("the scale waited for a socket")))
    assert not is_follow_up(raised_in("drumline.comm.shm.core", StoppedByGuard("lost rank")))
    assert not is_follow_up(raised_in("drumline.comm.signed_store", AlteredStore("the socket")))
    assert not is_follow_up(raised_in("drumline.comm.shm.core", InputError("rank 0 has died, says its name")))
    assert not is_follow_up(raised_in("drumline.commerce", GaveUp("lost rank")))
