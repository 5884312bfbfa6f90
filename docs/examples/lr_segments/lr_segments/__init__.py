"""A learning rate test in segments during a run, after the range test (Smith 2017, arXiv 1506.01186)."""

import copy
from typing import Any, ClassVar

import torch

import lockstep
from lockstep.core.fields import ranged


@lockstep.option("callback", "lr_segments")
class LRSegments(lockstep.Callback):
    """At the start of some epochs, each factor of the rate trains a segment from one state; the best one remains."""

    every_rank = True
    figures: ClassVar[tuple[str, ...]] = ("lr_segments/factor",)

    epochs: list[int] = ranged([1], least=0, most=1_000_000)  # those that begin with a test, counted from 0
    factors: list[float] = ranged([0.1, 0.3, 1.0, 3.0], above=0, most=1000)
    steps: int = ranged(10, least=1, most=10_000)  # of a segment; its updates are undone

    def run_start(self, run: lockstep.TrainingRun) -> None:
        self.factor, self.start, self.losses = 1.0, dict[str, Any](), list[float]()

    def epoch_start(self, run: lockstep.TrainingRun) -> None:
        if run.epoch in self.epochs and self.factors and not self.start:
            state = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
            self.start, self.losses = copy.deepcopy(state), []

    def after_backward(self, run: lockstep.TrainingRun) -> None:
        factor = self.factors[len(self.losses) // self.steps] if self.start else self.factor
        for group in run.optimizer.param_groups:
            group["lr"] *= factor

    def step_end(self, run: lockstep.TrainingRun) -> None:
        if not self.start:
            return
        examples = torch.tensor(sum(map(len, run.outputs)), device=run.loss.device)
        total, number = run.world.sum(torch.stack([run.loss.double() * examples, examples]))
        self.losses.append(float(total / number))
        if len(self.losses) % self.steps == 0:  # a segment ends
            run.model.load_state_dict(self.start["model"])
            run.optimizer.load_state_dict(self.start["optimizer"])
        if len(self.losses) == self.steps * len(self.factors):
            scores = torch.tensor(self.losses).view(-1, self.steps).mean(1)
            self.factor, self.start = self.factors[int(scores.argmin())], {}
            run.log("lr_segments/factor", self.factor)

    def state_dict(self) -> dict[str, Any]:
        return {"factor": self.factor, "start": self.start, "losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.factor, self.start, self.losses = state["factor"], state["start"], state["losses"]
