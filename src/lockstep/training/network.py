"""The state of a run: the model with everything that holds its parameters, and how far the run has come."""

from dataclasses import dataclass, field

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lockstep.stochastic import ForwardDraws
from lockstep.telemetry.window import WindowState
from lockstep.training.freezing import Freezing


@dataclass(frozen=True, kw_only=True)
class Network:
    """The network of one rank.

    Fields:
        model: the raw module, which is evaluated and saved.
        replica: the wrapped module, which is called in training.
        infinite: the names of its buffers that are infinite by design.
        draws: the random numbers of its forward passes, whose keys are inputs of the replica.
        freezing: the layers that are frozen, and in which steps.
        scaler: the scaler of the loss; disabled if the number format needs none.
        ema: the average of the weights, if the job keeps one.
        notes: sentences about random layers whose numbers depend on the ranks.
        flops: floating-point operations of one example's forward and backward pass; 0 if no peak is known.
        peak: operations per second of all devices of the job; 0 if it is not known.
    """

    model: nn.Module
    replica: nn.Module
    infinite: frozenset[str] = frozenset()
    draws: ForwardDraws
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    freezing: Freezing = field(default_factory=Freezing)
    ema: AveragedModel | None = None
    notes: list[str] = field(default_factory=list)
    flops: float = 0.0
    peak: float = 0.0

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())


@dataclass
class Progress:
    """How far a run has come.

    Fields:
        score: top-1 in percent of the evaluation after that step; None if there was no evaluation.
        best, best_step: the best score so far, and its step.
        window: the counts since the last log point, of the step that was saved last.
    """

    step: int = 0
    score: float | None = None
    best: float | None = None
    best_step: int = 0
    window: WindowState | None = None

    @property
    def after(self) -> float:
        """`RunInfo.after`, which is behind the figures of this progress."""
        return self.step if self.score is None else self.step + 0.5
