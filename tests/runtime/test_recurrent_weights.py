"""Recurrent layers on a GPU would move their weights to contiguous memory; strategies that own the memory prevent it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import parity
import pytest
import small_jobs
import torch
from torch import nn
from world import World

from drumline.plans import Plan
from drumline.torchkit.recurrent import silence_rnn_contiguity_warning

Worlds = Callable[[int], World]


def _move(layer: nn.RNNBase) -> None:
    """Imitate cuDNN's layers on any device: the weights are moved to other memory."""
    for weight in layer._flat_weights:
        if isinstance(weight, torch.Tensor) and not weight.is_meta:
            weight.data = weight.data.clone()


class Asking(small_jobs.Recurrent):
    """A model that asks for it in every forward, as many do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.body.lstm.flatten_parameters()
        return super().forward(x)


def _verify(plan: str, model: type[nn.Module]) -> Any:
    with mock.patch.object(nn.RNNBase, "flatten_parameters", _move), warnings.catch_warnings():
        silence_rnn_contiguity_warning()  # on a GPU, where they do
        return parity.run_verify("lstm", plan, 3, {"model": model})


@pytest.mark.parametrize("model", [small_jobs.Recurrent, Asking])
@pytest.mark.parametrize("plan", ["dp=1,zero=3", "dp=2,zero=1", "dp=2,zero=2,micro=2", "dp=2,zero=3", "dp=2"])
def test_recurrent_layers_use_updated_weights(world: Worlds, plan: str, model: type[nn.Module]) -> None:
    parity.check(world(Plan.parse(plan).ranks).run(_verify, plan, model)[0])
