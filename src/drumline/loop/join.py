"""`drumline join`: this process as one more worker of a training that runs already."""

from __future__ import annotations

from pathlib import Path

from .callbacks import Notify, log_note


def join(folder: str | Path, *, notify: Notify = log_note) -> dict[str, int]:
    """Compute tasks of the training in a run folder until it ends; the number of gradients that counted, and did not.

    Only trainings with a coordinator take more workers (docs/asynchronous.md).
    """
    import os

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch's C++ warnings are for torch developers
    from ..comm.environment import disconnect
    from ..runtime.asynchronous.run import make_joining_worker
    from ..runtime.asynchronous.worker import work

    worker = make_joining_worker(Path(folder))
    notify(f"joined {folder} as worker {worker.worker}")
    work(worker, lambda event: notify(event["message"]) if "message" in event else None, evaluate=False)
    disconnect()
    return {"counted": worker.counted, "dropped": worker.dropped}
