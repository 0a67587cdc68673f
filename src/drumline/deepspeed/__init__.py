"""`import drumline.deepspeed as deepspeed`: a DeepSpeed script runs on Drumline's engine with that one changed line.

Other imports of such a script (`from deepspeed.accelerator import get_accelerator`) find the modules of this package,
unless the real DeepSpeed has been imported first. docs/from-deepspeed.md lists what is supported; what is not, raises
with the way out.
"""

from __future__ import annotations

import sys
from typing import Any

from .. import __version__ as __version__
from ..runtime.deepspeed.arguments import Config, DeepSpeedArguments
from ..runtime.deepspeed.arguments import add_config_arguments as add_config_arguments
from ..runtime.deepspeed.arguments import init_distributed as init_distributed
from ..runtime.deepspeed.engine import DeepSpeedEngine as DeepSpeedEngine
from ..runtime.deepspeed.initialize import DeepSpeedResult
from ..runtime.deepspeed.initialize import initialize as _initialize
from . import accelerator as accelerator
from . import checkpointing as checkpointing
from . import comm as comm
from . import moe as moe
from . import ops as ops
from . import pipe as pipe
from . import utils as utils
from . import zero as zero

REFUSED = {
    "init_inference": "Drumline trains; `drumline export` writes the weights for any other tool",
    "tp_model_init": "tensor parallelism works on a captured graph: write a Job, and tp=n in its plan",
    "PipelineModule": "a pipeline is cut from an ordinary model: write a Job, and pp=n in its plan (docs/pipelines.md)",
    "OnDevice": "build the model as usual; stage 3 shards it in place",
}
"""Names of DeepSpeed's that are refused, each with what to do instead."""


def initialize(
    args: Any = None,
    model: Any = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Config | None = None,
    mesh_param: Any = None,
    config_params: Config | None = None,
    **more: Any,
) -> DeepSpeedResult:
    """Return (engine, optimizer, loader, scheduler): DeepSpeed's `initialize`, with its order of arguments.

    `more` are those of `drumline.initialize`: loss, steps, seed, workers, plan.
    """
    theirs: DeepSpeedArguments = {
        "args": args,
        "model_parameters": model_parameters,
        "training_data": training_data,
        "lr_scheduler": lr_scheduler,
        "collate_fn": collate_fn,
        "mpu": mpu,
        "mesh_param": mesh_param,
        "config_params": config_params,
    }
    return _initialize(model=model, optimizer=optimizer, config=config, **theirs, **more)


def __getattr__(name: str) -> Any:
    if name in REFUSED:
        raise AttributeError(f"drumline.deepspeed has no {name}: {REFUSED[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _stand_in() -> None:
    """Let `from deepspeed.x import y` find this package, unless the real one is loaded."""
    if "deepspeed" in sys.modules:
        return
    for name, module in list(sys.modules.items()):
        if name == __name__ or name.startswith(f"{__name__}."):
            sys.modules[f"deepspeed{name.removeprefix(__name__)}"] = module


_stand_in()
