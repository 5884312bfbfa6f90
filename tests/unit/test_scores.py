"""The metrics of an evaluation, compared with scikit-learn's on all predictions at once."""

import functools
import json
import math
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.special import logsumexp
from sklearn import metrics as reference
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn import functional as F

from helpers import built, records, refusal, resolved, train_here
from lockstep import metrics
from lockstep.core.errors import InputError
from lockstep.core.figures import finite, read_figures
from lockstep.core.model import best_classes, log_odds, probabilities
from lockstep.core.run import Run
from lockstep.core.world import World
from lockstep.inference.evaluate import evaluate
from lockstep.report.run_page import write_report
from lockstep.scores import EvaluationBlock, Scores, without_other_ranks
from lockstep.telemetry.sinks import JsonLines
from thread_ranks import ThreadRanks

pytestmark = pytest.mark.numerics

CLASSES = 4
GENERATOR = torch.Generator().manual_seed(0)
LABELS = torch.randint(0, CLASSES, (203,), generator=GENERATOR)
LOGITS = 2 * torch.randn(203, CLASSES, dtype=torch.float64, generator=GENERATOR)
LOGITS[torch.arange(203), LABELS] += 1
SHARES, PREDICTED = LOGITS.softmax(1), LOGITS.argmax(1)
AVERAGES = ("macro", "weighted", "micro", "none")


# Logits and labels: a model of four classes, of two and of one; splits that lack classes; predictions that do.
SPLITS: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
    "all": (LOGITS, LABELS),
    "without a class": (LOGITS[LABELS != 2], LABELS[LABELS != 2]),
    "of two of four classes": (LOGITS[LABELS > 1], LABELS[LABELS > 1]),
    "a class is never predicted": (LOGITS - 100 * torch.eye(CLASSES)[1], LABELS),
    "of one class": (LOGITS[LABELS == 1], LABELS[LABELS == 1]),
    "of one class, all right": (LOGITS + 100 * torch.eye(CLASSES)[3], LABELS * 0 + 3),
    "two classes": (LOGITS[:, :2], LABELS % 2),
    "two classes, one there, all right": (LOGITS[:, :2] + torch.tensor([100.0, 0]), LABELS * 0),
    "two classes, one there, all wrong": (LOGITS[:, :2] + torch.tensor([100.0, 0]), LABELS * 0 + 1),
    "two classes, one predicted": (LOGITS[:, :2] + torch.tensor([100.0, 0]), LABELS % 2),
    "a model of one class": (LOGITS[:, :1], LABELS * 0),
    "equal logits": ((LOGITS > 0).double(), LABELS),
}


def block(logits: torch.Tensor, labels: torch.Tensor) -> EvaluationBlock:
    return EvaluationBlock(labels, logits, best_classes(logits), labels, labels, 0)


def averaged(average: str, of_class: Callable[[int], float], labels: torch.Tensor, classes: int) -> Any:
    """The average of scikit-learn's scores of the classes that have examples and a score; NaN if none has one."""
    values = [of_class(label) if (labels == label).any() else math.nan for label in range(classes)]
    if average == "none":
        return values
    weights = np.bincount(labels, minlength=classes) if average == "weighted" else np.ones(classes)
    there = ~np.isnan(values)
    return np.average(np.array(values)[there], weights=weights[there]) if there.any() else math.nan


@functools.cache
def metric_of(name: str, option: str) -> Any:
    field = {"kappa": "weights", "matthews": None}.get(name, "average")
    (metric,) = built(f"metric={name}", *[f"metric.{name}.{field}={option}"] * (field is not None)).metric.values()
    return metric


def odds_by_definition(logits: torch.Tensor, kind: str = "softmax") -> Any:
    """log p - log(1 - p) of each class in float64; 1 - p is the sum over the other classes."""
    values = logits.double().numpy()
    if kind == "sigmoid" or values.shape[1] == 1:
        return values
    sums = [logsumexp(np.delete(values, label, 1), 1) for label in range(values.shape[1])]
    return values - np.stack(sums, 1)


def expected(name: str, average: str, logits: torch.Tensor, labels: torch.Tensor, kind: str = "softmax") -> Any:
    """What scikit-learn says of a metric; a list with a number for each class for the average `none`."""
    odds, predicted, classes = odds_by_definition(logits, kind), best_classes(logits)[:, 0], logits.shape[1]
    scores = {"accuracy": reference.recall_score, "recall": reference.recall_score}
    scores |= {"precision": reference.precision_score, "f1": reference.f1_score}
    if name in scores:
        if average == "micro":
            return reference.accuracy_score(labels, predicted)

        def score(label: int) -> float:
            return scores[name](labels, predicted, labels=[label], average="macro", zero_division=0)

        return averaged(average, score, labels, classes)
    curves = {"auroc": reference.roc_auc_score, "average_precision": reference.average_precision_score}
    if name in curves:
        return averaged(average, lambda label: curves[name](labels == label, odds[:, label]), labels, classes)
    if name == "matthews":
        return reference.matthews_corrcoef(labels, predicted)
    weights = None if average == "none" else average
    return reference.cohen_kappa_score(labels, predicted, labels=range(max(2, classes)), weights=weights)


WALK = [
    *((metric, average) for metric in ("accuracy", "precision", "recall", "f1") for average in AVERAGES),
    *((metric, average) for metric in ("auroc", "average_precision") for average in ("macro", "weighted", "none")),
    *(("kappa", weights) for weights in ("none", "linear", "quadratic")),
    ("matthews", ""),
]


@pytest.mark.parametrize("case", SPLITS)
def test_every_metric_is_that_of_scikit_learn_over_the_classes_that_are_there(case: str) -> None:
    logits, labels = SPLITS[case]
    for name, option in WALK:
        scores = Scores({"it": metric_of(name, option)}, logits.shape[1], (), World.solo())
        scores.update(block(logits, logits.shape[1] - 1 - labels))  # an earlier evaluation
        scores.compute()
        for half in (slice(None, None, 2), slice(1, None, 2)):
            scores.update(block(logits[half], labels[half]))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of scikit-learn, where there is no score
            values = expected(name, option, logits, labels)
        named = {f"it/{at}": value for at, value in enumerate(values)} if isinstance(values, list) else {}
        theirs = pytest.approx(named or {"it": values}, rel=1e-5, nan_ok=True)
        assert scores.compute() == theirs, f"{name} {option}"


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
@pytest.mark.parametrize("classes", [2, 3, 7])
@pytest.mark.parametrize("least", [18.0, 40.0, 1000.0])
def test_probabilities_that_round_to_0_or_1_keep_their_order(kind: str, classes: int, least: float) -> None:
    generator = torch.Generator().manual_seed(classes)
    labels = torch.randint(0, classes, (90,), generator=generator)
    # The logits of all examples are so large, or so far from each other, that float32 rounds their probabilities.
    noise = torch.rand(90, classes, generator=generator)
    dominant = F.one_hot(torch.where(noise[:, 0] < 0.6, labels, labels.roll(1)), classes).float()
    logits = least * (1 + noise) * (dominant if kind == "softmax" else 2 * (noise.roll(1, 0) + dominant > 0.7) - 1)
    logits[1] = logits[0]  # equal examples
    logits[2], logits[3, 0] = least, -math.inf  # equal classes, and one that a model rules out
    shares = getattr(logits, kind)(*[1] * (kind == "softmax"))
    assert (shares.amax(1) == 1).double().mean() > 0.5
    for name, option in WALK:
        scores = Scores({"it": metric_of(name, option)}, classes, (), World.solo(), kind)
        for half in (slice(40), slice(40, None)):
            scores.update(block(logits[half], labels[half]))
        values = expected(name, option, logits.nan_to_num(neginf=-1e30), labels, kind)
        right = {f"it/{at}": value for at, value in enumerate(values)} if isinstance(values, list) else {"it": values}
        assert scores.compute() == pytest.approx(right, rel=1e-9), f"{name} {option}"
    top2 = Scores({"it": metrics.Accuracy(average="micro", top_k=2)}, classes, (), World.solo(), kind)
    top2.update(block(logits, labels))
    hits = (best_classes(logits, 2) == labels[:, None]).any(1).double().mean()
    assert top2.compute()["it"] == pytest.approx(float(hits))


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_log_odds_are_those_of_the_probabilities_and_exact_for_two_classes(kind: str) -> None:
    for logits in (LOGITS, LOGITS.float(), 30 * LOGITS, 1e4 * LOGITS):
        np.testing.assert_allclose(log_odds(logits, kind), odds_by_definition(logits, kind), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(log_odds(LOGITS, kind).sigmoid(), probabilities(LOGITS, kind))
    two = (1e3 * LOGITS[:, :2]).float()
    assert np.array_equal(log_odds(two, kind), odds_by_definition(two, kind))
    assert log_odds(torch.tensor([[3.0]]), kind).isfinite().all()
    assert log_odds(torch.tensor([[-math.inf, 1.0]]), kind).isfinite().all()
    assert log_odds(torch.tensor([[math.nan, 1.0]]), kind).isnan().any()


@pytest.mark.parametrize("weights", ["linear", "quadratic"])
@pytest.mark.parametrize("order", ["dcab", "bacd", "abcd", "dcba"])
def test_a_weighted_kappa_has_the_order_of_the_classes_that_is_given(weights: str, order: str) -> None:
    words = ("metric=kappa", f"metric.kappa.weights={weights}", f"metric.kappa.order=[{','.join(order)}]")
    scores = Scores({**built(*words).metric}, CLASSES, ("a", "b", "c", "d"), World.solo())
    scores.update(block(LOGITS, LABELS))
    labels, predicted = (["abcd"[label] for label in labels] for labels in (LABELS, PREDICTED))
    right = reference.cohen_kappa_score(labels, predicted, labels=[*order], weights=weights)
    assert scores.compute() == {"kappa": pytest.approx(right)}


@pytest.mark.parametrize("weights", ["none", "linear", "quadratic"])
@pytest.mark.parametrize("absent", range(4))
def test_a_kappa_counts_the_distance_to_a_class_that_is_neither_there_nor_predicted(
    weights: str, absent: int
) -> None:
    logits = LOGITS[:, :4].clone()
    logits[:, absent] = -math.inf
    labels = (LABELS % 3 + absent + 1) % 4
    scores = Scores({"kappa": metrics.Kappa(weights=weights)}, 4, ("a", "b", "c", "d"), World.solo())
    scores.update(block(logits, labels))
    known = None if weights == "none" else weights
    right = reference.cohen_kappa_score(labels, logits.argmax(1), labels=[*range(4)], weights=known)
    assert scores.compute() == {"kappa": pytest.approx(right)}


@pytest.mark.parametrize(
    ("words", "names", "expected"),
    [
        (("weights=none",), "abc", ""),
        (("weights=linear",), "ab", ""),
        (("weights=linear",), "012", ""),
        (
            ("weights=linear",),
            "abc",
            "weights=linear counts the classes in this order: metric.kappa.order=[a,b,c]; if",
        ),
        (("weights=quadratic", "order=[c,a,b]"), "abc", ""),
        (("weights=quadratic", "order=[2,0,1]"), "012", ""),
        (("weights=quadratic", "order=[c,a]"), "abc", "order is [c,a], expected each class once: [a,b,c]"),
        (("weights=quadratic", "order=[c,a,a,b]"), "abc", "order is [c,a,a,b], expected each class once: [a,b,c]"),
        (("weights=none", "order=[c,a,b]"), "abc", "order has no effect without metric.kappa.weights=quadratic"),
    ],
)
def test_a_weighted_kappa_says_which_order_it_takes(words: tuple[str, ...], names: str, expected: str) -> None:
    try:
        job = built("metric=kappa", *(f"metric.kappa.{word}" for word in words))
        (sentence,) = job.metric["kappa"].notes([*names]) or [""]  # type: ignore[attr-defined]
    except InputError as error:
        sentence = str(error)
    assert expected in sentence
    assert bool(sentence) == bool(expected)


def test_the_order_of_a_kappa_is_said_before_a_run_and_a_wrong_one_is_refused(tmp_path: Path) -> None:
    for place, number in (("train", 4), ("val", 2)):
        for name in ("none", "mild", "severe"):
            (tmp_path / "images" / place / name).mkdir(parents=True)
            for level in range(number):
                Image.new("L", (8, 8), 40 * level).save(tmp_path / "images" / place / name / f"{level}.png")
    words = ("dataset=folder", f"dataset.path={tmp_path / 'images'}", "dataset.decode_size=8", "model=linear")
    words = (*words, "metric=kappa", "metric.kappa.weights=quadratic", "batch=4", "steps=2", "device=cpu")
    sentence = (
        "metric.kappa.weights=quadratic counts the classes in this order: metric.kappa.order=[mild,none,severe]"
    )
    (note,) = resolved(*words).metric_notes()
    assert note.startswith(sentence)
    run = train_here(tmp_path / "run", *words, "metric.kappa.order=[none,mild,severe]")
    evaluate(str(run.path), (), split="val", device="cpu", out=None)
    facts = json.loads((run.path / "evaluation.json").read_text())
    assert facts["kappa"] == run.read_summary()["scores"]["kappa"]
    refused = refusal(tmp_path / "refused", *words, "metric.kappa.order=[none,mild]")
    assert "metric.kappa.order is [none,mild], expected each class once: [mild,none,severe]" in refused


def test_balanced_and_top_k_accuracy_are_those_of_scikit_learn() -> None:
    balanced, top2 = metrics.Accuracy(), metrics.Accuracy(average="micro", top_k=2)
    theirs = reference.balanced_accuracy_score(LABELS, PREDICTED), reference.top_k_accuracy_score(LABELS, SHARES, k=2)
    ours = scores_of(balanced, 203)["it"], scores_of(top2, 100, 102, 1)["it"]
    assert ours == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize("labels", [LABELS, LABELS.clamp(max=2)])
def test_the_top_k_accuracy_of_classes_is_the_share_of_hits_among_those_that_are_there(labels: torch.Tensor) -> None:
    hits = (LOGITS.topk(2).indices == labels[:, None]).any(1).double()
    shares = [float(hits[labels == label].mean()) for label in labels.unique()]
    scores = Scores({"it": metrics.Accuracy(top_k=2)}, CLASSES, (), World.solo())
    scores.update(block(LOGITS, labels))
    assert scores.compute() == {"it": pytest.approx(np.mean(shares), rel=1e-6)}


@pytest.mark.parametrize("name", ["auroc", "average_precision", "f1", "calibration"])
def test_a_score_of_logits_that_are_not_numbers_has_no_value(name: str) -> None:
    logits = LOGITS.clone()
    logits[7] = math.nan
    (metric,) = built(f"metric={name}").metric.values()
    scores = Scores({"it": metric}, CLASSES, (), World.solo())
    scores.update(block(logits, LABELS))
    assert math.isnan(scores.compute()["it"]) == (name != "f1")  # a predicted class is one, whatever the logits are


def test_of_equal_logits_every_metric_takes_the_predicted_class() -> None:
    logits = LOGITS.round()
    hits = (best_classes(logits)[:, 0] == LABELS).double().mean()
    micro = [metric_of(name, "micro") for name in ("accuracy", "precision", "recall", "f1")]
    scores = Scores(dict(enumerate(micro)), CLASSES, (), World.solo())  # type: ignore[arg-type]
    scores.update(block(logits, LABELS))
    assert [*scores.compute().values()] == pytest.approx([float(hits)] * 4)


def scores_of(metric: Any, *blocks: int, names: tuple[str, ...] = ()) -> dict[str, float]:
    """The scores of an evaluation in blocks of these sizes, after one of other logits with the same object."""
    scores = Scores({"it": metric}, CLASSES, names, World.solo())
    for of_pass in (LOGITS.flip(0), LOGITS):
        for logits, labels in zip(of_pass.split(blocks), LABELS.split(blocks), strict=True):
            scores.update(block(logits, labels))
        values = scores.compute()
    return values


def guo(shares: torch.Tensor, labels: torch.Tensor, bins: int, norm: str) -> float:
    """The calibration error of Guo et al. (2017): over the intervals ((m - 1) / M, m / M] of the probability."""
    confidences, predicted = shares.max(1)
    gaps, weights = [], []
    for m in range(1, bins + 1):
        inside = (confidences > (m - 1) / bins) & (confidences <= m / bins)
        if inside.any():
            accuracy = (predicted[inside] == labels[inside]).double().mean()
            gaps.append(float((accuracy - confidences[inside].mean()).abs()))
            weights.append(float(inside.double().mean()))
    if norm == "max":
        return max(gaps)
    power = {"l1": 1, "l2": 2}[norm]
    return float(np.average(np.array(gaps) ** power, weights=weights) ** (1 / power))


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
@pytest.mark.parametrize("norm", ["l1", "l2", "max"])
@pytest.mark.parametrize("bins", [1, 10, 15])
def test_the_calibration_error_is_that_of_guo_with_1_in_the_last_interval(kind: str, norm: str, bins: int) -> None:
    logits, labels = LOGITS.clone(), LABELS.clone()
    logits[:9] += 100 * F.one_hot(LABELS[:9], CLASSES)  # certain ones, of which one is wrong
    labels[0] = (labels[0] + 1) % CLASSES
    scores = Scores({"it": metrics.Calibration(bins=bins, norm=norm)}, CLASSES, (), World.solo(), kind)
    for at in (slice(50), slice(50, None)):
        scores.update(block(logits[at], labels[at]))
    shares = probabilities(logits, kind)
    assert (shares == 1).any(1).sum() >= 9
    assert scores.compute()["it"] == pytest.approx(guo(shares, labels, bins, norm), rel=1e-6)


@pytest.mark.parametrize(("kind", "shares"), [("softmax", SHARES), ("sigmoid", LOGITS.sigmoid())])
def test_a_metric_gets_the_probabilities_of_the_loss(kind: str, shares: torch.Tensor) -> None:
    seen: list[torch.Tensor] = []
    score = SimpleNamespace(update=lambda probabilities, labels: seen.append(probabilities))
    metric = SimpleNamespace(build_for=lambda targets, names: score)
    for takes in ({}, {"takes_log_odds": False}, {"takes_log_odds": True}):  # torchmetrics' say nothing
        vars(score).update(takes)
        Scores({"it": metric}, CLASSES, (), World.solo(), kind).update(block(LOGITS, LABELS))
    assert torch.equal(seen[0], shares)
    assert torch.equal(seen[1], shares)
    assert torch.equal(seen[2], log_odds(LOGITS, kind))


def test_a_score_that_fails_leaves_the_process_group_as_it_was() -> None:
    is_initialized = torch.distributed.is_initialized
    with pytest.raises(KeyError), without_other_ranks():
        raise KeyError
    assert torch.distributed.is_initialized is is_initialized


def test_a_score_of_each_class_has_its_name() -> None:
    expected = reference.recall_score(LABELS, PREDICTED, average=None)
    metric = metrics.Recall(average="none")
    named = {f"it/{name}": pytest.approx(value) for name, value in zip("abcd", expected, strict=True)}
    assert scores_of(metric, 203, names=("a", "b", "c", "d")) == named
    assert [*scores_of(metric, 203)] == [f"it/{label}" for label in range(CLASSES)]


def test_broken_images_do_not_count() -> None:
    scores = Scores({"f1": metrics.F1()}, CLASSES, (), World.solo())
    labels = LABELS.clone()
    labels[::7] = -100
    scores.update(block(LOGITS, labels))
    usable = labels >= 0
    expected = reference.f1_score(LABELS[usable], PREDICTED[usable], average="macro")
    assert scores.compute() == {"f1": pytest.approx(expected, rel=1e-6)}


class Holder:
    """A metric with others in a list; it takes no attribute more, as a frozen dataclass does."""

    __slots__ = ("held",)

    def __init__(self, *held: Any) -> None:
        self.held = held

    def update(self, probabilities: torch.Tensor, labels: torch.Tensor) -> None:
        for metric in self.held:
            metric.update(probabilities, labels)

    def compute(self) -> torch.Tensor:
        return torch.stack([metric.compute() for metric in self.held]).sum()

    def reset(self) -> None:
        for metric in self.held:
            metric.reset()


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(lambda f1, precision: f1, id="one"),
        pytest.param(lambda f1, precision: f1 + precision, id="sum"),
        pytest.param(lambda f1, precision: Holder(f1), id="held"),
        pytest.param(lambda f1, precision: Holder(Holder(f1), precision), id="held-deep"),
    ],
)
def test_a_metric_of_torchmetrics_waits_for_no_rank_wherever_it_is_held(
    build: Callable[[Any, Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchmetrics.classification import MulticlassF1Score, MulticlassPrecision

    def gather(*_: object) -> None:
        raise AssertionError("it asks the other ranks")

    expected = build(
        reference.f1_score(LABELS, PREDICTED, average="macro"),
        reference.precision_score(LABELS, PREDICTED, average="macro"),
    )
    score = build(MulticlassF1Score(CLASSES), MulticlassPrecision(CLASSES))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr("torchmetrics.metric.gather_all_tensors", gather)
    scores = Scores({"it": SimpleNamespace(build_for=lambda targets, names: score)}, CLASSES, (), World.solo())
    scores.update(block(LOGITS, LABELS))
    assert scores.compute()["it"] == pytest.approx(total(expected), rel=1e-6)
    assert torch.distributed.is_initialized()


def total(expected: Any) -> float:
    return sum(map(total, expected.held)) if isinstance(expected, Holder) else expected


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (torch.ones(3, 3), "numbers of shape (3, 3)"),
        (torch.ones(2), "numbers of shape (2,)"),
        ({"a": torch.ones(())}, "a dict"),
        (None, "a NoneType"),
        ("high", "a str"),
    ],
)
def test_a_metric_that_computes_no_score_is_one_sentence(value: object, shown: str) -> None:
    score = SimpleNamespace(compute=lambda: value)
    scores = Scores({"it": SimpleNamespace(build_for=lambda targets, names: score)}, 3, (), World.solo())
    with pytest.raises(
        InputError, match=re.escape(f"metric=it computes {shown}, expected one number, or one for each")
    ):
        scores.compute()


def test_main_has_the_scores_of_all_ranks_and_waits_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def scores_of_rank(world: World) -> dict[str, float]:
        scores = Scores({"f1": metrics.F1()}, CLASSES, (), world)
        scores.update(block(LOGITS[world.rank :: 2], LABELS[world.rank :: 2]))
        return scores.compute()

    expected = reference.f1_score(LABELS, PREDICTED, average="macro")
    assert ThreadRanks(2, monkeypatch).run(scores_of_rank) == [{"f1": pytest.approx(expected, rel=1e-6)}, {}]


def test_a_run_writes_the_metrics_of_the_weights_that_decide(tmp_path: Path) -> None:
    job = ("steps=6", "train.eval_every=3", "metric=[accuracy,recall]", "metric.recall.average=none", "device=cpu")
    runs = [records(train_here(tmp_path / ema, *job, f"train.ema={ema}")) for ema in ("null", "0.5")]
    lines = [[line for line in run if "metric/accuracy" in line] for run in runs]
    assert [[line["step"] for line in run] for run in lines] == [[3, 6], [3, 6]]
    for tag, run in zip(("acc/val_top1", "acc/val_ema_top1"), lines, strict=True):
        for line in run:
            recalls = [line[f"metric/recall/{digit}"] for digit in range(10)]
            assert line["metric/accuracy"] == pytest.approx(sum(recalls) / 10)
            assert line["metric/accuracy"] == pytest.approx(line[tag] / 100, abs=0.05)
    assert lines[0][0]["metric/accuracy"] != lines[1][0]["metric/accuracy"]


def test_a_score_without_a_value_is_null_in_every_file(tmp_path: Path) -> None:
    for place, names in (("train", "abc"), ("val", "a")):
        for name in names:
            (tmp_path / "images" / place / name).mkdir(parents=True)
            for level in (10, 200):
                Image.new("L", (8, 8), level).save(tmp_path / "images" / place / name / f"{level}.png")
    words = ("dataset=folder", f"dataset.path={tmp_path / 'images'}", "dataset.decode_size=8", "model=linear")
    chosen = ("metric=[auroc,average_precision,kappa]", "metric.average_precision.average=none")
    run = train_here(tmp_path / "run", *words, *chosen, "batch=4", "steps=2", "logger=[jsonl,tensorboard]")
    (line,) = [line for line in records(run) if "metric/auroc" in line]
    tags = {tag: value for tag, value in line.items() if tag.startswith("metric/")}
    precision = {f"metric/average_precision/{name}": {"a": 1.0}.get(name) for name in "abc"}
    assert tags == {"metric/auroc": None, **precision, "metric/kappa": tags["metric/kappa"]}
    assert tags["metric/kappa"] in (0.0, None)  # 0/0 if all are right
    events = EventAccumulator(str(run.path / "val"))
    events.Reload()
    assert {tag for tag in events.Tags()["scalars"] if tag in tags} == {tag for tag in tags if tags[tag] is not None}
    assert "auroc –" in re.sub(r"(<[^>]*>|\s)+", " ", write_report(Run(run.path)).read_text())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_metric_of_the_user_need_not_have_a_value(value: float, tmp_path: Path) -> None:
    score = SimpleNamespace(update=None, compute=lambda: torch.tensor([0.5, value]), reset=lambda: None)
    scores = Scores({"it": SimpleNamespace(build_for=lambda targets, names: score)}, 2, (), World.solo())
    figures = scores.compute()
    sink = JsonLines(tmp_path / "metrics.jsonl", 0)
    sink.write(1, figures)
    sink.end("completed")
    assert '"it/0": 0.5, "it/1": null' in (tmp_path / "metrics.jsonl").read_text()
    assert [*read_figures(tmp_path / "metrics.jsonl")] == [(1, {"it/0": 0.5})]
    assert finite(figures) == {"it/0": 0.5}


def test_a_probability_on_the_border_of_two_intervals_is_in_the_lower_one() -> None:
    logits = torch.tensor([[0.0, 0.0], [math.log(9), 0.0]], dtype=torch.float64)  # probabilities of 0.5 and 0.9
    scores = Scores({"it": metrics.Calibration(bins=2)}, 2, (), World.solo())
    scores.update(block(logits, torch.tensor([0, 1])))
    assert scores.compute()["it"] == pytest.approx((0.5 + 0.9) / 2), "in one interval it would be 0.2"


OF_TARGETS = {
    ("classes",): ("accuracy", "calibration", "kappa", "matthews"),
    ("classes", "labels"): ("precision", "recall", "f1", "auroc", "average_precision", "map"),
    ("labels",): ("subset_accuracy",),
    ("values",): ("mae", "rmse", "r2"),
}


@pytest.mark.parametrize("targets", OF_TARGETS, ids=str)
def test_a_metric_is_for_these_targets(targets: tuple[str, ...]) -> None:
    (built_ones,) = [built(f"metric=[{','.join(OF_TARGETS[targets])}]").metric]
    assert {name: metric.targets for name, metric in built_ones.items()} == dict.fromkeys(
        OF_TARGETS[targets], targets
    )


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("MAE", reference.mean_absolute_error),
        ("RMSE", reference.root_mean_squared_error),
        ("R2", reference.r2_score),
    ],
)
def test_a_score_of_values_is_their_mean_or_has_one_for_each(name: str, theirs: Callable[..., Any]) -> None:
    targets = torch.randn(9, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    outputs = targets + torch.tensor([0.1, 0.5, 2.0]) * torch.randn(9, 3, dtype=torch.float64)
    for average, outputs_of in (("macro", "uniform_average"), ("none", "raw_values")):
        score = getattr(metrics, name)(average=average).build(3)
        for part in (slice(4), slice(4, None)):
            score.update(outputs[part].float(), targets[part].float())
        expected_score = theirs(targets.float().double(), outputs.float().double(), multioutput=outputs_of)
        np.testing.assert_allclose(score.compute(), expected_score, rtol=1e-12)
        assert score.compute().shape == (() if average == "macro" else (3,))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_score_of_values_that_are_not_finite_has_no_value(value: float) -> None:
    score = metrics.MAE().build(1)
    score.update(torch.tensor([[1.0], [value]]), torch.tensor([[1.0], [1.0]]))
    assert math.isnan(score.compute())
    score.reset()
    score.update(torch.tensor([[1.0]]), torch.tensor([[3.0]]))
    assert score.compute() == 2, "nothing of the evaluation before"


@pytest.mark.parametrize("number", [3, 20, 21])
def test_a_kappa_names_up_to_twenty_classes(number: int) -> None:
    names = [f"class{label}" for label in range(number)]
    (note,) = metrics.Kappa(weights="linear").notes(names)
    listed = ",".join(names[:20]) + (",..." if number > 20 else "")
    assert f"metric.kappa.order=[{listed}]; if theirs is another one" in note
    with pytest.raises(InputError, match=re.escape(f"expected each class once: [{listed}]")):
        metrics.Kappa(weights="linear", order=["class0"]).notes(names)


def test_a_kappa_without_names_takes_the_labels_in_their_order() -> None:
    for weights in ("none", "linear", "quadratic"):
        score = metrics.Kappa(weights=weights).build(CLASSES)
        score.update(log_odds(LOGITS, "softmax"), LABELS)
        theirs = reference.cohen_kappa_score(LABELS, PREDICTED, weights=None if weights == "none" else weights)
        assert score.compute() == pytest.approx(theirs)


def test_a_metric_with_another_number_of_scores_is_answered_with_the_number_of_classes() -> None:
    score = SimpleNamespace(compute=lambda: torch.ones(4))
    scores = Scores({"it": SimpleNamespace(build_for=lambda targets, names: score)}, 3, (), World.solo())
    with pytest.raises(InputError, match=r"shape \(4,\), expected one number, or one for each of the 3 classes$"):
        scores.compute()


def test_scores_are_reset_by_themselves_and_are_none_without_metrics() -> None:
    scores = Scores({"f1": metrics.F1()}, CLASSES, (), World.solo())
    scores.update(block(LOGITS[:50], LABELS[:50]))
    scores.compute()
    scores.update(block(LOGITS[50:], LABELS[50:]))
    theirs = reference.f1_score(LABELS[50:], PREDICTED[50:], average="macro")
    assert scores.compute() == {"f1": pytest.approx(theirs, rel=1e-6)}
    empty = Scores({}, CLASSES, (), World.solo())
    empty.update(block(LOGITS, LABELS))
    empty.update_without()
    assert empty.compute() == {}


def test_a_metric_is_never_updated_without_an_example() -> None:
    sizes: list[int] = []
    score = SimpleNamespace(
        update=lambda predictions, labels: sizes.append(len(labels)),
        compute=lambda: 0.0,
        reset=lambda: sizes.append(-1),
    )
    scores = Scores({"it": SimpleNamespace(build_for=lambda targets, names: score)}, CLASSES, (), World.solo())
    scores.update_without()
    scores.update(block(LOGITS[:3], torch.full((3,), -100)))
    scores.update(block(LOGITS[:3], torch.tensor([0, -100, 1])))
    scores.update(block(LOGITS[:0], LABELS[:0]))
    assert scores.compute() == {"it": 0.0}
    assert sizes == [2, -1]
