"""The metrics of an evaluation, compared with scikit-learn's on all predictions at once."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sklearn import metrics as reference

from helpers import built, records, train_here
from lockstep import metrics
from lockstep.core.world import World
from lockstep.metrics import build_scores
from thread_ranks import ThreadRanks

pytestmark = pytest.mark.numerics

CLASSES = 4
GENERATOR = torch.Generator().manual_seed(0)
LABELS = torch.randint(0, CLASSES, (203,), generator=GENERATOR)
LOGITS = 2 * torch.randn(203, CLASSES, dtype=torch.float64, generator=GENERATOR)
LOGITS[torch.arange(203), LABELS] += 1
SHARES, PREDICTED = LOGITS.softmax(1), LOGITS.argmax(1)
EXPECTED: dict[str, tuple[Any, float]] = {
    "accuracy": (metrics.Accuracy(), reference.balanced_accuracy_score(LABELS, PREDICTED)),
    "top2": (
        metrics.Accuracy(average=metrics.Average.micro, top_k=2),
        reference.top_k_accuracy_score(LABELS, SHARES, k=2),
    ),
    "precision": (metrics.Precision(), reference.precision_score(LABELS, PREDICTED, average="macro")),
    "recall": (
        metrics.Recall(average=metrics.Average.weighted),
        reference.recall_score(LABELS, PREDICTED, average="weighted"),
    ),
    "f1": (metrics.F1(), reference.f1_score(LABELS, PREDICTED, average="macro")),
    "auroc": (metrics.AUROC(), reference.roc_auc_score(LABELS, SHARES, multi_class="ovr")),
    "average_precision": (metrics.AveragePrecision(), reference.average_precision_score(LABELS, SHARES)),
    "weighted f1": (
        metrics.F1(average=metrics.Average.weighted),
        reference.f1_score(LABELS, PREDICTED, average="weighted"),
    ),
    "weighted auroc": (
        metrics.AUROC(average=metrics.ClassAverage.weighted),
        reference.roc_auc_score(LABELS, SHARES, multi_class="ovr", average="weighted"),
    ),
    "kappa": (metrics.Kappa(), reference.cohen_kappa_score(LABELS, PREDICTED)),
    **{
        f"{weights} kappa": (
            metrics.Kappa(weights=metrics.KappaWeights(weights)),
            reference.cohen_kappa_score(LABELS, PREDICTED, weights=weights),
        )
        for weights in ("linear", "quadratic")
    },
    "matthews": (metrics.Matthews(), reference.matthews_corrcoef(LABELS, PREDICTED)),
}


def scores_of(metric: Any, *blocks: int, names: tuple[str, ...] = ()) -> dict[str, float]:
    """The scores of an evaluation in blocks of these sizes, behind one of other logits with the same object."""
    scores = build_scores({"it": metric}, CLASSES, names, World.solo())
    for of_pass in (LOGITS.flip(0), LOGITS):
        for logits, labels in zip(of_pass.split(blocks), LABELS.split(blocks), strict=True):
            scores.update(logits, labels)
        values = scores.compute()
    return values


@pytest.mark.parametrize("name", EXPECTED)
def test_a_metric_is_that_of_scikit_learn(name: str) -> None:
    metric, expected = EXPECTED[name]
    assert scores_of(metric, 100, 100, 3) == {"metric/it": pytest.approx(expected, rel=1e-6)}


@pytest.mark.parametrize("norm", metrics.Norm)
def test_calibration_is_the_norm_of_the_differences_of_its_bins(norm: metrics.Norm) -> None:
    confidence, right = SHARES.amax(1), (PREDICTED == LABELS).double()
    bins = (confidence * 10).ceil().long() - 1
    filled = [bins == at for at in bins.unique().tolist()]
    shares = torch.stack([at.double().mean() for at in filled])
    differences = torch.stack([(confidence[at].mean() - right[at].mean()).abs() for at in filled])
    expected = {
        "l1": (shares * differences).sum(),
        "l2": (shares * differences.square()).sum().sqrt(),
        "max": differences.max(),
    }
    actual = scores_of(metrics.Calibration(bins=10, norm=norm), 203)["metric/it"]
    assert actual == pytest.approx(float(expected[norm.value]), rel=1e-6)


@pytest.mark.parametrize(("kind", "shares"), [("softmax", SHARES), ("sigmoid", LOGITS.sigmoid())])
def test_a_metric_gets_the_probabilities_of_the_loss(kind: str, shares: torch.Tensor) -> None:
    seen: list[torch.Tensor] = []
    score = SimpleNamespace(update=lambda probabilities, labels: seen.append(probabilities))
    metric = SimpleNamespace(build=lambda classes: score)
    build_scores({"it": metric}, CLASSES, (), World.solo(), kind).update(LOGITS, LABELS)
    assert torch.equal(seen[0], shares)


def test_a_score_of_each_class_has_its_name() -> None:
    expected = reference.recall_score(LABELS, PREDICTED, average=None)
    metric = metrics.Recall(average=metrics.Average.none)
    named = {f"metric/it/{name}": pytest.approx(value) for name, value in zip("abcd", expected, strict=True)}
    assert scores_of(metric, 203, names=("a", "b", "c", "d")) == named
    assert [*scores_of(metric, 203)] == [f"metric/it/{label}" for label in range(CLASSES)]


def test_broken_images_do_not_count() -> None:
    scores = build_scores({"f1": metrics.F1()}, CLASSES, (), World.solo())
    labels = LABELS.clone()
    labels[::7] = -100
    scores.update(LOGITS, labels)
    usable = labels >= 0
    expected = reference.f1_score(LABELS[usable], PREDICTED[usable], average="macro")
    assert scores.compute() == {"metric/f1": pytest.approx(expected, rel=1e-6)}


def test_main_has_the_scores_of_all_ranks_and_waits_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def scores_of_rank(world: World) -> dict[str, float]:
        scores = build_scores({"f1": metrics.F1()}, CLASSES, (), world)
        scores.update(LOGITS[world.rank :: 2], LABELS[world.rank :: 2])
        return scores.compute()

    expected = reference.f1_score(LABELS, PREDICTED, average="macro")
    assert ThreadRanks(2, monkeypatch).run(scores_of_rank) == [{"metric/f1": pytest.approx(expected, rel=1e-6)}, {}]


def test_the_options_are_the_classes() -> None:
    options = {type(job_metric) for job_metric in built(f"metric=[{','.join(names())}]").metric.values()}
    assert options == {getattr(metrics, name) for name in metrics.__all__}
    assert all(dataclasses.is_dataclass(option) for option in options)


def names() -> list[str]:
    return sorted(path.stem for path in (Path(__file__).parents[2] / "conf" / "metric").glob("*.yaml"))


def test_a_run_writes_the_metrics_of_the_weights_that_decide(tmp_path: Path) -> None:
    job = ("steps=6", "train.eval_every=3", "metric=[accuracy,recall]", "metric.recall.average=none", "device=cpu")
    plain, averaged = (
        records(train_here(tmp_path / name, *job, f"train.ema={ema}")) for name, ema in (("a", "null"), ("b", 0.5))
    )
    lines = [[line for line in run if "metric/accuracy" in line] for run in (plain, averaged)]
    assert [[line["step"] for line in run] for run in lines] == [[3, 6], [3, 6]]
    for tag, run in zip(("acc/val_top1", "acc/val_ema_top1"), lines, strict=True):
        for line in run:
            recalls = [line[f"metric/recall/{digit}"] for digit in range(10)]
            assert line["metric/accuracy"] == pytest.approx(sum(recalls) / 10)
            assert line["metric/accuracy"] == pytest.approx(line[tag] / 100, abs=0.05)
    assert lines[0][0]["metric/accuracy"] != lines[1][0]["metric/accuracy"]
