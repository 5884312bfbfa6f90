"""The exponential moving average of a model."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel


class Average(AveragedModel):
    """An exponential moving average of a model's parameters and buffers.

    Of torch's own it changes the update alone: one kernel over all floats and one over all counters. Torch's gathers
    their lists anew at each step and copies its counter to the device, which waits for the device.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__(model, use_buffers=True)
        self.decay = decay
        here, there = ([*each.parameters(), *each.buffers()] for each in (self.module, model))
        pairs = [(mine.detach(), theirs.detach()) for mine, theirs in zip(here, there, strict=True)]
        self.floats = [pair for pair in pairs if pair[0].is_floating_point()]
        self.counters = [pair for pair in pairs if not pair[0].is_floating_point()]

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        weight = 1 - self.decay if self.n_averaged > 0 else 1.0
        torch._foreach_lerp_([mine for mine, _ in self.floats], [theirs for _, theirs in self.floats], weight)
        if self.counters:  # torch takes no empty list
            torch._foreach_copy_([mine for mine, _ in self.counters], [theirs for _, theirs in self.counters])
        self.n_averaged += 1


def make_ema(model: nn.Module, decay: float) -> AveragedModel:
    """An exponential moving average of the model's parameters and buffers, which begins as they are after a step."""
    return Average(model, decay)
