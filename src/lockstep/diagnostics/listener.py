"""Judges a run at its end: what limited its speed, and what its scores say."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from lockstep.core.model import is_broken
from lockstep.core.model_card import VALUES
from lockstep.core.observer import Observer, RunInfo
from lockstep.core.run import Run
from lockstep.core.tags import EPOCH_TOP1, TRAIN_TOP1, VAL_LOSS
from lockstep.diagnostics.learning import SCORES, FinalScores, learning
from lockstep.diagnostics.verdict import Advice, checklist, verdict
from lockstep.training.evidence import Evidence


class Listener(Observer):
    """Adds the verdict, what the scores say, and the checklist to the summary of a run."""

    def __init__(self, run: RunInfo) -> None:
        self.folder = run.folder

    def findings(self, evidence: Evidence) -> Mapping[str, Any]:
        learnt = self._learning(evidence)
        return {
            "verdict": _facts(verdict(evidence)),
            "learning": None if learnt is None else _facts(learnt),
            "checklist": [asdict(item) for item in checklist(evidence)],
        }

    def _learning(self, evidence: Evidence) -> Advice | None:
        """What the scores of the whole run say, before resumes too; None without the score that is compared."""
        score = evidence.scores.get(SCORES[evidence.job.task.targets])
        if score is None or not math.isfinite(score):
            return None
        labels = evidence.labels[~is_broken(evidence.labels)]
        images = labels.bincount() if labels.ndim == 1 else (labels > 0.5).sum(0)
        run = Run(self.folder)
        trained = run.series(EPOCH_TOP1, TRAIN_TOP1)
        scores = FinalScores(
            score=score,
            total=len(labels),
            images=images.tolist(),
            trained=trained[-1][1] if trained else None,
            losses=run.series(VAL_LOSS),
            magnitude=float(labels.abs().mean()) if evidence.job.task.targets == VALUES else 0.0,
            ended_early=bool(evidence.ended_early),
        )
        return learning(evidence.job, evidence.plan, scores)


def _facts(advice: Advice) -> dict[str, Any]:
    return {**asdict(advice), "sentence": str(advice)}
