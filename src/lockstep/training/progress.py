"""The progress of a run: the part of its state that is neither weights nor optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.telemetry import WindowState


@dataclass
class Progress:
    """How far a run has come.

    Fields:
        step: the last finished step.
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
