"""The learning rate range test (Smith 2017, arXiv 1506.01186): the rate grows until the loss explodes."""

from typing import Any, ClassVar

import torch

import lockstep
from lockstep.core.fields import ranged


@lockstep.option("callback", "lr_finder")
class LRFinder(lockstep.Callback):
    """Trains with a rate that grows exponentially over the run, and stops it when the loss explodes."""

    every_rank = True
    figures: ClassVar[tuple[str, ...]] = ("-lr_finder/loss", "lr_finder/rate")

    low: float = ranged(1e-6, above=0, most=1)  # rate of the first step
    high: float = ranged(10.0, above=0, most=1000)  # rate of the last step
    smoothing: float = ranged(0.9, least=0, below=1)  # share of the earlier losses in the average
    exploded: float = ranged(4.0, above=1, most=1000)  # the run ends at an average of so many times the lowest one

    def run_start(self, run: lockstep.TrainingRun) -> None:
        self.total, self.lowest, self.best = 0.0, float("inf"), self.low

    def after_backward(self, run: lockstep.TrainingRun) -> None:
        self.rate = self.low * (self.high / self.low) ** ((run.step - 1) / max(1, run.plan.total_steps - 1))
        for group in run.optimizer.param_groups:
            group["lr"] = self.rate * group["scale"]

    def step_end(self, run: lockstep.TrainingRun) -> None:
        examples = sum(len(outputs) for outputs in run.outputs)
        sums = run.world.sum(
            torch.stack([run.loss.double() * examples, torch.tensor(examples, device=run.loss.device)])
        )
        self.total = self.smoothing * self.total + (1 - self.smoothing) * float(sums[0] / sums[1])
        average = self.total / (1 - self.smoothing**run.step)
        if average < self.lowest:
            self.lowest, self.best = average, self.rate
        run.log("lr_finder/loss", average)
        run.log("lr_finder/rate", self.rate)
        if not average < self.exploded * self.lowest:  # also of NaN
            run.stop(f"the loss explodes at {self.rate:.2g}; use a rate near optimizer.lr={self.best / 10:.2g}")

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "lowest": self.lowest, "best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total, self.lowest, self.best = state["total"], state["lowest"], state["best"]
