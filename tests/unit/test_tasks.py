"""The tasks: their scores, distillation from a trained network, and tasks of one's own."""

import hashlib
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sklearn.metrics as reference
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from helpers import FAKE, built, records, resolved, train_here, weights
from lockstep import metrics
from lockstep.checkpoint.weights import read_card
from lockstep.core.batch import Batch
from lockstep.core.errors import InputError
from lockstep.core.model import is_broken
from lockstep.core.run_dir import RunDir
from lockstep.core.world import World
from lockstep.losses import MSE, Huber, MaskedLoss
from lockstep.precision import BF16
from lockstep.scores import EvaluationBlock, Scores
from lockstep.tasks import Distill, Multiclass, Multilabel, Regression
from lockstep.training.resolved_job import card_of
from thread_ranks import ThreadRanks

K, BLOCK = 5, 8
SMALL = (*FAKE, "augment=none", "dataset.classes=3", "dataset.examples=40", "batch=8")
JOB = (*SMALL, "model=linear", "epochs=2", "device=cpu", "telemetry.interval=3")
LABEL_METRICS = {
    "map": (metrics.AveragePrecision(), lambda y, p: reference.average_precision_score(y, p, average="macro")),
    "auroc": (metrics.AUROC(average="weighted"), lambda y, p: reference.roc_auc_score(y, p, average="weighted")),
    "subset": (metrics.SubsetAccuracy(), lambda y, p: reference.accuracy_score(y, p > 0)),
}


def decided(score: Any, average: str) -> Any:
    return lambda y, p: score(y, p > 0, average=average, zero_division=0)


for average in ("macro", "micro", "weighted"):
    LABEL_METRICS[f"f1 {average}"] = (metrics.F1(average=average), decided(reference.f1_score, average))
LABEL_METRICS["recall"] = (metrics.Recall(), decided(reference.recall_score, "macro"))
LABEL_METRICS["precision"] = (metrics.Precision(), decided(reference.precision_score, "macro"))
VALUE_METRICS = {
    "mae": (metrics.MAE(), reference.mean_absolute_error),
    "rmse": (metrics.RMSE(), reference.root_mean_squared_error),
    "r2": (metrics.R2(), reference.r2_score),
}


def scores_of(
    ranks: int, chosen: dict[str, Any], outputs: Tensor, labels: Tensor, kind: str, targets: str, monkeypatch: Any
) -> dict[str, float]:
    """The scores of blocks that are dealt to ranks."""

    def score(world: World) -> dict[str, float]:
        scores = Scores(chosen, outputs.shape[1], (), world, kind, targets)
        rounds = -(-len(outputs) // (BLOCK * ranks))
        for turn in range(rounds):
            first = (turn * ranks + world.rank) * BLOCK
            of = slice(first, first + BLOCK)
            if first < len(outputs):
                scores.update(
                    EvaluationBlock(outputs[of], outputs[of], outputs[of], labels[of], outputs[of, 0], first)
                )
            else:
                scores.update_without()
        return scores.compute()

    return score(World.solo()) if ranks == 1 else ThreadRanks(ranks, monkeypatch).run(score)[0]


@pytest.mark.parametrize("scale", [1, 100])  # with 100, float32 rounds most probabilities to 0 or 1
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_scores_of_labels_are_those_of_scikit_learn_on_any_ranks(
    ranks: int, scale: int, monkeypatch: Any
) -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.rand(43, K, generator=generator).lt(0.4).float()
    outputs = scale * (torch.randn(43, K, generator=generator) + labels)
    labels[7], outputs[7] = torch.nan, 50.0  # a broken image counts nothing
    whole = ~is_broken(labels)
    chosen = {name: metric for name, (metric, _) in LABEL_METRICS.items()}
    scored = scores_of(ranks, chosen, outputs, labels, "sigmoid", "labels", monkeypatch)
    assert scored == scores_of(1, chosen, outputs, labels, "sigmoid", "labels", monkeypatch), "to the bit"
    y, odds = labels[whole].numpy().astype(int), outputs[whole].numpy()
    for name, (_, expected) in LABEL_METRICS.items():
        assert scored[name] == pytest.approx(expected(y, odds), rel=1e-12), name


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_scores_of_values_are_those_of_scikit_learn_on_any_ranks(ranks: int, monkeypatch: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    labels, outputs = torch.randn(2, 43, 2, generator=generator)
    labels[3, 1] = torch.nan
    whole = ~is_broken(labels)
    chosen = {name: metric for name, (metric, _) in VALUE_METRICS.items()}
    scored = scores_of(ranks, chosen, outputs, labels, "values", "values", monkeypatch)
    assert scored == scores_of(1, chosen, outputs, labels, "values", "values", monkeypatch), "to the bit"
    for name, (_, expected) in VALUE_METRICS.items():
        right = expected(labels[whole].double(), outputs[whole].double())
        assert scored[name] == pytest.approx(right, rel=1e-12), name


def test_a_label_that_no_image_has_counts_for_no_average(monkeypatch: Any) -> None:
    labels = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    outputs = torch.tensor([[2.0, 1.0, 1.0], [-1.0, 1.0, -1.0]])
    by_label = {"f1": metrics.F1(average="none"), "auroc": metrics.AUROC(average="none"), "mean": metrics.F1()}
    scored = scores_of(1, by_label, outputs, labels, "sigmoid", "labels", monkeypatch)
    values = [scored[f"{name}/{label}"] for name in ("f1", "auroc") for label in range(3)]
    assert values == pytest.approx([1.0, np.nan, 2 / 3, 1.0, np.nan, np.nan], nan_ok=True)
    assert scored["mean"] == pytest.approx((1 + 2 / 3) / 2)


@pytest.mark.parametrize(("loss", "expected"), [(MSE(), F.mse_loss), (Huber(delta=0.5), F.huber_loss)])
def test_a_loss_of_values_is_the_mean_of_torchs_over_the_values(loss: Any, expected: Any) -> None:
    outputs, targets = torch.randn(2, 6, 3, dtype=torch.float64)
    options = {"delta": 0.5} if isinstance(loss, Huber) else {}
    losses = loss.build(3, targets)(outputs, targets)
    torch.testing.assert_close(losses.mean(), expected(outputs, targets, **options))


@pytest.mark.parametrize("loss", [MSE(), Huber()])
def test_a_broken_image_has_no_gradient_among_values(loss: Any) -> None:
    outputs = torch.randn(4, 2, requires_grad=True)
    labels = torch.randn(4, 2)
    labels[1, 0] = torch.nan
    masked = MaskedLoss(loss.build(2, labels), tolerates_broken=True)
    losses = masked.counted(masked(outputs, labels), labels)
    losses.sum().backward()
    assert outputs.grad is not None
    assert (outputs.grad.abs().sum(1) > 0).tolist() == [True, False, True, True]
    assert losses[1] == 0


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return train_here(tmp_path_factory.mktemp("teacher") / "run", *JOB)


def test_distillation_is_the_formula_of_its_paper_with_the_teachers_own_pixels(tmp_path: Path) -> None:
    own = ("input.mean=[0.1]", "input.std=[0.5]")
    teacher = train_here(tmp_path / "teacher", *JOB, *own, "precision=fp64")
    job = resolved(*JOB, "task=distill", f"task.teacher={teacher.path}", "task.temperature=3", "task.share=0.7")
    task = job.task.ready(card_of(job), torch.device("cpu"))
    pixels, targets = torch.rand(6, 1, 8, 8, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2])
    outputs = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    (mean,), (std,) = job.input.mean, job.input.std
    loss, logged = partial(F.cross_entropy, reduction="none"), dict[str, Tensor]()
    losses, _ = task.losses(Batch((pixels - mean) / std, targets, lambda images: outputs, loss, logged.__setitem__))
    network = built(*JOB).model.build(3, (1, 8, 8)).double()
    network.load_state_dict(load_file(teacher.weights))
    with torch.no_grad():
        taught = network((pixels - 0.1) / 0.5)
    distance = (F.softmax(taught / 3, 1) * (F.log_softmax(taught / 3, 1) - F.log_softmax(outputs / 3, 1))).sum(1)
    expected = 0.3 * loss(outputs, targets) + 0.7 * 9 * distance
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(logged["distill/kl"], distance)
    losses.sum().backward()
    assert outputs.grad is not None


def test_a_distilled_run_logs_its_figure_and_resumes_only_with_its_teacher(tmp_path: Path, teacher: RunDir) -> None:
    job = (*JOB, "task=distill", f"task.teacher={teacher.path}")
    run = train_here(tmp_path / "run", *job)
    assert [line["step"] for line in records(run) if "distill/kl" in line] == [3, 6, 9, 10]
    split = train_here(tmp_path / "split", *job, stop_at=4)
    split = train_here(tmp_path / "split", *job)
    logged, again = ([line.get("distill/kl") for line in records(of)] for of in (run, split))
    assert logged == again, "to the bit, with a window that a stop cut"
    assert not [name for name, value in weights(run).items() if not torch.equal(value, weights(split)[name])]
    with pytest.raises(InputError, match=r"task: here Distill\(\) teacher \w+, there Distill\(\) teacher \w+"):
        train_here(tmp_path / "run", *JOB, "task=distill", f"task.teacher={run.path}", "epochs=3")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("task.teacher=nowhere",), "task.teacher: there are no weights at nowhere"),
        (("dataset.classes=4",), "task.teacher: the classes of .* are 3, but this job has 4; train the"),
        (("dataset.size=9",), r"task.teacher: the input_shape of .* are \(1, 8, 8\), but this job has"),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused(
    words: tuple[str, ...], expected: str, tmp_path: Path, teacher: RunDir
) -> None:
    with pytest.raises(InputError, match=expected):
        train_here(tmp_path / "run", *JOB, "task=distill", f"task.teacher={teacher.path}", *words)


@pytest.mark.parametrize(
    ("key", "value"), [("classes", 4), ("class_names", ("b", "a", "c")), ("input_shape", (1, 8, 9))]
)
def test_a_teacher_of_other_classes_or_images_is_refused(key: str, value: Any, teacher: RunDir) -> None:
    card = replace(read_card(teacher.weights), **{key: value})
    with pytest.raises(InputError, match=f"task.teacher: the {key} of .* are .*, but this job has"):
        Distill(teacher=str(teacher.weights)).ready(card, torch.device("cpu"))


def test_a_probability_of_a_half_is_no_label_in_the_scores_and_in_the_prediction(monkeypatch: Any) -> None:
    outputs = torch.tensor([[0.0, 1.0], [0.0, -1.0]])
    labels = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    chosen = {"recall": metrics.Recall(average="none"), "subset": metrics.SubsetAccuracy()}
    scored = scores_of(1, chosen, outputs, labels, "sigmoid", "labels", monkeypatch)
    assert scored == {"recall/0": 0.0, "recall/1": 1.0, "subset": 0.0}
    assert Multilabel().predict(outputs).tolist() == [[False, True], [False, False]]
    outputs, labels = torch.tensor([[1.0, 1.0], [-1.0, -1.0]]), torch.tensor([[1.0, 1.0], [0.5, 0.0]])
    scored = scores_of(1, chosen, outputs, labels, "sigmoid", "labels", monkeypatch)
    assert scored == {"recall/0": 1.0, "recall/1": 1.0, "subset": 1.0}, "half a label is none either"


@pytest.mark.parametrize("classes", [2, 4, 5, 6, 9])
def test_the_five_first_classes_are_those_of_a_plain_ranking_or_all(classes: int) -> None:
    torch.manual_seed(classes)
    outputs, labels = torch.randn(60, classes), torch.randint(classes, (60,))
    predicted = Multiclass().predict(outputs)
    assert torch.equal(predicted, outputs.argsort(1, descending=True)[:, :5])
    places = [
        sorted(row, reverse=True).index(row[label]) for row, label in zip(outputs.tolist(), labels, strict=True)
    ]
    right = [sum(place < most for place in places) for most in (1, 5)]
    assert Multiclass().counts(predicted, labels).tolist() == right
    assert (right[1] == 60) == (classes <= 5)


def test_a_teacher_is_known_by_the_first_16_letters_of_its_hash(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"weights")
    digest = hashlib.sha256(b"weights").hexdigest()
    assert Distill(teacher=str(tmp_path / "weights")).identity() == {"teacher": digest[:16]}


def test_a_resume_may_change_the_values_of_a_task_that_does_not_say_otherwise() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Tilted(Multiclass):
        tilt: float = 0.5

    assert Tilted(tilt=2.0).identity() == {}


def test_a_teacher_has_a_place_that_does_not_depend_on_the_folder_of_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model.safetensors").touch()
    for name in ("run", "run/model.safetensors"):
        task = Distill(teacher=name, temperature=2.0).absolute()
        assert task == Distill(teacher=f"{tmp_path}/run/model.safetensors", temperature=2.0)


@pytest.mark.numerics
def test_a_teacher_sees_the_pixels_on_the_device_and_in_the_format_of_its_own_without_a_gradient(
    teacher: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, images: Tensor) -> Tensor:
            seen.append((images.dtype, torch.is_grad_enabled(), images.double().flatten().tolist()))
            taught: Tensor = self.layer(images.flatten(1))
            assert taught.dtype == torch.bfloat16, "its weights have another format"
            return taught

    def load(path: str, *, device: str) -> Any:
        seen.append((path, device))
        return network

    seen: list[Any] = []
    card = replace(read_card(teacher.weights), mean=(0.5,), std=(0.25,))
    network = SimpleNamespace(card=replace(card, mean=(0.25,), std=(0.5,)), model=Network())
    network.precision, network.device = BF16(), torch.device("cpu")
    monkeypatch.setattr("lockstep.training.trained.load_trained", load)
    task = Distill(teacher="a/run").ready(card, torch.device("cuda", 1))
    assert seen.pop() == ("a/run", "cuda:1")
    outputs = torch.zeros(1, 2, requires_grad=True)
    pixels = torch.tensor([0.5, 1.0]).view(1, 1, 1, 2)
    losses, _ = task.losses(
        Batch((pixels - 0.5) / 0.25, torch.tensor([0]), lambda _: outputs, lambda *_: torch.zeros(1), lambda *_: None)
    )
    assert seen == [(torch.bfloat16, False, [0.5, 1.5])], "(0.5 - 0.25) / 0.5 and (1 - 0.25) / 0.5"
    assert (losses.dtype, losses.requires_grad) == (torch.float32, True)


def test_a_stage_with_fewer_outputs_learns_from_the_teacher_of_their_images(teacher: RunDir) -> None:
    job = resolved(*JOB, "task=distill", f"task.teacher={teacher.path}", "task.temperature=2", "task.share=0.25")
    task = job.task.ready(card_of(job), torch.device("cpu"))
    pixels, targets = torch.rand(6, 1, 8, 8), torch.tensor([0, 1, 2, 0, 1, 2])
    outputs = torch.randn(6, 3)
    loss = MaskedLoss(job.loss.build(3, targets), tolerates_broken=False)

    def losses_of(number: int) -> tuple[Tensor, Tensor]:
        logged = dict[str, Tensor]()
        batch = Batch(pixels, targets, lambda images: outputs[:number], loss, logged.__setitem__)
        losses, own = task.losses(batch)
        assert torch.equal(own, outputs[:number])
        return losses, logged["distill/kl"]

    whole, fewer = losses_of(6), losses_of(4)
    for all_six, first_four in zip(whole, fewer, strict=True):
        torch.testing.assert_close(first_four, all_six[:4])
    hard = F.cross_entropy(outputs, targets, reduction="none")
    torch.testing.assert_close(whole[0], 0.75 * hard + 0.25 * 4 * whole[1])


def test_values_are_their_own_prediction() -> None:
    outputs = torch.randn(4, 2)
    assert Regression().predict(outputs) is outputs
