"""Judges a run at its end: what limited its speed, and what its scores say."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

from lockstep.core.errors import percent
from lockstep.core.figures import CONFIDENCE
from lockstep.core.model import is_broken
from lockstep.core.model_card import CLASSES, LABELS, VALUES
from lockstep.core.observer import Observer, RunInfo
from lockstep.core.plan import Plan
from lockstep.core.run import Run
from lockstep.core.tags import EPOCH_TOP1, TOP1, TRAIN_TOP1, VAL_LOSS, figure_text
from lockstep.diagnostics.verdict import Advice, checklist, verdict
from lockstep.training.resolved_job import ResolvedJob, describe, train_longer
from lockstep.training.run_record import Evidence

NARROW = 1.0  # percentage points; a narrower interval is not shown
FEW_IMAGES, SMALLEST = 1000, 32  # to train on from random weights; the side that published networks need at least
# The validation loss still falls if the last quarter of the evaluations takes off this share of it. It has risen if
# it ends this many times above its lowest value.
FALLS, RISEN = 0.05, 1.2
STILL_FALLS = "the validation loss still falls"
LEAST_EVALUATIONS = 4  # evaluations that show a trend
LARGE = 30.0  # size of targets that are values: the rate of an optimizer is for outputs of about 1
WILSON = f"{percent(CONFIDENCE)} interval of a share (Wilson 1927)"
SCORES = {CLASSES: TOP1, LABELS: "map", VALUES: "r2"}  # the figure that is compared, by the targets of the task


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


@dataclass(frozen=True, kw_only=True)
class FinalScores:
    """What is known of the scores of a run at its end.

    Fields:
        score: the figure `SCORES` of the best weights; top-1 in percent of the validation images.
        images: how many of the `total` validation images have each class, or each label; values have none of either.
        trained: percent of the training images right in the last epoch, as they were augmented; None if not known.
        losses: the step and the validation loss of each evaluation that was logged.
        magnitude: the mean size of targets that are values; 0 for others.
        ended_early: whether the run ended before its last step.
    """

    score: float
    total: int
    images: Sequence[int]
    trained: float | None
    losses: Sequence[tuple[int, float]]
    magnitude: float = 0.0
    ended_early: bool = False


def learning(job: ResolvedJob, plan: Plan, scores: FinalScores) -> Advice:
    """Compare the score with one that needs no learning, and look where the validation loss goes."""
    compare = {CLASSES: _of_classes, LABELS: _of_labels, VALUES: _of_values}[job.task.targets]
    has_learnt, reached, evidence = compare(scores)
    trend = _trend(scores.losses)
    sentence = "nothing shown yet: " * (not has_learnt) + reached + f"; {trend}" * bool(trend)
    if not has_learnt and scores.magnitude > LARGE:
        size = f"the targets are {scores.magnitude:,.0f} in the mean, without their signs"
        return Advice(sentence=f"{sentence}; {size}: divide them, so that they are about 1", evidence=evidence)
    few = plan.examples < FEW_IMAGES and not job.starts_trained
    weights = _published_weights(job) if few else None
    longer = None
    if not scores.ended_early and (trend == STILL_FALLS or not (has_learnt or trend)):
        longer = train_longer(job, plan, plan.total_steps)
    return Advice(sentence=sentence, evidence=evidence, override=weights or longer, another_run=weights is not None)


def _of_classes(scores: FinalScores) -> tuple[bool, str, str]:
    """Whether the model has learnt, in comparison with always saying the largest class; and the words for it."""
    total, largest = scores.total, 100 * max(scores.images) / scores.total
    low, high = (100 * bound for bound in wilson(round(scores.score * total / 100), total))
    interval = f" ({low:.0f} to {high:.0f} % with {total:,} images)" * (high - low >= NARROW)
    in_training = "" if scores.trained is None else f", {scores.trained:.2f} % in training"
    constant = f"always saying the largest class gets {largest:.2f} %"
    return low > largest, f"{scores.score:.2f} % top-1{interval}{in_training}; {constant}", WILSON * bool(interval)


def _of_labels(scores: FinalScores) -> tuple[bool, str, str]:
    """The same, compared with a random order of the images: its average precision is the share of a label."""
    shares = [images / scores.total for images in scores.images if images]
    chance = sum(shares) / len(shares)
    _, high = wilson(round(chance * scores.total), scores.total)
    return scores.score > high, f"{figure_text('map', scores.score)}; a random order gets {chance:.4g}", WILSON


def _of_values(scores: FinalScores) -> tuple[bool, str, str]:
    """The same in comparison with always predicting the mean."""
    noise = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) ** 2 / scores.total
    reached = f"{figure_text('r2', scores.score)}; always predicting the mean gets 0"
    return scores.score > noise, reached, f"with {scores.total:,} images, an R2 up to {noise:.2g} may be chance"


def wilson(right: int, total: int) -> tuple[float, float]:
    """The interval for the share of `right` in `total` examples (Wilson 1927)."""
    share, z = right / total, NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    centre, width = share + z * z / (2 * total), z * math.sqrt(share * (1 - share) / total + (z / (2 * total)) ** 2)
    return (max(0.0, (centre - width) / (1 + z * z / total)), min(1.0, (centre + width) / (1 + z * z / total)))


def _trend(losses: Sequence[tuple[int, float]]) -> str:
    """Where the validation loss goes, in words; empty if it stands still, or too few evaluations show it."""
    if len(losses) < LEAST_EVALUATIONS:
        return ""
    (step, lowest), (_, last) = min(losses, key=lambda entry: entry[1]), losses[-1]
    if last > RISEN * lowest:
        return f"the validation loss has risen since step {step:,}, so it overfits: more augmentation or fewer epochs"
    if last == lowest < (1 - FALLS) * losses[-1 - len(losses) // 4][1]:
        return STILL_FALLS
    return ""


def _published_weights(job: ResolvedJob) -> str | None:
    """The override that starts from published weights; None if this job or this machine cannot simply have them."""
    if min(job.dataset.input_shape[1:]) < SMALLEST:
        return None
    if (published := job.model.has_published()) is not None:
        return "model.pretrained=true" if published and not job.model.missing_weights() else None
    from lockstep.models.zoo import missing_weights  # not loaded where it cannot help

    is_default = describe(job.model).endswith("()")  # another model would not take its keys
    return "model=resnet18 model.pretrained=true" if is_default and not missing_weights("resnet18") else None
