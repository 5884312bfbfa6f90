"""What the line `learning` says of the scores of a run."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binomtest, pearsonr
from sklearn.metrics import average_precision_score, r2_score

from helpers import built, resolved
from lockstep.core.plan import Plan
from lockstep.core.run_dir import RunDir
from lockstep.core.world import World
from lockstep.data.datasets import Folder
from lockstep.data.loading import Streaming
from lockstep.diagnostics.listener import LEAST_EVALUATIONS, FinalScores, Listener, learning, wilson
from lockstep.diagnostics.verdict import checklist
from lockstep.models import zoo
from lockstep.training.resolved_job import ResolvedJob
from lockstep.training.run_record import Evidence

PLAN = Plan(examples=60, batch=10, total_steps=60, micro_batches=1, log_every=10, eval_every=6, save_every=6)
SCORES = FinalScores(score=90.0, total=100, images=[50, 50], trained=None, losses=())


def of_photos(*words: str, size: int = 64) -> ResolvedJob:
    return replace(resolved("device=cpu", *words), dataset=Folder(path="photos", decode_size=size, input_size=size))


@pytest.mark.parametrize("total", [1, 2, 3, 17, 20, 47, 1000, 10_000])
def test_the_interval_of_a_share_is_wilsons(total: int) -> None:
    for right in {0, 1, total // 2, total - 1, total}:
        interval = binomtest(right, total).proportion_ci(method="wilson")
        low, high = wilson(right, total)
        assert (low, high) == pytest.approx((interval.low, interval.high), abs=1e-12)
        assert 0 <= low <= high <= 1


@pytest.mark.parametrize(
    ("right", "images", "learnt"),
    [(10, [10, 7], False), (17, [10, 7], True), (14, [10, 10], False), (15, [10, 10], True), (5, [5], False)],
)
def test_a_model_has_learnt_if_its_interval_is_above_the_largest_class(
    right: int, images: list[int], *, learnt: bool
) -> None:
    scores = replace(SCORES, score=100 * right / sum(images), total=sum(images), images=images)
    line = str(learning(of_photos(), PLAN, scores))
    assert line.startswith("nothing shown yet: ") != learnt
    assert f"always saying the largest class gets {100 * max(images) / sum(images):.2f} %" in line


@pytest.mark.parametrize(("low", "learnt"), [(0.5, False), (0.5 + 1e-9, True)])
def test_an_interval_that_begins_at_the_share_of_the_largest_class_shows_nothing(
    low: float, learnt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.diagnostics.listener.wilson", lambda right, total: (low, 1.0))
    assert str(learning(of_photos(), PLAN, SCORES)).startswith("nothing shown yet: ") != learnt


def test_the_interval_is_shown_where_few_images_make_it_wide() -> None:
    twenty = learning(of_photos(), PLAN, replace(SCORES, score=70.0, total=20, images=[10, 10]))
    assert "70.00 % top-1 (48 to 85 % with 20 images);" in str(twenty)
    many = learning(of_photos(), PLAN, replace(SCORES, score=70.0, total=40_000, images=[20_000, 20_000]))
    assert "70.00 % top-1; " in str(many)
    assert ", 99.50 % in training; " in str(learning(of_photos(), PLAN, replace(SCORES, trained=99.5)))


@pytest.mark.parametrize(
    ("losses", "says", "override"),
    [
        ([1.0, 0.8, 0.6, 0.4], "the validation loss still falls", "epochs=40"),
        ([1.0, 0.5, 0.5, 0.8], "the validation loss has risen since step 2, so it overfits", None),
        ([1.0, 0.5, 0.50, 0.495], "", None),
        ([1.0, 0.8, 0.6], "", None),
    ],
)
def test_the_trend_is_that_of_the_validation_loss(losses: list[float], says: str, override: str | None) -> None:
    scores = replace(SCORES, losses=[*enumerate(losses, start=1)])
    finding = learning(resolved("device=cpu"), replace(PLAN, examples=1442), scores)
    assert (says in finding.sentence, finding.override) == (True, override)
    assert bool(says) == (len(losses) >= LEAST_EVALUATIONS and "the validation loss" in finding.sentence)


@pytest.mark.parametrize(
    ("words", "size", "override"),
    [
        (["model=linear"], 64, "model=resnet18 model.pretrained=true"),
        (["model=resnet34"], 64, "model=resnet18 model.pretrained=true"),
        (["model=resnet34", "model.stem=cifar"], 64, None),
        (["model=resnet18"], 64, "model.pretrained=true"),
        (["model=resnet18"], 32, "model.pretrained=true"),
        (["model=resnet18"], 31, None),
        (["model=test_byobnet"], 64, "model.pretrained=true"),
        (["model=resnet18", "model.pretrained=true"], 64, None),
    ],
)
def test_few_photos_are_answered_with_published_weights_of_a_model_that_the_line_takes(
    words: list[str], size: int, override: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zoo, "missing_weights", lambda name: "")  # this machine may have no network
    finding = learning(of_photos(*words, size=size), PLAN, SCORES)
    assert finding.override == override
    if override is not None:
        assert finding.another_run
        built(*words, *override.split())


def test_a_longer_run_continues_the_average_that_has_begun() -> None:
    falling = replace(SCORES, losses=[*enumerate([1.0, 0.8, 0.6, 0.4], start=1)])
    job = resolved("device=cpu", "model=linear", "steps=40", "train.swa_from=25%")
    advice = learning(job, replace(PLAN, total_steps=40), falling)
    assert advice.override == "steps=80 train.swa_from=41"


@pytest.mark.parametrize("model", ["resnet18", "linear"])
def test_published_weights_out_of_reach_are_not_advised(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo, "missing_weights", lambda name: "the hub does not answer")
    falling = replace(SCORES, losses=[*enumerate([1.0, 0.8, 0.6, 0.4], start=1)])
    assert learning(of_photos(f"model={model}"), PLAN, falling).override == "epochs=40"
    assert learning(of_photos(f"model={model}"), PLAN, replace(falling, ended_early=True)).override is None


def test_large_targets_of_a_run_that_has_learnt_nothing_are_scaled_first() -> None:
    job = resolved("device=cpu", "task=regression", "dataset=fake")
    for magnitude, score, is_said in ((1275.0, -7.0, True), (1275.0, 0.9, False), (3.0, -7.0, False)):
        finding = learning(job, PLAN, replace(SCORES, score=score, magnitude=magnitude))
        assert ("the targets are 1,275 in the mean, without their signs: divide them" in str(finding)) == is_said
        assert not is_said or finding.override is None


def test_a_job_that_has_shown_nothing_is_trained_longer() -> None:
    nothing = replace(SCORES, score=50.0)
    assert learning(of_photos(size=16), PLAN, nothing).override == "epochs=40"
    assert learning(of_photos("steps=60", size=16), PLAN, nothing).override == "steps=120"


def test_labels_are_compared_with_a_random_order_whose_average_precision_is_their_share() -> None:
    generator, true = np.random.default_rng(0), np.arange(100) < 30
    chance = np.mean([average_precision_score(true, generator.random(100)) for _ in range(300)])
    assert chance == pytest.approx(0.3, abs=0.04)
    job = resolved("device=cpu", "task=multilabel", "dataset=fake")
    for score, learnt in ((0.3, False), (0.38, False), (0.42, True)):
        line = str(learning(job, PLAN, replace(SCORES, score=score, images=[20, 0, 40])))
        assert f"map {score}; a random order gets 0.3" in line
        assert line.startswith("nothing shown yet: ") != learnt


def test_values_are_compared_with_the_mean_and_with_correlations_by_chance() -> None:
    generator = np.random.default_rng(0)
    true = generator.random(100)
    assert r2_score(true, np.full(100, true.mean())) == 0
    chance = [pearsonr(true, generator.random(100)).statistic ** 2 for _ in range(500)]
    assert np.quantile(chance, 0.95) == pytest.approx(0.0384, rel=0.2)
    job = resolved("device=cpu", "task=regression", "dataset=fake")
    for score, learnt in ((-0.5, False), (0.0, False), (0.038, False), (0.039, True)):
        line = str(learning(job, PLAN, replace(SCORES, score=score)))
        assert f"r2 {score:.4g}; always predicting the mean gets 0" in line
        assert line.startswith("nothing shown yet: ") != learnt


@pytest.mark.parametrize(
    ("losses", "trend"),
    [
        ([1.0, 0.5, 0.5, 0.6], ""),  # risen by 1.2 times, not by more
        ([1.0, 0.5, 0.5, 0.601], "the validation loss has risen since step 2"),
        ([2.0, 1.0, 1.0, 0.95], ""),  # by a twentieth in the last quarter, not by more
        ([2.0, 1.0, 1.0, 0.9499], "the validation loss still falls"),
        ([2.0, 1.9, 1.8, 1.7, 1.6, 1.0, 1.0, 0.94], "the validation loss still falls"),
        ([2.0, 1.9, 1.8, 1.7, 1.6, 0.98, 0.99, 0.94], ""),  # the last quarter of eight evaluations are two
    ],
)
def test_a_trend_is_one_beyond_its_limits(losses: list[float], trend: str) -> None:
    scores = replace(SCORES, losses=[*enumerate(losses, start=1)])
    sentence = learning(resolved("device=cpu"), replace(PLAN, examples=1442), scores).sentence
    assert ("the validation loss" in sentence) == bool(trend)
    assert trend in sentence


@pytest.mark.parametrize(("examples", "advised"), [(999, True), (1000, False)])
def test_fewer_than_a_thousand_images_are_few(examples: int, advised: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo, "missing_weights", lambda name: "")
    finding = learning(of_photos("model=resnet18"), replace(PLAN, examples=examples), SCORES)
    assert (finding.override, finding.another_run) == ("model.pretrained=true" if advised else None, advised)
    falling = replace(SCORES, losses=[*enumerate([1.0, 0.8, 0.6, 0.4], start=1)])
    both = learning(of_photos("model=resnet18"), replace(PLAN, examples=examples), falling)
    assert (both.override, both.another_run) == ("model.pretrained=true" if advised else "epochs=40", advised)


def test_a_model_that_has_learnt_nothing_and_overfits_is_not_trained_longer() -> None:
    risen = replace(SCORES, score=50.0, losses=[*enumerate([1.0, 0.5, 0.7, 0.8], start=1)])
    assert learning(of_photos(size=16), PLAN, risen).override is None
    wide = replace(of_photos(), dataset=Folder(path="photos", decode_size=(16, 64), input_size=(16, 64)))
    assert learning(wide, PLAN, SCORES).override is None, "the shorter side is too short"


@pytest.mark.parametrize(("magnitude", "is_large"), [(30.0, False), (30.1, True)])
def test_targets_above_thirty_are_large(magnitude: float, is_large: bool) -> None:
    job = resolved("device=cpu", "task=regression", "dataset=fake")
    finding = learning(job, PLAN, replace(SCORES, score=-7.0, magnitude=magnitude))
    assert ("divide them" in str(finding)) == is_large


def evidence_of(task: str, scores: dict[str, float], labels: torch.Tensor) -> Evidence:
    job = replace(resolved("device=cpu", "dataset=fake", f"task={task}"), loader=Streaming(workers=1))
    facts: dict[str, Any] = {"world": World.solo(), "plan": PLAN, "model": torch.nn.Linear(1, 1), "steps": 60}
    return Evidence(job=job, **facts, shares={}, spread={}, hardware={}, mfu=0.0, scores=scores, labels=labels)


def test_the_findings_of_a_run_are_those_of_its_whole_labels_and_its_last_epoch(tmp_path: Path) -> None:
    run = RunDir.at(tmp_path / "run")
    figures = [(3, {"acc/train_top1": 10.0}), (6, {"acc/train_epoch_top1": 60.0, "acc/train_top1": 20.0})]
    figures += [(9, {"acc/train_epoch_top1": 80.0, "acc/train_top1": 90.0})]
    figures += [(12, {"acc/train_epoch_top1": 75.5, "acc/train_top1": 30.0})]
    run.metrics.write_text("".join(json.dumps({"step": step, **scalars}) + "\n" for step, scalars in figures))
    info: Any = SimpleNamespace(folder=run.path)

    def sentence_of(task: str, scores: dict[str, float], labels: torch.Tensor) -> str:
        evidence = evidence_of(task, scores, labels)
        facts = Listener(info).findings(evidence)
        assert {"verdict", "learning", "checklist"} == facts.keys()
        assert [item["item"] for item in facts["checklist"]] == [item.item for item in checklist(evidence)]
        assert "not applicable" in {item["state"] for item in facts["checklist"]}, "it says what does not apply, too"
        return str(facts["learning"] and facts["learning"]["sentence"])

    classes = torch.tensor([0, 0, 0, 1, -1, -1])
    shown = sentence_of("multiclass", {"top1": 50.0}, classes)
    assert (
        "50.00 % top-1 (15 to 85 % with 4 images), 75.50 % in training; always saying the largest class gets 75.00 %"
        in shown
    )
    assert shown.endswith("; epochs=40 may help"), "the sentence has the advice"
    assert sentence_of("multiclass", {"top1": 0.0}, classes).startswith("nothing shown yet: 0.00 % top-1")
    assert sentence_of("multiclass", {"top1": float("nan")}, classes) == "None"
    assert sentence_of("multiclass", {"loss": 1.0}, classes) == "None"
    labels = torch.tensor([[1.0, 0.5], [0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [float("nan"), 1.0]])
    assert "a random order gets 0.375" in sentence_of("multilabel", {"map": 0.9}, labels), "half a label is none"
    values = torch.tensor([[-100.0], [100.0], [float("nan")]])
    assert "the targets are 100 in the mean, without their signs" in sentence_of("regression", {"r2": -1.0}, values)
    stopped = replace(evidence_of("multiclass", {"top1": 50.0}, classes), ended_early="it was enough")
    assert Listener(info).findings(stopped)["learning"]["override"] is None


def test_the_evidence_of_what_a_run_has_learnt_says_how_sure_it_is() -> None:
    interval = "95 % interval of a share (Wilson 1927)"
    assert learning(of_photos(), PLAN, SCORES).evidence == interval
    many = replace(SCORES, total=40_000, images=[20_000, 20_000])
    assert learning(of_photos(), PLAN, many).evidence == "", "no interval is shown"
    labels = resolved("device=cpu", "task=multilabel", "dataset=fake")
    assert learning(labels, PLAN, SCORES).evidence == interval
    values = resolved("device=cpu", "task=regression", "dataset=fake")
    says = "with 1,000 images, an R2 up to 0.0038 may be chance"
    for magnitude in (1.0, 100.0):
        scores = replace(SCORES, score=-1.0, total=1000, magnitude=magnitude)
        assert learning(values, PLAN, scores).evidence == says


@pytest.mark.parametrize(
    ("score", "total"),
    [(60.4, 1000), (90.0, 1000), (97.5, 10_000), (50.0, 38_000), (50.0, 39_000), (100 * 5 / 19, 19)],
)
def test_an_interval_is_shown_down_to_one_percentage_point(score: float, total: int) -> None:
    interval = binomtest(round(total * score / 100), total).proportion_ci(method="wilson")
    line = str(learning(of_photos(), PLAN, replace(SCORES, score=score, total=total, images=[total // 2] * 2)))
    assert ("% with" in line) == (100 * (interval.high - interval.low) >= 1)
    shown = f" ({100 * interval.low:.0f} to {100 * interval.high:.0f} % with {total:,} images)"
    assert (shown in line) == ("% with" in line)
