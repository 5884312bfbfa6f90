"""What an evaluation says of its examples: the same on any number of ranks, and nothing of the run changes."""

from __future__ import annotations

import base64
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn import metrics as reference
from torch import Tensor

from helpers import records, train_here
from lockstep.core.errors import InputError
from lockstep.core.figures import BINS, Predictions
from lockstep.core.model import best_classes
from lockstep.core.observer import Observer
from lockstep.core.world import World
from lockstep.scores import Block
from lockstep.telemetry import pictures
from lockstep.training.predictions import SIDE, WORST, CollectedPredictions
from thread_ranks import ThreadRanks

CLASSES, BLOCK = 4, 16
GENERATOR = torch.Generator().manual_seed(0)
LABELS = torch.randint(0, CLASSES, (203,), generator=GENERATOR)
LOGITS = 2 * torch.randn(203, CLASSES, generator=GENERATOR)
LOGITS[torch.arange(203), LABELS] += 1
IMAGES = torch.arange(203).byte()[:, None, None, None].expand(203, 3, 8, 8)
LOSSES = torch.nn.functional.cross_entropy(LOGITS, LABELS, reduction="none")


class Witness(Observer):
    """Keeps what it is told."""

    predictions: Predictions

    def predicted(self, predictions: Predictions) -> None:
        self.predictions = predictions


def collected(
    world: World | None = None,
    *,
    logits: Tensor = LOGITS,
    labels: Tensor = LABELS,
    images: Tensor = IMAGES,
    losses: Tensor = LOSSES,
    names: tuple[str, ...] = (),
    kind: str = "softmax",
) -> Any:
    """The predictions of this rank's blocks, as `evaluate` passes them on; after an evaluation that was cut short."""
    world, witness = world or World.solo(), Witness()
    collector = CollectedPredictions(names, logits.shape[1], world, kind=kind, sample_name=str, observer=witness)
    for end in (BLOCK, len(labels)):
        collector.start()
        for first in range(world.rank * BLOCK, end, BLOCK * world.size):
            of = slice(first, first + BLOCK)
            collector.update(Block(images[of], logits[of], best_classes(logits[of]), labels[of], losses[of], first))
    collector.finish(7)
    return vars(witness).get("predictions")


PROBABILITIES = {"softmax": LOGITS.softmax(1), "sigmoid": LOGITS.sigmoid()}


@pytest.mark.parametrize("kind", PROBABILITIES)
def test_the_counts_are_those_of_scikit_learn(kind: str) -> None:
    predictions, predicted = collected(kind=kind), LOGITS.argmax(1)
    assert predictions.confusion == reference.confusion_matrix(LABELS, predicted).tolist()
    assert predictions.examples == LABELS.bincount().tolist()
    assert predictions.predicted == predicted.bincount().tolist()
    assert predictions.hits == [predictions.confusion[label][label] for label in range(CLASSES)]
    assert predictions.step == 7
    for label, (own, outside) in enumerate(predictions.curves):
        assert (sum(own), sum(own) + sum(outside)) == (predictions.examples[label], len(LABELS))
        certain = PROBABILITIES[kind][:, label] >= 63 / (BINS - 1)
        assert sum(own[63:]) == int((certain & (label == LABELS)).sum())
        assert sum(outside[63:]) == int((certain & (label != LABELS)).sum())


@pytest.mark.parametrize("kind", PROBABILITIES)
def test_the_worst_examples_are_those_with_the_highest_losses(kind: str) -> None:
    worst = collected(kind=kind).worst
    assert [int(example["sample"]) for example in worst] == LOSSES.argsort(descending=True)[:WORST].tolist()
    for example in worst:
        number = int(example["sample"])
        assert (example["label"], example["predicted"]) == (int(LABELS[number]), int(LOGITS[number].argmax()))
        assert example["loss"] == pytest.approx(float(LOSSES[number]))
        assert example["probability"] == pytest.approx(float(PROBABILITIES[kind][number].max()))
        pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(example["png"]))))
        assert pixels.shape == (8, 8, 3)
        assert {*pixels.flatten().tolist()} == {number}


@pytest.mark.parametrize("size", [2, 3, 14])
def test_they_are_the_same_on_any_number_of_ranks(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    main, *no_predictions = ThreadRanks(size, monkeypatch).run(collected)
    assert main == collected()
    assert {*no_predictions} == {None}


def test_broken_images_do_not_count_and_losses_that_are_no_numbers_come_first() -> None:
    labels, losses = LABELS.clone(), LOSSES.clone()
    labels[50:], losses[3] = -1, math.nan
    predictions = collected(labels=labels, losses=losses)
    assert sum(predictions.examples) == sum(map(sum, predictions.confusion)) == 50
    assert (predictions.worst[0]["sample"], predictions.worst[0]["loss"]) == ("3", None)
    few = collected(labels=torch.where(torch.arange(203) < 2, LABELS, -1))
    assert len(few.worst) == 2


def test_a_stage_without_logits_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    def stage(world: World) -> Any:
        of = slice(0, None if world.rank == 1 else 0)
        values = {"logits": LOGITS[of], "labels": LABELS[of], "images": IMAGES[of], "losses": LOSSES[of]}
        return collected(World.solo() if world.size == 1 else world, **values)

    first, _ = ThreadRanks(2, monkeypatch).run(stage)
    assert 0 < sum(first.examples) < len(LABELS)


@pytest.mark.parametrize(("classes", "matrix", "curves"), [(1, True, True), (21, True, False), (101, False, False)])
def test_many_classes_have_no_matrix_and_no_curves(classes: int, matrix: bool, curves: bool) -> None:
    logits = torch.randn(30, classes)
    predictions = collected(
        logits=logits, labels=torch.arange(30) % classes, losses=torch.ones(30), images=IMAGES[:30]
    )
    assert (bool(predictions.confusion), bool(predictions.curves)) == (matrix, curves)
    assert len(predictions.examples) == len(predictions.names) == classes
    assert pictures.worst(predictions).startswith(b"\x89PNG")
    assert not matrix or pictures.heat(predictions).startswith(b"\x89PNG")


@pytest.mark.parametrize("shape", [(1, 5, 9), (2, 4, 4), (3, 300, 200), (4, 4, 4), (3, 1, 1000)])
def test_images_of_any_shape_have_a_small_picture(shape: tuple[int, int, int]) -> None:
    images = torch.zeros((1, *shape), dtype=torch.uint8).expand(203, *shape)
    predictions = collected(images=images)
    size = Image.open(io.BytesIO(base64.b64decode(predictions.worst[0]["png"]))).size
    assert max(size) <= SIDE
    assert pictures.worst(predictions).startswith(b"\x89PNG")


def test_the_file_has_everything_whatever_the_classes_are_called(tmp_path: Path) -> None:
    names = ("</script><script>", "$\\frac{", "日本語\u202e", "\udc80\x00")
    predictions = collected(names=names)
    predictions.write(tmp_path / "validation.json")
    assert Predictions.read(tmp_path / "validation.json") == predictions
    assert predictions.names[:3] == [*names[:3]]
    assert pictures.heat(predictions).startswith(b"\x89PNG")


@pytest.mark.parametrize("text", ["", "[]", "{}", "3", '{"step": 1}', '{"step": 1, "other": 2}'])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "validation.json").write_text(text)
    with pytest.raises(InputError, match=r"validation\.json"):
        Predictions.read(tmp_path / "validation.json")


def test_a_run_has_the_predictions_of_its_best_evaluation(tmp_path: Path) -> None:
    run = train_here(tmp_path / "run", "epochs=2", "model.width=8")
    best = run.read_summary()["best_step"]
    predictions = Predictions.read(run.validation)
    top1 = {line["step"]: line["acc/val_top1"] for line in records(run.path) if "acc/val_top1" in line}
    assert predictions.step == best
    assert 100 * sum(predictions.hits) / sum(predictions.examples) == top1[best]
    assert json.loads(run.validation.read_text())["names"] == [str(digit) for digit in range(10)]
