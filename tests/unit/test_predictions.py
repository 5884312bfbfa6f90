"""What an evaluation says of its examples: the same on any number of ranks, and nothing of the run changes."""

import base64
import io
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn import metrics as reference
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from helpers import records, train_here
from lockstep.core.errors import InputError
from lockstep.core.figures import BINS, Predictions
from lockstep.core.observer import Observer
from lockstep.core.world import World
from lockstep.data.loading.shards import IGNORE_INDEX
from lockstep.scores import EvaluationBlock
from lockstep.tasks import Multiclass, Multilabel, Regression
from lockstep.telemetry import pictures
from lockstep.training.predictions import COLLECTED, MOST_SIDE, SCATTER_POINTS, WORST
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


class Numbered(list[int]):
    """A split whose examples are named by their numbers."""

    name = staticmethod(str)


USUAL: dict[str, Any] = {"logits": LOGITS, "labels": LABELS, "images": IMAGES, "losses": LOSSES}
USUAL |= {"names": (), "kind": "softmax", "task": Multiclass()}


def collected(world: World | None = None, **options: Any) -> Any:
    """The predictions of this rank's blocks, as `evaluate` passes them on; after an evaluation that was cut short."""
    logits, labels, images, losses, names, kind, task = (USUAL | options).values()
    world, witness = world or World.solo(), Witness()
    card: Any = SimpleNamespace(class_names=names, classes=logits.shape[1], probabilities=kind)
    split: Any = Numbered(range(max(1, len(labels))))
    collector = COLLECTED[task.targets](card, split, world, witness)
    for end in (BLOCK, len(labels)):
        collector.start()
        for first in range(world.rank * BLOCK, end, BLOCK * world.size):
            of = slice(first, first + BLOCK)
            collector.update(
                EvaluationBlock(images[of], logits[of], task.predict(logits[of]), labels[of], losses[of], first)
            )
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
    for label, counts in enumerate(predictions.curves):
        assert_curve(counts, LABELS.numpy() == label, PROBABILITIES[kind][:, label].numpy())


@pytest.mark.parametrize("scale", [1, 100, 10_000])
def test_a_curve_of_probabilities_that_round_to_0_or_1_is_that_of_the_logits(scale: int) -> None:
    two = torch.stack([LOGITS[:, 0], -LOGITS[:, 0]], 1)
    for label, counts in enumerate(collected(logits=scale * two, labels=(LABELS != 0).long()).curves):
        assert_curve(counts, ((LABELS == 0) == (label == 0)).numpy(), two[:, label].numpy())
    for label, counts in enumerate(collected(**OF_LABELS, logits=scale * LOGITS).curves[:3]):
        assert_curve(counts, (TRUE[WHOLE, label] > 0.5).numpy(), LOGITS[WHOLE, label].numpy())


def assert_curve(counts: Any, true: Any, scores: Any) -> None:
    """Assert that a curve is on scikit-learn's, at the scores of the examples of the class, or of 126 of them."""
    hits, _, precision, recall = pictures.precision_recall(counts)
    ours = {(round(r, 9), round(p, 9)) for r, p, some in zip(recall, precision, hits, strict=True) if some}
    precision, recall, thresholds = reference.precision_recall_curve(true, scores)
    at = np.append(np.isin(thresholds, scores[true]), False)
    theirs = {(round(r, 9), round(p, 9)) for r, p in zip(recall[at], precision[at], strict=True)}
    whole = (1.0, round(float(true.mean()), 9))  # all examples
    assert ours <= theirs | {whole}
    assert len(ours - {whole}) >= min(len(theirs - {whole}), BINS - 2)


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


@pytest.mark.parametrize("number", [3, BLOCK + 3])
def test_a_loss_that_is_no_number_comes_first_whichever_rank_has_it(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = LOSSES.clone()
    losses[number] = math.nan
    main, _ = ThreadRanks(2, monkeypatch).run(lambda world: collected(world, losses=losses))
    assert [example["sample"] for example in main.worst] == [
        str(number),
        *map(str, [n for n in LOSSES.argsort(descending=True).tolist() if n != number][: WORST - 1]),
    ]


def test_broken_images_do_not_count_and_losses_that_are_no_numbers_come_first() -> None:
    labels, losses = LABELS.clone(), LOSSES.clone()
    labels[50:], losses[3] = -1, math.nan
    predictions = collected(labels=labels, losses=losses)
    assert sum(predictions.examples) == sum(map(sum, predictions.confusion)) == 50
    assert (predictions.worst[0]["sample"], predictions.worst[0]["loss"]) == ("3", None)
    losses[-1] = 1e9
    assert [example["sample"] for example in collected(losses=losses).worst[:2]] == ["3", "202"]
    few = collected(labels=torch.where(torch.arange(203) < 2, LABELS, -1))
    assert len(few.worst) == 2


TRUE = (torch.rand(203, CLASSES, generator=GENERATOR) < 0.3).float()
TRUE[7], TRUE[:, 3] = math.nan, TRUE[:, 3] * 0  # a broken image, and a label that no image has
WHOLE = torch.arange(203) != 7
OF_LABELS: dict[str, Any] = {"labels": TRUE, "kind": "sigmoid", "task": Multilabel(), "losses": LOSSES.flip(0)}
OF_VALUES: dict[str, Any] = {"labels": TRUE + LOGITS / 2, "kind": "values", "task": Regression(), "losses": LOSSES}


def test_a_log_odds_that_is_no_number_is_the_lowest() -> None:
    curves = []
    for value in (math.nan, -1e9):
        logits = LOGITS.clone()
        logits[20:30] = value
        curves.append(collected(**OF_LABELS, logits=logits).curves)
    assert curves[0] == curves[1]


def test_labels_are_counted_as_by_scikit_learn() -> None:
    predictions, true, decisions = collected(**OF_LABELS), TRUE[WHOLE].numpy(), (LOGITS[WHOLE] > 0).numpy()
    counts = reference.multilabel_confusion_matrix(true, decisions)
    assert predictions.hits == counts[:, 1, 1].tolist()
    assert predictions.examples == counts[:, 1].sum(1).tolist()
    assert predictions.predicted == counts[:, :, 1].sum(1).tolist()
    shares = LOGITS.sigmoid()[WHOLE].numpy()
    expected = [reference.average_precision_score(true[:, label], shares[:, label]) for label in range(3)]
    assert predictions.average_precision == [*map(pytest.approx, expected), None]
    assert predictions.confusion == []
    for label, counts in enumerate(predictions.curves[:3]):
        assert_curve(counts, true[:, label] > 0.5, shares[:, label])
    assert not np.array(predictions.curves[3])[0].any(), "a label that no image has"


def test_the_worst_examples_have_their_true_and_their_predicted_labels() -> None:
    predictions = collected(**OF_LABELS, names=("bus", "cat", "dog", "elk"))
    order = [number for number in LOSSES.flip(0).argsort(descending=True).tolist() if number != 7]
    assert [int(example["sample"]) for example in predictions.worst] == order[:WORST]
    for example in predictions.worst:
        number = int(example["sample"])
        assert example["label"] == TRUE[number].nonzero()[:, 0].tolist()
        assert example["predicted"] == (LOGITS[number] > 0).nonzero()[:, 0].tolist()
    assert [predictions.in_words(labels) for labels in ([], [1], [0, 3])] == ["none", "cat", "bus, elk"]
    assert pictures.worst(predictions).startswith(b"\x89PNG")


@pytest.mark.parametrize("factor", [1, 10])
def test_values_have_points_of_predicted_and_true_numbers(factor: int) -> None:
    own = {"labels": OF_VALUES["labels"], "logits": LOGITS, "losses": LOSSES, "images": IMAGES}
    repeated = {key: value.repeat(factor, *[1] * (value.ndim - 1)) for key, value in own.items()}
    predictions = collected(**OF_VALUES | repeated)
    stride = math.ceil(203 * factor / SCATTER_POINTS)
    chosen = [n for n in range(0, 203 * factor, stride) if n % 203 != 7]
    assert len(chosen) <= SCATTER_POINTS
    for value, (true, predicted) in enumerate(predictions.points):
        assert true == repeated["labels"][chosen, value].tolist()
        assert predicted == LOGITS.repeat(factor, 1)[chosen, value].tolist()
    worst = predictions.worst[0]
    number = int(worst["sample"])
    assert worst["label"] == repeated["labels"][number].tolist()
    assert worst["predicted"] == repeated["logits"][number].tolist()
    large = str(np.float32(1234567))
    assert predictions.in_words([0.51, -2.0, None, 1234567.0]) == f"0 0.51, 1 -2, 2 not a number, 3 {large}"
    near = torch.tensor([-311017.26, -311017.28]).tolist()
    assert {predictions.in_words([value, 0.1]) for value in near} == {"0 -311017.25, 1 0.1", "0 -311017.28, 1 0.1"}
    assert pictures.against_true(predictions, 0).startswith("data:image/svg+xml")
    assert pictures.worst(predictions).startswith(b"\x89PNG")


@pytest.mark.parametrize("of", [OF_LABELS, OF_VALUES], ids=["labels", "values"])
@pytest.mark.parametrize("size", [2, 3, 14])
def test_labels_and_values_are_the_same_on_any_number_of_ranks(
    size: int, of: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    main, *_ = ThreadRanks(size, monkeypatch).run(lambda world: collected(world, **of))
    alone = collected(**of)
    assert main == alone
    alone.write(tmp_path / "validation.json")
    assert Predictions.read(tmp_path / "validation.json") == alone


@pytest.mark.parametrize(("number", "curves", "precision"), [(20, 20, 20), (21, 0, 21), (100, 0, 100), (101, 0, 0)])
def test_a_few_labels_have_curves_and_some_an_average_precision(number: int, curves: int, precision: int) -> None:
    ones = torch.ones(30, number)
    wide = {"labels": ones, "logits": ones, "losses": torch.ones(30), "images": IMAGES[:30]}
    predictions = collected(**OF_LABELS | wide)
    assert (len(predictions.curves), len(predictions.average_precision)) == (curves, precision)


def test_a_label_is_true_above_a_half_and_not_at_it() -> None:
    shares = torch.tensor([0.5, 0.5 + 2**-24, 0.5 - 2**-24, 1.0])
    two = {"labels": torch.stack([shares, 1 - shares], 1), "logits": torch.zeros(4, 2), "images": IMAGES[:4]}
    predictions = collected(**OF_LABELS | two | {"losses": torch.tensor([4.0, 3.0, 2.0, 1.0])})
    assert predictions.examples == [2, 1]
    assert [example["label"] for example in predictions.worst] == [[], [0], [1], [0]]


@pytest.mark.parametrize("number", [SCATTER_POINTS - 1, SCATTER_POINTS, SCATTER_POINTS + 1, 2 * SCATTER_POINTS])
def test_every_example_is_a_point_up_to_the_most_points(number: int) -> None:
    values = torch.arange(number)[:, None].float()
    own = {"labels": values, "logits": values, "losses": torch.ones(number)}
    predictions = collected(**OF_VALUES | own | {"images": IMAGES[:1].expand(number, 3, 8, 8)})
    stride = 1 if number <= SCATTER_POINTS else 2
    assert predictions.points[0] == [[*range(0, number, stride)]] * 2


def test_many_labels_have_no_curves_and_values_that_are_no_numbers_no_points() -> None:
    ones = torch.ones(30, 101)
    wide = {"labels": ones, "logits": ones, "losses": torch.ones(30), "images": IMAGES[:30]}
    predictions = collected(**OF_LABELS | wide)
    assert (predictions.hits, predictions.curves, predictions.average_precision) == ([30] * 101, [], ())
    wide["logits"] = wide["logits"] * math.inf
    predictions = collected(**OF_VALUES | wide)
    assert [len(pair) for pair in predictions.points] == [2] * 20
    assert predictions.points[0] == [[1.0] * 30, [None] * 30]
    assert [example["predicted"] for example in predictions.worst] == [[None] * 101] * WORST, "JSON has no infinity"
    assert pictures.against_true(predictions, 0).startswith("data:image/svg+xml")


@pytest.mark.parametrize("options", [{}, OF_LABELS, OF_VALUES], ids=["classes", "labels", "values"])
def test_images_that_are_all_broken_count_nowhere(options: dict[str, Any]) -> None:
    labels = options.get("labels", LABELS)
    broken = torch.full_like(labels, math.nan if labels.is_floating_point() else IGNORE_INDEX)
    predictions = collected(**options | {"labels": broken})
    assert (sum(predictions.examples), sum(predictions.predicted), predictions.worst) == (0, 0, [])
    assert [pair for pair in predictions.points if pair != [[], []]] == []


@pytest.mark.parametrize("options", [{}, OF_LABELS, OF_VALUES], ids=["classes", "labels", "values"])
def test_a_stage_without_logits_takes_part(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def stage(world: World) -> Any:
        of = slice(0, None if world.rank == 1 else 0)
        values = {"logits": LOGITS[of], "images": IMAGES[of], "losses": LOSSES[of]}
        return collected(world, **options | values | {"labels": options.get("labels", LABELS)[of]})

    first, _ = ThreadRanks(2, monkeypatch).run(stage)
    assert len(first.worst) == WORST
    assert 0 < (len(first.points[0][0]) if first.points else sum(first.examples)) < len(LABELS)


@pytest.mark.parametrize(
    ("classes", "matrix", "curves"),
    [(1, True, True), (20, True, True), (21, True, False), (100, True, False), (101, False, False)],
)
def test_many_classes_have_no_matrix_and_no_curves(classes: int, matrix: bool, curves: bool) -> None:
    logits = torch.randn(30, classes)
    labels = torch.arange(30) % classes
    predictions = collected(logits=logits, labels=labels, losses=torch.ones(30), images=IMAGES[:30])
    assert (bool(predictions.confusion), bool(predictions.curves)) == (matrix, curves)
    assert len(predictions.examples) == len(predictions.names) == classes
    assert pictures.worst(predictions).startswith(b"\x89PNG")
    assert not matrix or pictures.heat(predictions).startswith(b"\x89PNG")


def test_a_probability_that_rounds_to_zero_is_zero() -> None:
    logits = LOGITS.clone()
    logits[int(LOSSES.argmax())] = -1000.0
    worst = collected(kind="sigmoid", logits=logits).worst
    assert worst[0]["probability"] == 0
    assert worst[1]["probability"] > 0


@pytest.mark.parametrize(
    ("shape", "shown"),
    [
        *(((1, 5, 9), (9, 5)), ((2, 4, 4), (4, 4)), ((3, 300, 200), (67, 100)), ((4, 4, 4), (4, 4))),
        *(((3, 1, 1000), (125, 1)), ((3, MOST_SIDE, 60), (60, MOST_SIDE)), ((3, 60, MOST_SIDE + 1), (65, 30))),
    ],
)
def test_images_of_any_shape_have_a_small_picture(shape: tuple[int, int, int], shown: tuple[int, int]) -> None:
    images = torch.zeros((1, *shape), dtype=torch.uint8).expand(203, *shape)
    predictions = collected(images=images)
    size = Image.open(io.BytesIO(base64.b64decode(predictions.worst[0]["png"]))).size
    assert size == shown, "(width, height), of which none is longer than most"
    assert pictures.worst(predictions).startswith(b"\x89PNG")


def test_names_that_are_no_text_and_probabilities_that_are_no_numbers_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Numbered, "name", staticmethod(lambda number: f"{number}-\udcff"))
    logits = LOGITS.clone()
    number = int(LOSSES.argmax())
    logits[number] = math.nan
    predictions = collected(logits=logits, names=("a", "b\udcff", "c", "d"))
    assert predictions.names == ["a", "b\\udcff", "c", "d"]
    assert predictions.worst[0]["sample"] == f"{number}-\\udcff"
    assert predictions.worst[0]["probability"] is None
    assert 0 < predictions.worst[1]["probability"] < 1
    predictions.write(tmp_path / "validation.json")
    assert Predictions.read(tmp_path / "validation.json") == predictions
    assert collected().names == ["0", "1", "2", "3"]


@pytest.mark.parametrize("blocks", [1, 2])
def test_equal_losses_are_those_of_the_first_examples_and_no_more_than_there_are(blocks: int) -> None:
    few = slice(blocks * BLOCK - 10)
    own = {"logits": LOGITS[few], "labels": LABELS[few], "images": IMAGES[few]}
    worst = collected(**own, losses=torch.arange(blocks * BLOCK - 10.0)).worst
    number = min(WORST, blocks * BLOCK - 10)
    assert [int(example["sample"]) for example in worst] == [*range(blocks * BLOCK - 10)][::-1][:number]


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


def test_a_file_of_many_classes_is_read_whatever_its_size(tmp_path: Path) -> None:
    predictions = collected(names=tuple(f"{number}{'x' * 2**20}" for number in range(4)))
    predictions.write(file := tmp_path / "validation.json")
    assert file.stat().st_size > 2**22
    assert Predictions.read(file) == predictions


def test_a_run_has_the_predictions_of_its_best_evaluation(tmp_path: Path) -> None:
    run = train_here(tmp_path / "run", "epochs=2", "model.width=8")
    best = run.read_summary()["best_step"]
    predictions = Predictions.read(run.validation)
    top1 = {line["step"]: line["acc/val_top1"] for line in records(run.path) if "acc/val_top1" in line}
    assert predictions.step == best
    assert 100 * sum(predictions.hits) / sum(predictions.examples) == top1[best]
    assert json.loads(run.validation.read_text())["names"] == [str(digit) for digit in range(10)]


@pytest.mark.parametrize("task", ["multilabel", "regression"])
def test_a_run_of_another_task_has_its_predictions(task: str, tmp_path: Path) -> None:
    words = ("dataset=fake", "dataset.size=8", "dataset.classes=3", "model=linear", "logger=[jsonl,tensorboard]")
    run = train_here(tmp_path / "run", *words, f"task={task}", "steps=3", "telemetry.report=always")
    predictions = Predictions.read(run.validation)
    assert predictions.targets == {"multilabel": "labels", "regression": "values"}[task]
    assert len(predictions.worst) == WORST
    assert "of another version" not in run.report.read_text()
    assert run.read_summary()["learning"]["sentence"].startswith("nothing shown yet: ")
    tags = EventAccumulator(str(run.path / "val")).Reload().Tags()
    assert tags["images"] == ["images/worst"]
    assert ("precision_recall/2" in tags["tensors"]) == (task == "multilabel")
    header = run.table.read_text().partition("\n")[0]
    assert header.endswith({"multilabel": "map,f1,subset_accuracy", "regression": "mae,rmse,r2"}[task])
