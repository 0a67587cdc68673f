"""DeepSpeed, stages 0 to 3, in its defaults, in fp32, with torch's AdamW as the client's optimizer.

Its own CPU Adam is not used: the update is the same for all. It compiles a library for shared memory when it is first
imported on CPUs, which only its inference uses.
"""

from __future__ import annotations

import io
import logging
from contextlib import redirect_stdout

from drumline.comm.environment import rank_zero_first

from .work import CLIP, Step, Work, loss_of, mean_over_ranks


def make(work: Work) -> Step:
    import deepspeed
    from deepspeed.comm.torch import build_shm_op

    with rank_zero_first(), redirect_stdout(io.StringIO()):  # two ranks that compile at once wait for each other's lock
        build_shm_op()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    model = work.model()
    config = {
        "train_micro_batch_size_per_gpu": work.samples,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": work.stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    optimizer = work.job.optimizer(model.parameters())
    with redirect_stdout(io.StringIO()):
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)

    def step(number: int) -> float:
        x, y = work.pair(number)
        loss = loss_of(engine(x), y)
        engine.backward(loss)
        mean = mean_over_ranks(loss)
        engine.step()
        return mean

    return step
