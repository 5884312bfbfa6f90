"""What one rank has counted since the last log point, and its form in a checkpoint."""

from typing import NotRequired, TypedDict

import torch
from torch import Tensor


class TallyState(TypedDict):
    """A tally in a checkpoint. For each micro-batch: its summed loss, its step and its number of examples."""

    losses: list[float]
    steps: list[int]
    examples: list[int]
    hits: int
    broken: NotRequired[int]  # older checkpoints lack it


class EpochState(TypedDict):
    """An epoch up to the last log point, over all ranks: its number from 0, summed loss, hits and examples."""

    number: int
    loss: float
    hits: int
    examples: int


class WindowState(TypedDict):
    """The step of the last log point (`flushed`), the tallies of all ranks since then (`trails`), and the epoch."""

    flushed: int
    trails: list[TallyState]
    epoch: EpochState


class Tally:
    """The micro-batches of one epoch that a rank has counted since the last log point.

    The losses (float64) stay on the device until the next log point and are summed only there, in a fixed order: a
    resume in the window then gives the same bits.
    """

    def __init__(self, epoch: int, device: torch.device) -> None:
        self.epoch = epoch
        self.steps: list[int] = []
        self.counts: list[int] = []  # of examples, also broken ones
        self.losses = torch.zeros(0, dtype=torch.float64, device=device)
        self.hits, self.broken = torch.zeros((2,), dtype=torch.int64, device=device)

    def restore(self, state: TallyState) -> None:
        """Take what an earlier process has counted."""
        self.steps, self.counts = state["steps"][:], state["examples"][:]
        self.losses = self.losses.new_tensor(state["losses"])
        self.hits += state["hits"]
        self.broken += state.get("broken", 0)

    def state(self) -> TallyState:
        """The tally for a checkpoint. Waits for the device."""
        return {
            "losses": self.losses.tolist(),
            "steps": self.steps[:],
            "examples": self.counts[:],
            "hits": int(self.hits),
            "broken": int(self.broken),
        }

    def sums(self) -> Tensor:
        """The summed loss, the hits and the examples that are not broken, float64 (3,)."""
        # `torch.tensor` would wait for the device.
        examples = torch.full((), sum(self.counts), dtype=torch.float64, device=self.hits.device)
        return torch.stack([self.losses.sum(), self.hits.double(), examples - self.broken])

    def bad_steps(self, limit: float) -> list[int]:
        """The steps whose loss is not finite or above `limit`. Waits for the device."""
        micro_batches = zip(self.steps, self.losses.tolist(), self.counts, strict=True)
        return [step for step, loss, examples in micro_batches if examples and not loss / examples <= limit]
