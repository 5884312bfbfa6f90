"""Objects of a program in the place of words: what stands for them, what a config has of them, what is refused."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

from lockstep.config.options import option_name
from lockstep.core.errors import InputError
from lockstep.core.observer import Callback
from lockstep.losses import CrossEntropy
from lockstep.metrics import F1, Recall
from lockstep.models.nets import DigitNet
from lockstep.optim import SGD
from lockstep.precision import BF16
from lockstep.telemetry.loggers import JSONL, TensorBoard
from lockstep.training import objects
from lockstep.training.objects import (
    DatasetObject,
    LossObject,
    ModelObject,
    changed_words,
    check_given,
    code_parts,
    digest,
    in_words,
    stand_in,
    with_module,
)

TORCH_SGD = torch.optim.SGD(nn.Linear(1, 1).parameters())
IMAGES = TensorDataset(torch.zeros(4, 1, 8, 8), torch.tensor([0, 1, 0, 1]))


def my_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits, targets, reduction="none")


def test_a_module_and_a_function_are_stood_for_by_their_types_and_their_weights() -> None:
    net = nn.Linear(64, 10)
    model = stand_in("model", net)
    assert (type(model), model.type, model.module) == (ModelObject, "Linear", "torch.nn.modules.linear")
    assert model.weights == digest(net)
    of_torch = ("CrossEntropyLoss", "torch.nn.modules.loss")
    for function, of in ((my_loss, ("my_loss", __name__)), (nn.CrossEntropyLoss(reduction="none"), of_torch)):
        loss = stand_in("loss", function)
        assert (type(loss), loss.type, loss.module) == (LossObject, *of)
        assert vars(loss)["original"] is function
    option, dataset = SGD(lr=0.5), DatasetObject(original=(IMAGES, None, None))
    assert stand_in("optimizer", option) is option
    assert stand_in("dataset", dataset) is dataset


@pytest.mark.parametrize(
    ("group", "value", "sentence"),
    [
        ("model", 3, "model is an object of int, expected a torch.nn.Module, or an object of a class with"),
        ("model", LossObject(original=my_loss), "model is an object of LossObject, expected a torch.nn.Module"),
        ("loss", 3, "loss is an object of int, expected a function or a torch.nn.Module, or an object of a class"),
        ("optimizer", 3, r'optimizer is an object of int, expected an object of a class with @lockstep.option\("opt'),
        ("dataset", [1], r"dataset is an object of list.*; Datasets of torch, .* are lockstep.dataset\(train="),
        ("dataset", DataLoader(IMAGES), "dataset is an object of DataLoader, .*LOADER.dataset, are lockstep.dataset"),
        ("optimizer", "sgd", r'optimizer is a text, expected .* by a word: \["optimizer=sgd"\]$'),
        ("model", nn.Flatten, r"model is the class Flatten, expected an object of it: model=Flatten\(...\)$"),
        ("optimizer", SGD, r"optimizer is the class SGD, expected an object of it: optimizer=SGD\(...\)$"),
        ("callback", JSONL, r"callback is the class JSONL, expected an object of it: callback=JSONL\(...\)$"),
        ("optimizer", TORCH_SGD, r": lockstep\.optim\.SGD\(lr=\.\.\.\), or the word optimizer=sgd$"),
        ("optimizer", torch.optim.SGD, r"optimizer is the class SGD, .*: lockstep\.optim\.SGD\(lr=\.\.\.\), or"),
        ("optimizer", torch.optim.RMSprop, "; the words are optimizer=timm optimizer.opt=rmsprop$"),
        ("schedule", StepLR(TORCH_SGD, 1), r": lockstep\.optim\.schedule\.Step\(\.\.\.\), or the word schedule=step"),
        ("loss", nn.CrossEntropyLoss(), r'CrossEntropyLoss\(reduction="none"\), or use the word loss=cross_entropy$'),
        ("loss", nn.MSELoss(reduction="sum"), r"reduction='sum', .* per example: MSELoss\(reduction=\"none\"\)$"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_is_no_part_of_a_group_is_refused_with_what_would_be(group: str, value: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence) as refused:
        stand_in(group, value)
    assert ("lockstep.dataset(" in str(refused.value)) == (group == "dataset")


def test_the_words_of_objects_come_before_those_of_the_user_and_say_what_is_not_the_default() -> None:
    net = nn.Linear(64, 10)
    words, originals = in_words(
        {"optimizer": SGD(lr=0.5, nesterov=True), "model": net, "logger": [JSONL(), TensorBoard()], "loss": my_loss},
        ["steps=3", "model_of=x"],
    )
    assert words[:4] == [
        *("optimizer=sgd", "optimizer.lr=0.5", "optimizer.nesterov=true"),
        "model=object",
    ]
    assert "model.type=Linear" in words
    assert f"model.weights={digest(net)}" in words
    assert 'logger=["jsonl", "tensorboard"]' in words
    assert words[-2:] == ["steps=3", "model_of=x"]
    assert originals == {"model": net, "loss": my_loss}
    assert in_words({}, ["steps=3"]) == (["steps=3"], {})


@pytest.mark.parametrize(
    ("values", "words", "sentence"),
    [
        ({"optimiser": SGD()}, [], "optimiser is not a group of options. Did you mean 'optimizer'"),
        ({"epochs": 2}, [], r'^epochs is a key, which is set by a word: \["epochs=2"\]$'),
        (
            {"model": DigitNet()},
            ["steps=1", "model=linear", "model=vit"],
            "^model=linear and an object both choose the model; rem",
        ),
    ],
)
def test_what_no_group_has_or_a_word_chooses_too_is_refused(
    values: dict[str, Any], words: list[str], sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        in_words(values, words)


class Colour(Enum):
    red = "r"
    blue = "b"


@dataclass(frozen=True, kw_only=True)
class Coloured(CrossEntropy):
    colour: Colour = Colour.red


def test_an_option_is_told_by_the_values_that_are_not_its_defaults() -> None:
    assert changed_words("model", DigitNet()) == []
    assert changed_words("model", DigitNet(width=8)) == ["model.width=8"]
    assert changed_words("optimizer", SGD(lr=0.5, weight_decay=0.0)) == ["optimizer.lr=0.5"]
    assert changed_words("precision", BF16()) == []
    assert changed_words("loss", CrossEntropy(class_weights=[1.0, 2.0])) == ["loss.class_weights=[1.0, 2.0]"]
    assert changed_words("loss", Coloured()) == []
    assert changed_words("loss", Coloured(colour=Colour.blue)) == ["loss.colour=blue"]


MODEL = ModelObject(type="Net", module="own")
LOSS = LossObject(type="my_loss", module="own")


def test_an_object_that_only_its_program_has_is_asked_for_again_with_all_others() -> None:
    check_given({"model": ModelObject(type="Net", original=nn.Identity()), "optimizer": SGD()})
    check_given({"loss": LossObject(type="f", original=nn.Sequential())})  # an object that is empty is one
    one, two = (refused(parts) for parts in ({"loss": LOSS, "model": DigitNet()}, {"model": MODEL, "loss": LOSS}))
    assert one == (
        "loss is my_loss of own, an object that a program gave to lockstep.train, and no file has it; give it again: "
        'lockstep.train(["resume=RUN"], loss=my_loss)'
    )
    assert two == (
        "model is Net of own and loss is my_loss of own, objects that a program gave to lockstep.train, and no file "
        'has them; give them again: lockstep.train(["resume=RUN"], model=Net(...), loss=my_loss), or '
        "lockstep.load(RUN, model=Net(...))"
    )
    data = DatasetObject(type="Scans", module="own")
    uses: dict[tuple[str, Any], list[Any]] = {
        ("model", MODEL): [MODEL.check, lambda: MODEL.build(2, (1, 8, 8))],
        ("loss", LOSS): [lambda: LOSS.build(2, torch.zeros(1))],
        ("dataset", data): [data.train_dataset, data.val_dataset, data.test_dataset, lambda: data.place],
    }
    for (group, part), calls in uses.items():
        sentence = refused({group: part})
        assert sentence.startswith(f"{group} is {part.type} of own, an object")
        assert ("lockstep.load" in sentence) == (group == "model"), "which loads a model alone"
        for call in calls:
            with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
                call()


def refused(parts: dict[str, Any]) -> str:
    with pytest.raises(InputError) as error:
        check_given(parts)
    return str(error.value)


def test_a_module_is_for_the_option_that_stands_for_one() -> None:
    net = nn.Linear(2, 2)
    assert vars(with_module(MODEL, net))["original"] is net
    assert with_module(MODEL, net).type == "Net"
    with pytest.raises(InputError, match=r"^model is DigitNet, which needs no object of a program; remove model="):
        with_module(DigitNet(), net)


def test_a_model_of_a_program_is_built_on_the_device_that_is_asked_for() -> None:
    net = nn.Linear(2, 2)
    with torch.device("meta"):
        built = ModelObject(original=net).build(2, (1, 1, 2))
    assert [parameter.is_meta for parameter in (*built.parameters(), *net.parameters())] == [True, True, False, False]


def test_a_loss_that_is_a_function_is_called_with_logits_and_targets_in_their_order() -> None:
    loss = LossObject(original=lambda logits, targets: logits[:, 0] - targets).build(2, torch.zeros(1))
    assert loss(torch.tensor([[3.0, 9.0]]), torch.tensor([1])).tolist() == [2]
    assert loss(torch.tensor([[3.0, 9.0]]), torch.tensor([[0.25, 0.75]])).tolist() == [[2.75, 2.25]], "shares, too"


def datasets(*parts: Any, **options: Any) -> DatasetObject:
    return DatasetObject(original=(*parts, *[None] * (3 - len(parts))), **options)


def test_the_datasets_of_a_program_are_those_to_train_on_to_evaluate_and_to_test() -> None:
    other, third = (TensorDataset(*IMAGES.tensors) for _ in range(2))
    three = datasets(IMAGES, other, third, labels=["dark", "bright"])
    assert [three.train_dataset(), three.val_dataset(), three.test_dataset()] == [IMAGES, other, third]
    assert [*three.names] == ["dark", "bright"]
    empty = TensorDataset(*(tensor[:0] for tensor in IMAGES.tensors))
    assert datasets(empty, other).train_dataset() is empty, "and not the next one that has images"
    two = datasets(IMAGES, other)
    assert ([*two.names], two.test_dataset(), datasets(IMAGES).val_dataset()) == ([], None, None)
    places = {datasets(IMAGES, other).place, datasets(other, IMAGES).place, datasets(IMAGES, third).place}
    assert len({*places, datasets(IMAGES, other).place}) == 3, "what was read of one is not taken for another"
    usual, own = datasets(IMAGES, other), datasets(IMAGES, other, channel_mean=[0.25], channel_std=[0.5])
    assert (own.mean, own.std) == ((0.25,), (0.5,))
    black = datasets(IMAGES, other, channel_mean=[0.0], channel_std=[1e-6])
    assert (black.mean, black.std) == ((0.0,), (1e-6,))
    assert (usual.mean, usual.std) == (pytest.approx([0.449], abs=1e-3), pytest.approx([0.226], abs=1e-3))
    with pytest.raises(InputError, match=r"dataset\.fold"):
        datasets(IMAGES, fold=1)


class Own(Callback):
    """A callback with functions."""

    def __init__(self) -> None:
        self.act, self.other, self.number = my_loss, partial(second, 3), 3


def helper(number: int) -> int:
    return number


def second(number: int) -> int:
    return 2 * number


class Net(nn.Module):
    """A network with a part, and a function that it applies."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.activation = Part(), helper


class Part(nn.Module):
    pass


class Scans(TensorDataset):
    pass


class Later(TensorDataset):
    pass


def test_the_code_of_objects_is_that_of_their_types_their_parts_and_their_functions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scans = Scans(*IMAGES.tensors)
    composed = ConcatDataset([Subset(scans, [0]), Subset(IMAGES, [1])])
    options = [
        ModelObject(type="Net", original=Net()),
        LossObject(type="my_loss", original=my_loss),
        datasets(composed, Later(*IMAGES.tensors)),
        SGD(),
    ]
    monkeypatch.setattr(objects, "chosen_options", lambda job: options)
    job: Any = None
    parts = code_parts(job, [Own()])
    assert {Own, Net, Part, Scans, Later, TensorDataset} <= {*parts}
    assert {my_loss, helper, second} <= {*parts}
    assert SGD not in parts, "options by name are code of ours, or of extensions"
    assert option_name(SGD) == "sgd"


def test_the_hash_of_a_module_is_that_of_its_names_formats_shapes_and_numbers() -> None:
    module = nn.Linear(2, 1)
    nn.init.zeros_(module.weight)
    nn.init.ones_(module.bias)
    text = b"weight torch.float32 (1, 2)" + bytes(8) + b"bias torch.float32 (1,)" + bytes([0, 0, 128, 63])
    assert digest(module) == hashlib.sha256(text).hexdigest()[:12]
    assert digest(nn.Flatten()) == hashlib.sha256(b"").hexdigest()[:12]
    turned = nn.Linear(3, 2)
    turned.weight = nn.Parameter(turned.weight.detach().T.contiguous().T)
    plain = nn.Linear(3, 2)
    plain.load_state_dict(turned.state_dict())
    assert digest(turned) == digest(plain), "however they lie in memory"


def test_several_objects_of_a_group_are_numbered_by_their_names_with_their_values() -> None:
    words, originals = in_words({"metric": [F1(average="micro"), Recall()]}, ["x=1"])
    assert words == ['metric=["f1", "recall"]', "metric.f1.average=micro", "x=1"]
    assert originals == {}
    assert in_words({"logger": []}, [])[0] == ["logger=[]"]


@pytest.mark.parametrize("value", ["bilinear", "bicubic"])
def test_a_text_and_a_name_of_an_enumeration_are_words(value: str) -> None:
    assert changed_words("loss", CrossEntropy(label_smoothing=0.5)) == ["loss.label_smoothing=0.5"]
    option = DatasetObject(original=(IMAGES, None, None), labels=[value, "b"], val_share=0.5)
    assert f'dataset.labels=["{value}", "b"]' in changed_words("dataset", option)
    assert "dataset.val_share=0.5" in changed_words("dataset", option)


@pytest.mark.parametrize(
    ("group", "value", "sentence"),
    [
        (
            "loss",
            nn.BCEWithLogitsLoss(),
            "loss is BCEWithLogitsLoss with reduction='mean', expected one loss per exam",
        ),
        ("model", nn.Linear, r"^model is the class Linear, expected an object of it: model=Linear\(...\)$"),
        ("loss", nn.CrossEntropyLoss, r"^loss is the class CrossEntropyLoss, expected an object of it"),
        ("model", my_loss, r"^model is an object of my_loss, expected a torch.nn.Module, or an object of a class"),
        (
            "metric",
            object(),
            r'^metric is an object of object, expected an object of a class with @lockstep.option\("m',
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_is_given_is_named_as_a_class_or_an_object(group: str, value: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        stand_in(group, value)
