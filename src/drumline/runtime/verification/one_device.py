"""Runs the reference of a plan on one device and records what is compared; updates are delayed if the plan's are."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

import torch

from ...plans import Plan
from ...schedules import update_delay
from ..engine import Engine
from ..parallel.model_parallel import ModelParallel
from .activations import ActivationRecorder
from .delayed_reference import run_delayed_reference
from .modes import Float64Mode, NoRandomness, without_randomness
from .reference import run_reference
from .tolerances import VerificationRun


def reference_text(plan: Plan) -> str:
    """A description of the reference."""
    text = f"one device, the same {plan.micro} micro-batch{'es' if plan.micro > 1 else ''} of each batch"
    if not plan.keeps_batches_in_flight:
        return text
    delays = ", ".join(str(update_delay(plan.schedule, plan.pp, s)) for s in range(plan.pp))
    return f"{text}, each gradient computed on weights that are older by {delays} updates in stages 0 to {plan.pp - 1}"


def replaces_draws(engine: Engine) -> bool:
    """Whether random draws in a step are replaced: PowerSGD starts from random numbers, and would send zeros then."""
    return engine.plan.compress != "powersgd"


def _delays(engine: Engine) -> dict[str, int]:
    """Parameter -> the delay of its stage's updates; empty if batches are not in flight."""
    plan, strategy = engine.plan, engine.strategy
    if not plan.keeps_batches_in_flight or not isinstance(strategy, ModelParallel):
        return {}
    stages_of = strategy.placement.stages_of
    return {name: update_delay(plan.schedule, plan.pp, stages_of[name][0]) for name in engine.parameter_specs}


def run_one_device(engine: Engine, steps: int, *, exact: bool = False) -> VerificationRun:
    """Train the reference of an engine's plan, in the engine's compute dtype; `exact`: in float64."""
    exact = exact or engine.dtype is torch.float64
    recorder = ActivationRecorder()
    randomness: list[NoRandomness] = []
    contexts = ExitStack()

    def prepare(model: torch.nn.Module) -> None:
        mode = contexts.enter_context(without_randomness(model, draws=replaces_draws(engine)))
        if exact:
            contexts.enter_context(Float64Mode(mode))
        mode.in_step = True
        randomness.append(mode)
        recorder.watch_model(model)

    def before_micro(step: int, i: int) -> None:
        recorder.micro(i) if step == 0 else recorder.stop()

    def before_update(step: int, model: torch.nn.Module) -> None:
        for k, p in model.named_parameters():
            if p.grad is not None:
                g = p.grad.detach().abs().cpu()
                recorder.largest[k] = torch.maximum(g, recorder.largest.get(k, g))
        if step in (0, steps - 1):
            recorder.gradients.append(
                {k: p.grad.detach().cpu().clone() for k, p in model.named_parameters() if p.grad is not None}
            )

    scale = engine.scaler.scale / engine.job.batch_size if engine.scaler and not exact else 1.0
    delay = _delays(engine)
    with contexts:
        losses, model = (partial(run_delayed_reference, delay=delay) if delay else partial(run_reference, scale=scale))(
            engine.job,
            micro=engine.plan.micro,
            steps=steps,
            device=engine.device,
            dtype=torch.float64 if exact else engine.dtype,
            precision="fp32" if exact else engine.plan.precision,
            prepare=prepare,
            reading=lambda: randomness[0].outside_step(),
            before_micro=before_micro,
            before_update=before_update,
        )
    return VerificationRun(losses, {k: p.detach() for k, p in model.named_parameters()}, recorder)
