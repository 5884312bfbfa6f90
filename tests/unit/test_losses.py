"""The losses, compared with the formulas of their papers and with other implementations."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight
from timm.loss import BinaryCrossEntropy, LabelSmoothingCrossEntropy
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.ops import sigmoid_focal_loss

from helpers import train_here
from lockstep.core.errors import InputError
from lockstep.losses import (
    BCE,
    MSE,
    CrossEntropy,
    Focal,
    Huber,
    MaskedLoss,
    check_losses,
    class_shares,
    probabilities_of,
)
from lockstep.tasks import Multiclass, Multilabel, Regression

pytestmark = pytest.mark.numerics

CLASSES = 5
LABELS = torch.tensor([0, 0, 0, 1, 1, 2, 3, 4])
LOGITS = torch.randn(8, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
SHARES = LOGITS.flip(0).softmax(1)
WEIGHTS = [1.0, 2.0, 0.5, 3.0, 0.0]
LOSSES: dict[str, Any] = {
    "cross_entropy": CrossEntropy(label_smoothing=0.1, class_weights=WEIGHTS),
    "bce": BCE(label_smoothing=0.1),
    "bce_sum": BCE(sum_classes=True, threshold=0.2),
    "focal": Focal(class_weights=WEIGHTS),
}


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_labels_is_that_of_their_one_hot_shares(name: str) -> None:
    loss = LOSSES[name].build(CLASSES, LABELS)
    close(loss(LOGITS, LABELS), loss(LOGITS, F.one_hot(LABELS, CLASSES).double()))


@pytest.mark.parametrize("targets", [LABELS, SHARES], ids=["labels", "shares"])
@pytest.mark.parametrize("name", LOSSES)
def test_an_example_has_the_same_loss_alone(name: str, targets: Tensor) -> None:
    loss = LOSSES[name].build(CLASSES, LABELS)
    alone = [loss(LOGITS[at : at + 1], targets[at : at + 1]) for at in range(len(LABELS))]
    close(torch.cat(alone), loss(LOGITS, targets))
    assert loss(LOGITS[:0], targets[:0]).shape == (0,)


def test_smoothing_is_that_of_timm() -> None:
    loss = CrossEntropy(label_smoothing=0.1).build(CLASSES, LABELS)
    close(loss(LOGITS, LABELS).mean(), LabelSmoothingCrossEntropy(0.1)(LOGITS, LABELS))


@pytest.mark.parametrize("sum_classes", [False, True])
@pytest.mark.parametrize("threshold", [None, 0.2])
def test_bce_is_that_of_timm(sum_classes: bool, threshold: float | None) -> None:
    loss = BCE(label_smoothing=0.1, threshold=threshold, sum_classes=sum_classes).build(CLASSES, LABELS)
    theirs = BinaryCrossEntropy(0.1, threshold, sum_classes=sum_classes)  # its mean over the examples
    close(loss(LOGITS, LABELS).mean(), theirs(LOGITS, LABELS))


def test_with_two_classes_the_focal_loss_is_that_of_torchvision() -> None:
    labels = LABELS % 2
    loss = Focal(gamma=1.5).build(2, labels)
    margin = LOGITS[:, 1] - LOGITS[:, 0]
    close(loss(LOGITS[:, :2], labels), sigmoid_focal_loss(margin, labels.double(), alpha=-1, gamma=1.5))


def test_the_focal_loss_of_a_certain_prediction_has_a_gradient() -> None:
    logits = torch.tensor([[1000.0, 0.0], [0.0, 1000.0]], requires_grad=True)
    Focal(gamma=0.5).build(2, LABELS % 2)(logits, torch.tensor([0, 0])).sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


WEIGHTED: dict[str, tuple[Callable[..., Any], dict[str, float], float]] = {
    "cross_entropy": (CrossEntropy, {}, 0.0),
    "smoothed": (CrossEntropy, {"label_smoothing": 0.1}, 0.1),
    "smoothed more": (CrossEntropy, {"label_smoothing": 0.3}, 0.3),
    "focal": (Focal, {"gamma": 2.0}, 0.0),
}


@pytest.mark.parametrize("targets", [LABELS, SHARES], ids=["labels", "shares"])
@pytest.mark.parametrize("weights", [None, WEIGHTS, [0.0, 1.0, 5.0, 0.0, 1e6]])
@pytest.mark.parametrize("name", WEIGHTED)
def test_a_mixed_loss_is_share_times_weight_times_the_loss_of_each_class(
    name: str, weights: list[float] | None, targets: Tensor
) -> None:
    kind, options, smoothing = WEIGHTED[name]
    gamma = options.get("gamma", 0.0)
    expected = torch.zeros(8, dtype=torch.float64)
    for label in range(CLASSES):
        share = targets[:, label] if targets.ndim == 2 else (targets == label).double()
        of_class = torch.zeros(8, dtype=torch.float64)
        for other in range(CLASSES):  # the target of the class, smoothed
            log_p = -F.cross_entropy(LOGITS, torch.full((8,), other), reduction="none")
            target = (1 - smoothing) * (other == label) + smoothing / CLASSES
            of_class -= target * (1 - log_p.exp()) ** gamma * log_p
        expected += share * (1.0 if weights is None else weights[label]) * of_class
    close(kind(class_weights=weights, **options).build(CLASSES, LABELS)(LOGITS, targets), expected)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("name", WEIGHTED)
def test_on_equal_images_balanced_classes_are_equally_probable(name: str, mixed: bool) -> None:
    kind, options, _ = WEIGHTED[name]
    labels = torch.tensor([0] * 9 + [1])
    targets = F.one_hot(labels).double()
    if mixed:
        targets = (0.8 * targets[:, None] + 0.2 * targets).flatten(0, 1)  # every example with every partner
    loss = kind(balanced=True, **options).build(2, labels)
    logits = torch.tensor([1.0, -1.0], dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS([logits], max_iter=100, tolerance_grad=1e-12, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        solver.zero_grad()
        value: Tensor = loss(logits.expand(len(targets), 2), targets).mean()
        value.backward()
        return value

    solver.step(closure)
    assert logits.softmax(0)[1].item() == pytest.approx(0.5, abs=1e-6)


@pytest.mark.parametrize("labels", [[0, 0, 1], [2, 2, 2, 0], [1]])
def test_balanced_weights_are_those_of_scikit_learn_for_the_classes_with_examples(labels: list[int]) -> None:
    weights = CrossEntropy(balanced=True).weights(3, torch.tensor(labels))
    assert weights is not None
    assert weights.isfinite().all()
    present = np.unique(labels)
    expected = compute_class_weight("balanced", classes=present, y=labels)
    torch.testing.assert_close(weights[present], torch.from_numpy(expected).float())


@pytest.mark.parametrize("name", LOSSES)
def test_an_evaluation_has_neither_smoothing_nor_weights(name: str) -> None:
    loss = LOSSES[name]
    plain = {"label_smoothing": 0.0, "class_weights": None}
    bare = replace(loss, **{key: value for key, value in plain.items() if key in vars(loss)})
    close(loss.build(CLASSES, LABELS).eval()(LOGITS, LABELS), bare.build(CLASSES, LABELS)(LOGITS, LABELS))


@pytest.mark.parametrize("targets", [LABELS, SHARES], ids=["labels", "shares"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_broken_image_counts_nothing(name: str, targets: Tensor) -> None:
    losses = MaskedLoss(LOSSES[name].build(CLASSES, LABELS), tolerates_broken=True)
    labels = LABELS.clone()
    labels[3] = -100
    marked = labels if targets.ndim == 1 else targets
    logits = LOGITS.clone().requires_grad_()
    loss = losses.counted(losses(logits, marked), labels).sum()
    loss.backward()
    assert logits.grad is not None
    assert not logits.grad[3].any()
    whole = [at for at in range(8) if at != 3]
    close(loss.detach(), losses(LOGITS[whole], targets[whole]).sum())


@pytest.mark.parametrize("targets", [LABELS, SHARES], ids=["labels", "shares"])
@pytest.mark.parametrize("number", [0, 1, 5, 7, 8])
def test_fewer_logits_are_those_of_the_first_examples(targets: Tensor, number: int) -> None:
    losses = MaskedLoss(CrossEntropy().build(CLASSES, LABELS), tolerates_broken=True)
    close(losses(LOGITS[:number], targets), losses(LOGITS, targets)[:number])


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (
            CrossEntropy(class_weights=[1.0, 2.0]),
            r"loss\.class_weights has 2 numbers, expected 5, .* loss\.balanced=",
        ),
        (Focal(class_weights=WEIGHTS, balanced=True), r"loss\.balanced=true and loss\.class_weights both"),
    ],
)
def test_weights_that_do_not_fit_are_refused(loss: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        loss.build(CLASSES, LABELS)


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        (nn.CrossEntropyLoss(), r"shape \(\) for 4 examples, expected \(4,\), .* reduction=\"none\""),
        (nn.Linear(10, 1), "has parameters, which no optimizer trains"),
        (nn.BCEWithLogitsLoss(reduction="none"), r"shape \(4, 10\) for 4 examples"),  # of mixed images: shares
    ],
)
def test_a_loss_without_a_value_per_example_is_refused_before_the_first_step(
    module: nn.Module, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CrossEntropy, "build", lambda self, classes, labels: module)
    with pytest.raises(InputError, match=sentence):
        train_here(tmp_path / "run", "steps=1", f"train.mixup={float(isinstance(module, nn.BCEWithLogitsLoss))}")


def test_a_target_that_is_the_threshold_becomes_0_as_in_timm() -> None:
    shares = torch.tensor([[0.25, 0.75, 0.0], [0.5, 0.25, 0.25]], dtype=torch.float64)
    loss = BCE(threshold=0.25).build(3, LABELS)
    theirs = BinaryCrossEntropy(0.0, 0.25)
    for module in (loss, loss.eval()):
        close(module(LOGITS[:2, :3], shares).mean(), theirs(LOGITS[:2, :3], shares))


OF_VALUES: dict[str, Any] = {"mse": MSE(), "huber": Huber(delta=0.5)}
OF_CLASSES = LOSSES | {"threshold": BCE(threshold=0.2)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", [*OF_CLASSES, *OF_VALUES])
def test_a_loss_has_the_type_of_its_logits_whatever_its_targets_have(name: str, dtype: torch.dtype) -> None:
    loss = {**OF_CLASSES, **OF_VALUES}[name].build(CLASSES, LABELS)
    for targets in (SHARES, SHARES.float()) if name in OF_VALUES else (LABELS, SHARES, SHARES.float()):
        losses = loss(LOGITS.to(dtype), targets)
        assert (losses.dtype, losses.shape) == (dtype, (8,))


def test_a_negative_label_has_a_share_of_no_class() -> None:
    shares = class_shares(torch.tensor([2, -100, 0]), torch.zeros(3, 3))
    assert shares.tolist() == [[0.0, 0.0, 1.0], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0]]


def test_broken_images_have_no_part_in_balanced_weights() -> None:
    labels = torch.tensor([0, -100, 1, 1, -100, 1])
    weights = CrossEntropy(balanced=True).weights(3, labels)
    assert weights is not None
    assert weights[:2].tolist() == pytest.approx([4 / (2 * 1), 4 / (2 * 3)])
    assert weights.dtype == torch.float32


def test_of_a_loss_without_class_weights_all_classes_weigh_the_same() -> None:
    for loss in (CrossEntropy(), Focal(), BCE(), MSE(), Huber()):
        assert loss.weights(CLASSES, LABELS) is None
    chosen = CrossEntropy(class_weights=[1.0, 0.5]).weights(2, LABELS)
    assert chosen is not None
    assert chosen.tolist() == [1.0, 0.5]
    module = CrossEntropy(class_weights=[1.0, 0.5]).build(2, LABELS)
    assert [name for name, _ in module.named_buffers()] == ["weights"], "which go to the device of the network"


@pytest.mark.parametrize("tolerates", [False, True])
def test_labels_of_a_loss_are_left_alone_where_no_image_may_be_broken(tolerates: bool) -> None:
    class Seen(nn.Module):
        def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
            seen.append(targets)
            return logits[:, 0]

    seen: list[Tensor] = []
    masked = MaskedLoss(Seen(), tolerates_broken=tolerates)
    labels, shares = torch.tensor([3, -100]), torch.tensor([[0.5, torch.nan], [-1.0, 2.0]])
    for targets in (labels, shares):
        masked(torch.zeros(2, 2), targets)
    expected = ([3, 0], [[0.5, 0.0], [-1.0, 2.0]]) if tolerates else (labels.tolist(), shares.tolist())
    assert str([targets.tolist() for targets in seen]) == str([*expected])


@pytest.mark.parametrize("number", [0, 1, 3])
def test_of_fewer_losses_those_of_broken_images_are_zero(number: int) -> None:
    masked, losses = MaskedLoss(nn.Identity(), tolerates_broken=True), torch.ones(3)
    labels = torch.tensor([-100, 1, -100, 2])
    values = torch.tensor([[torch.nan, 0.0], [1.0, 1.0], [0.0, torch.nan], [2.0, 2.0]])
    for targets in (labels, values):
        assert masked.counted(losses[:number], targets).tolist() == [0.0, 1.0, 0.0][:number]


def test_the_task_says_what_probabilities_are_before_the_loss_does() -> None:
    for task, loss, expected in (
        (Multiclass(), CrossEntropy(), "softmax"),
        (Multiclass(), BCE(), "sigmoid"),
        (Multilabel(), CrossEntropy(), "sigmoid"),
        (Regression(), BCE(), "values"),
    ):
        assert probabilities_of(task, loss) == expected


def test_a_loss_of_another_shape_is_named_with_what_was_expected() -> None:
    check_losses("it", torch.zeros(4), 4)
    for losses, shape in ((torch.zeros(()), r"\(\)"), (torch.zeros(3), r"\(3,\)"), (torch.zeros(4, 1), r"\(4, 1\)")):
        sentence = (
            rf"^it gives a tensor of shape {shape} for 4 examples, expected \(4,\), a number for each; .*=\"none\"$"
        )
        with pytest.raises(InputError, match=sentence):
            check_losses("it", losses, 4)


@pytest.mark.parametrize("weight", [1e-30, 1e-12, 1e6])
def test_a_weight_of_any_size_is_a_factor(weight: float) -> None:
    logits = LOGITS.float()
    for kind in (CrossEntropy, Focal):
        weighted = kind(class_weights=[weight] * CLASSES).build(CLASSES, LABELS)(logits, LABELS)
        plain = kind().build(CLASSES, LABELS)(logits, LABELS)
        torch.testing.assert_close(weighted.double() / weight, plain.double(), rtol=1e-5, atol=0)
