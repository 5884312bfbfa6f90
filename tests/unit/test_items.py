"""A Dataset of torch as a data set: its images, its targets, its cuts, and what is said of one that does not fit."""

import errno
import hashlib
import inspect
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset
from torchvision import datasets
from torchvision.transforms.functional import to_tensor

import lockstep
from lockstep.core.errors import BrokenImage, InputError, StorageError
from lockstep.core.model_card import MOST_CHANNELS
from lockstep.data.datasets.composed import TARGET_NAMES, called, groups_of, names_in, source_of, stored_targets
from lockstep.data.datasets.item import BrokenItem, pixels_of
from lockstep.data.datasets.items import DatasetOption
from lockstep.data.datasets.of_torchvision import TORCHVISION_SPLITS, Torchvision

SIDE, NUMBER = 6, 12
IMAGES = np.random.default_rng(0).integers(0, 256, (NUMBER, SIDE, SIDE, 3), dtype=np.uint8)
CLASSES = [number % 3 for number in range(NUMBER)]


class Photos(Dataset[Any]):
    """Items (image, class); `form` makes the image of an array, and `reads` counts."""

    def __init__(self, form: Callable[[Any], Any] = Image.fromarray, targets: Any = CLASSES) -> None:
        self.form, self.own, self.reads = form, targets, 0

    def __len__(self) -> int:
        return len(self.own)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        self.reads += 1
        return self.form(IMAGES[index]), self.own[index]


def option(
    train: Any, val: Any = None, test: Any = None, names: tuple[str, ...] = (), **fields: Any
) -> DatasetOption:
    class Own(DatasetOption):
        def train_dataset(self) -> Any:
            return train

        def val_dataset(self) -> Any:
            return val

        def test_dataset(self) -> Any:
            return test

    Own.names = names  # type: ignore[assignment, method-assign]
    return Own(**{"decode_size": None, "targets": "classes", "fit": "crop", "crop": 1.0, "input_size": None} | fields)


FORMS: dict[str, Callable[[Any], Any]] = {
    "Pillow": Image.fromarray,
    "an array": lambda image: image,
    "a tensor": lambda image: torch.from_numpy(image).permute(2, 0, 1),
    "torchvision's ToTensor": to_tensor,
    "float64": lambda image: image / 255,
    "float16": lambda image: torch.from_numpy(image).permute(2, 0, 1).half() / 255,
}


@pytest.mark.parametrize("form", FORMS)
def test_an_image_has_the_same_pixels_in_every_form(form: str) -> None:
    split = option(Photos(FORMS[form]), Photos(FORMS[form])).train()
    assert torch.equal(split.fetch([3, 0]), torch.from_numpy(IMAGES[[3, 0]]).permute(0, 3, 1, 2))


def grey_of(image: Any) -> Image.Image:
    return Image.fromarray(image).convert("L")


def test_grey_and_binary_images_and_transparent_ones_are_read_as_files_are() -> None:
    grey = grey_of(IMAGES[0])
    np.testing.assert_array_equal(pixels_of(grey)[..., 0], np.array(grey))
    assert option(Photos(grey_of), Photos(grey_of)).image_shape == (1, SIDE, SIDE)
    assert option(Photos(grey_of), Photos(), channels=3).train().fetch([1]).shape == (1, 3, SIDE, SIDE)
    assert option(Photos(grey_of), Photos()).eval().fetch([1]).shape == (1, 1, SIDE, SIDE)
    np.testing.assert_array_equal(pixels_of(np.array(grey)), pixels_of(torch.from_numpy(np.array(grey))))
    np.testing.assert_array_equal(pixels_of(grey.convert("1"))[..., 0], np.array(grey.convert("1")) * np.uint8(255))
    assert option(Photos(lambda image: grey_of(image).convert("1")), Photos()).image_shape == (1, SIDE, SIDE)
    assert set(np.unique(pixels_of(np.array(grey) > 100))) == {0, 255}
    for mode, black in (("RGBA", (0, 0, 0, 0)), ("LA", (0, 0))):
        assert pixels_of(Image.new(mode, (2, 2), black)).tolist() == [[[255] * 3] * 2] * 2
    pixels = torch.from_numpy(IMAGES[0]).permute(2, 0, 1) / 255
    np.testing.assert_array_equal(pixels_of(pixels.requires_grad_()), IMAGES[0])
    of_colours = option(Photos(), Photos(), channels=1).train().fetch([1])
    np.testing.assert_array_equal(of_colours[0, 0], np.array(grey_of(IMAGES[1])))
    deep = Image.fromarray(np.full((2, 2), 0x8000, np.uint16))
    assert pixels_of(deep).tolist() == [[[128] * 3] * 2] * 2


WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "normalised": (lambda image: (to_tensor(image) - 0.5) / 0.5, "floats from -1 to .*leave out a Normalize"),
    "up to 255": (lambda image: image.astype("float32"), "expected 0 to 1.*astype"),
    "NaN": (lambda image: np.full((4, 4), np.nan), "floats from nan to nan"),
    "16 bits": (lambda image: image.astype("uint16"), "its image is uint16, expected uint8.*LOW and HIGH"),
    "a batch": (
        lambda image: image[None],
        r"ndarray and of shape \(1, 6, 6, 3\), expected",
    ),
    "a tensor (H, W, C)": (torch.from_numpy, r"of shape \(6, 6, 3\), expected \(channels, height, width\)"),
    "an array (C, H, W)": (lambda image: image.transpose(2, 0, 1), r"of shape \(3, 6, 6\), expected \(height"),
    "nothing": (lambda image: None, "its image is of type NoneType"),
    "a text": (lambda image: "photo.png", "its image is of type str"),
    "empty": (lambda image: image[:0], r"of shape \(0, 6, 3\)"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_an_image_without_a_meaning_is_refused_with_the_line_that_converts(kind: str) -> None:
    form, sentence = WRONG[kind]
    with pytest.raises(InputError, match=f"item 0 of the training split: .*{sentence}"):
        option(Photos(form), Photos()).train()


def broken(kind: str) -> Any:
    class Broken(Photos):
        def __getitem__(self, index: int) -> Any:
            image, target = super().__getitem__(index)
            if index == 4:
                if kind == "raises":
                    raise KeyError("no such photo")
                forms = {"three": (image, target, 1), "list": [image], "alone": image, "nothing": {}}
                forms |= {"photo": {"photo": image, "label": target}, "small": (image.resize((2, 2)), target)}
                return forms[kind]
            return image, target

    return Broken()


def test_an_item_that_raises_is_named_with_the_line_of_its_own_code() -> None:
    with pytest.raises(BrokenImage, match=r"item 4 of the training split: KeyError: .*\(test_items.py, line \d+\)"):
        option(broken("raises"), Photos()).train()


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("three", r"it is of type tuple and length 3, expected \(image, target\)"),
        ("list", r"it is of type list and length 1, expected \(image, target\)"),
        ("alone", r"it is of type Image, expected \(image, target\)"),
        ("nothing", "it has nothing, expected image and label"),
        ("photo", "it has photo, label, expected image and label"),
    ],
)
def test_an_item_of_another_form_is_named(kind: str, sentence: str) -> None:
    with pytest.raises(InputError, match=f"item 4 of the training split: {sentence}"):
        option(broken(kind), Photos()).train()


@pytest.mark.parametrize("method", ["train_dataset", "val_dataset", "test_dataset", "__len__", "group"])
def test_what_a_method_of_the_users_raises_is_one_sentence_with_its_line(method: str) -> None:
    def raises(*_: Any) -> Any:
        raise FileNotFoundError("no such table")

    class Own(Photos):
        pass

    own = option(Own(), Photos(), Photos())
    owner = own if method.endswith("dataset") else own.train_dataset()
    setattr(type(owner), method, raises)
    line = f"line {raises.__code__.co_firstlineno + 1}"
    with pytest.raises(InputError, match=rf"Own.{method} raised FileNotFoundError: .* \(test_items.py, {line}\)"):
        own.train()

    def refuses(*_: Any) -> Any:
        raise InputError("dataset: fetch the table first")

    setattr(type(owner), method, refuses)
    with pytest.raises(InputError, match=r"^dataset: fetch the table first$"):
        own.train()


def test_an_item_without_a_target_cannot_be_skipped() -> None:
    class Gap(Photos):
        def __getitem__(self, index: int) -> Any:
            return None if index == 4 else (super().__getitem__(index)[0], CLASSES[index])

    with pytest.raises(InputError, match=r"item 4 of the training split: .*torch.utils.data.Subset"):
        option(Subset(Gap(), range(NUMBER)), Photos(), skip=2).train()


def test_images_of_several_sizes_need_one_size() -> None:
    with pytest.raises(InputError, match=r"3 channels of 2x2, expected 3 of 6x6.*dataset.decode_size=N"):
        option(broken("small"), Photos()).train().fetch([4])
    assert option(broken("small"), Photos(), decode_size=4).train().fetch([4, 5]).shape == (2, 3, 4, 4)
    six = Photos(lambda image: image.repeat(2, axis=2))
    with pytest.raises(
        InputError, match=r"6 channels of 6x6, expected 3 of 6x6, as the first one to train on; [^;]*N"
    ):
        option(Photos(), six).eval().fetch([0])
    assert option(Photos(), six, val_share=0.5).image_shape == (3, SIDE, SIDE)


def test_items_keep_their_one_size_and_photographs_get_the_usual_one() -> None:
    for train, size in ((Photos(), None), (broken("small"), "auto")):
        assert option(train, Photos(), decode_size="auto").located().decode_size == size
    for size in ((SIDE, SIDE + 1), (SIDE + 1, SIDE)):
        larger = Photos(lambda image, size=size: Image.fromarray(image).resize(size))  # type: ignore[misc]
        for splits in ((larger, Photos(), Photos()), (Photos(), larger, Photos()), (Photos(), Photos(), larger)):
            assert option(*splits, decode_size="auto").located().decode_size == "auto"


@pytest.mark.parametrize("size", [(SIDE, SIDE + 1), (SIDE + 1, SIDE), (SIDE * 2, SIDE // 2)])
def test_items_that_differ_in_one_side_alone_are_of_several_sizes(size: tuple[int, int]) -> None:
    def one_larger(image: Any) -> Any:
        return Image.fromarray(image).resize(size if np.array_equal(image, IMAGES[4]) else (SIDE, SIDE))

    mixed = option(Photos(one_larger), Photos(), decode_size="auto").located()
    assert mixed.decode_size == "auto"
    assert option(Photos(one_larger), Photos()).image_shape == (3, SIDE, SIDE), "as the first one"
    with pytest.raises(InputError, match=rf"3 channels of {size[1]}x{size[0]}, expected 3 of {SIDE}x{SIDE}"):
        option(Photos(one_larger), Photos()).train().fetch([4])


def test_grey_items_among_those_with_colours_are_of_one_size() -> None:
    def some_grey(image: Any) -> Any:
        return Image.fromarray(image).convert("RGB" if image.flat[0] % 2 else "L")

    grey = option(Photos(some_grey), Photos(), decode_size="auto").located()
    assert grey.decode_size is None
    assert {len(Photos(some_grey)[index][0].getbands()) for index in range(NUMBER)} == {1, 3}
    assert grey.train().fetch([*range(NUMBER)]).shape == (NUMBER, 3, SIDE, SIDE)


def test_a_dataset_without_an_index_or_an_end_or_items_is_refused() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            yield from ()

    class Counted(Stream):
        def __len__(self) -> int:
            return NUMBER

    class Endless(Dataset[Any]):
        def __getitem__(self, index: int) -> Any:
            return IMAGES[0], 0

    for stream in (Stream(), Counted()):
        with pytest.raises(InputError, match=f"{type(stream).__name__}, has no __getitem__, so"):
            option(stream, Photos()).train()
    with pytest.raises(InputError, match="Endless, has no __len__"):
        option(Endless(), Photos()).train()
    with pytest.raises(InputError, match="of the evaluation split, of type Photos, has no items"):
        option(Photos(), Photos(targets=[])).train()
    with pytest.raises(InputError, match=r"NoneType, has no __getitem__ and no __len__"):
        option(None, Photos()).train()
    with pytest.raises(InputError, match=r"of type DataLoader, makes batches, .* give its \.dataset"):
        option(DataLoader(Photos()), Photos()).train()
    with pytest.raises(InputError, match=r"Dataset to evaluate; return one in val_dataset\(\), .*dataset.val_share"):
        option(Photos()).train()
    with pytest.raises(InputError, match=r"Dataset to evaluate; give one, lockstep.dataset\(train, val=DATASET\), "):
        lockstep.dataset(Photos()).train()


def test_targets_are_read_from_the_dataset_where_it_says_them_and_from_the_items_where_it_says_others() -> None:
    right, wrong = Photos(), Photos()
    right.targets = torch.tensor(CLASSES)  # type: ignore[attr-defined]
    wrong.targets = CLASSES[::-1]  # type: ignore[attr-defined]
    source = option(right, wrong)
    assert source.train().labels.tolist() == source.eval().labels.tolist() == CLASSES
    assert right.reads == NUMBER + 8  # the sample, and eight of it again
    assert wrong.reads == 2 * NUMBER + 8


class Grouped(Photos):
    classes = ("a", "b", "c")
    targets = CLASSES

    def group(self, index: int) -> str:
        return f"patient {index // 2}"


def test_subsets_have_the_targets_names_and_groups_of_the_whole() -> None:
    whole = Grouped()
    source = option(Subset(whole, range(2, NUMBER)), val_share=0.4)
    assert source.class_names == ("a", "b", "c")
    splits = (source.train(), source.eval())
    numbers = [[int(split.name(n).split()[1]) for n in range(len(split))] for split in splits]
    assert sorted([*numbers[0], *numbers[1]]) == list(range(NUMBER - 2))
    assert not {number // 2 for number in numbers[0]} & {number // 2 for number in numbers[1]}
    assert whole.reads == NUMBER - 2 + 8


TARGETS: dict[str, tuple[Any, str, list[Any]]] = {
    "numbers": ([0, 1, 2] * 4, "classes", [0, 1, 2] * 4),
    "NumPy's numbers": (np.array([0, 1, 2] * 4), "classes", [0, 1, 2] * 4),
    "tensors": ([torch.tensor(n) for n in [0, 1, 2] * 4], "classes", [0, 1, 2] * 4),
    "names": (["cat", "dog", "ant"] * 4, "classes", [1, 2, 0] * 4),
    "vectors": (torch.tensor([[1, 0], [1, 1]] * 6), "labels", [[1.0, 0.0], [1.0, 1.0]] * 6),
    "vectors as arrays": ([np.array([1, 0]), np.array([1, 1])] * 6, "labels", [[1.0, 0.0], [1.0, 1.0]] * 6),
    "sets of names": ([{"x"}, {"x", "y"}] * 6, "labels", [[1.0, 0.0], [1.0, 1.0]] * 6),
    "lists of NumPy's numbers": ([[np.int64(0)], (np.int64(0), np.int64(1))] * 6, "labels", [[1, 0], [1, 1]] * 6),
    "lists of names": ([["x"], ["x", "y"]] * 6, "labels", [[1.0, 0.0], [1.0, 1.0]] * 6),
    "values": ([0.5, -2] * 6, "values", [[0.5], [-2.0]] * 6),
    "pairs of values": (np.array([[0.5, 1], [2, 3]] * 6, "float32"), "values", [[0.5, 1.0], [2.0, 3.0]] * 6),
}


@pytest.mark.parametrize("kind", TARGETS)
def test_targets_of_each_kind(kind: str) -> None:
    own, targets, expected = TARGETS[kind]
    assert option(Photos(targets=own), Photos(targets=own), targets=targets).train().labels.tolist() == expected


@pytest.mark.parametrize(
    ("names", "first", "own"),
    [
        (("a", "b", "a"), 0, ("a (0)", "b", "a (2)")),
        (("x", "cafe\u0301", "caf\u00e9"), 1, ("x", "caf\u00e9 (1)", "caf\u00e9 (2)")),
    ],
)
def test_two_classes_of_the_same_name_are_not_made_one(
    names: tuple[str, ...], first: int, own: tuple[str, ...]
) -> None:
    with pytest.raises(InputError) as raised:
        option(Photos(), Photos(), names=names).train()
    assert str(raised.value) == (
        f"dataset: {names[2]!r} is the name of number {first} and of number 2; give each a name of its own"
    )
    with pytest.raises(InputError, match="of number 2; give each a name of its own"):
        lockstep.dataset(Photos(), Photos(), targets="classes", classes=names).train()
    photos: Any = Photos()
    photos.classes = [*names]
    source = option(photos, photos)
    assert (source.class_names, source.train().labels.tolist()) == (own, CLASSES)


def test_the_two_cranes_of_imagenet_stay_two_classes(tmp_path: Path) -> None:
    words = {"n01": ("tench", "Tinca tinca"), "n02": ("crane",), "n03": ("maillot",), "n04": ("crane",)}
    torch.save((words, []), tmp_path / "meta.bin")
    for number, folder in enumerate(words):
        (tmp_path / "train" / folder).mkdir(parents=True)
        Image.fromarray(IMAGES[number]).save(tmp_path / "train" / folder / "a.JPEG")
    photos = datasets.ImageNet(tmp_path, split="train")
    source = option(photos, photos)
    assert source.class_names == ("tench, Tinca tinca", "crane (1)", "maillot", "crane (3)")
    assert source.train().labels.tolist() == [0, 1, 2, 3]


def test_names_in_unicodes_decomposed_form_are_those_that_look_the_same() -> None:
    source = option(Photos(), Photos(), names=("a", "cafe\u0301", "c"))
    assert (source.class_names, source.train().labels.tolist()) == (("a", "caf\u00e9", "c"), CLASSES)


def test_targets_that_fit_no_class_name_the_item() -> None:
    with pytest.raises(InputError, match="item 2 of the training split has the label 2, expected 0 to 1"):
        option(Photos(), Photos(), names=("a", "b")).train()
    with pytest.raises(InputError, match="item 1 of the training split has the label -2, expected 0 to 1"):
        option(Photos(targets=[0, -2]), Photos(), names=("a", "b")).train()
    with pytest.raises(InputError, match=r"item 1 of the training split has the label 0.5.*task=regression"):
        option(Photos(targets=[0, 0.5]), Photos()).train()
    with pytest.raises(InputError, match="item 1 of the evaluation split has the label '7', which no training"):
        option(Photos(), Photos(targets=[0, 7])).train()


@pytest.mark.parametrize(
    ("key", "value", "name"),
    [
        ("classes", ["a", "b", "c"], "class_names"),
        ("mean", [0.1, 0.2, 0.3], "mean"),
        ("std", [0.4, 0.5, 0.6], "std"),
        ("decode_size", 4, "decode_size"),
        ("skip", 3, "skip"),
        ("limit", 6, "limit"),
    ],
)
def test_an_argument_of_a_dataset_from_python_arrives_and_changes_no_other(key: str, value: Any, name: str) -> None:
    photos = Photos()
    usual, source = (lockstep.dataset(photos, photos, targets="classes", **keys) for keys in ({}, {key: value}))
    assert getattr(source, name) == (tuple(value) if isinstance(value, list) else value) != getattr(usual, name)
    assert (usual.mean, usual.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), "ImageNet's"
    names = {"class_names", "mean", "std", "decode_size", "skip", "limit"} - {name}
    assert {other: getattr(source, other) for other in names} == {other: getattr(usual, other) for other in names}


@pytest.mark.parametrize("target_name", ["targets", "labels", "label", "target"])
@pytest.mark.parametrize("image_name", ["image", "img", "pixel_values"])
def test_mappings_and_lists_are_items_too(image_name: str, target_name: str) -> None:
    class Rows(Photos):
        def __getitem__(self, index: int) -> Any:
            image, target = super().__getitem__(index)
            return {"file": "x", target_name: target, image_name: image} if index % 2 else [image, target]

    assert option(Rows(), Rows()).train().labels.tolist() == CLASSES


def test_folds_and_limits_hold_and_cut_data_are_tested_on_the_evaluation_dataset() -> None:
    folds = [option(Photos(), Photos(), folds=2, fold=fold) for fold in range(2)]
    evaluated = [split.name(n) for split in (fold.eval() for fold in folds) for n in range(len(split))]
    assert sorted(evaluated) == sorted(f"item {n} of the training split" for n in range(NUMBER))
    test = folds[0].test()
    assert test is not None
    assert test.name(3) == "item 3 of the test split"
    exam = Photos(targets=CLASSES[::-1])
    assert option(Photos(), Photos(), exam, val_share=0.5).test().labels.tolist() == CLASSES[::-1]  # type: ignore[union-attr]
    assert len(option(Photos(), Photos(), limit=6).train()) == 6


def test_random_items_are_said_and_read_again_in_each_epoch() -> None:
    generator = np.random.default_rng(3)
    source = option(Photos(lambda image: image[:, :: generator.choice([-1, 1])]), Photos())
    assert source.changes
    assert any("training split draws random numbers" in note for note in source.notes())
    assert not option(Photos(), Photos()).changes

    class Later(Photos):
        def __getitem__(self, index: int) -> Any:
            image, target = super().__getitem__(index)
            return (image.transpose(generator.choice([0, 1])), target) if index == 1 else (image, target)

    assert {option(Later(), Photos()).changes for _ in range(8)} == {False, True}, "the first item is always the same"


def test_other_pixels_are_another_data_set(tmp_path: Path) -> None:
    facts = [option(Photos(form), Photos()).fingerprint() for form in (Image.fromarray, lambda image: image // 2)]
    assert facts[0]["val"] == facts[1]["val"]
    assert facts[0]["train"] != facts[1]["train"]
    members = np.arange(NUMBER).tobytes() + np.array(CLASSES).tobytes()
    pixels, chosen = (hashlib.sha256(content).hexdigest()[:16] for content in (IMAGES.tobytes(), members))
    assert facts[0]["train"] == {"examples": f"{NUMBER} of train, {NUMBER} items, {pixels} ({chosen})"}

    class Many(Photos):
        def __init__(self, other: int) -> None:
            super().__init__(targets=CLASSES * 8)
            self.other = other

        def __getitem__(self, index: int) -> Any:
            return IMAGES[int(index == self.other)], self.own[index]

    many = [option(Many(other), Photos()).fingerprint()["train"]["examples"] for other in (-1, 0, 3, 48, 93)]
    assert len({*many}) == 5, "every third of the 96 is looked at"


def test_items_are_read_once_for_any_kind_of_targets_and_their_names_are_those_of_the_option() -> None:
    whole = Grouped()
    source = option(whole, Photos(), names=("x", "y", "z"), skip=3)
    assert (source.class_names, source.train().skip) == (("x", "y", "z"), 3)
    reads = whole.reads
    type(source).names = ("x",)  # type: ignore[assignment, method-assign]
    assert replace(source, targets="values").train().labels.shape == (NUMBER, 1)
    assert whole.reads == reads


def test_a_broken_item_is_named_without_characters_that_a_terminal_obeys() -> None:
    item = BrokenItem(3, "item 3", "two\nlines \x1b[1m")
    assert item.failure == r"item 3: two\nlines \x1b[1m"
    assert item.told("--skip=N") == f"dataset: {item.failure}; correct it, or skip up to N such items with --skip=N"


def test_a_crop_of_the_file_is_a_crop_of_the_item() -> None:
    assert option(Photos(), Photos(), decode_size=4, crop_from="file").changes


@pytest.mark.parametrize("name", TORCHVISION_SPLITS)
def test_each_data_set_of_torchvision_takes_its_splits_and_says_how_it_is_fetched(name: str, tmp_path: Path) -> None:
    parameters = inspect.signature(getattr(datasets, name)).parameters
    source = Torchvision(name=name, root=str(tmp_path))
    reads = (source.train_dataset, source.val_dataset, source.test_dataset)
    for value, read in zip(TORCHVISION_SPLITS[name], reads, strict=True):
        key = "train" if isinstance(value, bool) else "split"
        assert value is None or key in parameters
        roles = ((True, "train", "trainval"), (False, "val", "valid", "test"), ("test",))
        assert value is None or value in roles[reads.index(read)]
        if value is None and read != source.train_dataset:
            assert read() is None
            continue
        typed = "" if value is None else f", {key}={value!r}"
        with pytest.raises(InputError, match=f"^data_root: {name} cannot be read from {tmp_path} ") as caught:
            read()
        assert "Unknown value" not in str(caught.value), "torchvision has such a split"
        assert str(caught.value).endswith(f"{name}('{tmp_path}'{typed}, download=True)\"")


def test_every_labelled_split_of_torchvision_that_is_published_is_used(tmp_path: Path) -> None:
    without_labels = ("CLEVRClassification", "FER2013")  # which are their tests
    for name, own in TORCHVISION_SPLITS.items():
        build = getattr(datasets, name)
        if "split" not in (parameters := inspect.signature(build).parameters):
            assert own == ((True, False, None) if "train" in parameters else (None, None, None)), name
            continue
        with pytest.raises((ValueError, RuntimeError)) as caught:  # or RuntimeError, because a package is missing
            build(tmp_path, split="?")
        text = str(caught.value) if caught.type is ValueError else build.__doc__.partition("split (")[2]
        splits = re.findall(r"[\"'](train|trainval|val|valid|test)[\"']", text)
        test = "test" if "test" in splits and name not in without_labels else None
        val = next((split for split in splits if split in ("val", "valid")), None)
        train = "train" if "train" in splits else "trainval"
        assert own == (train, val or test, test if val else None), name


def test_data_sets_of_torchvision_are_read_by_name(tmp_path: Path) -> None:
    for number, path in enumerate(("train/AD", "train/AE", "valid/AD", "valid/AE", "test/AD", "test/AE")):
        folder = tmp_path / "country211" / path
        folder.mkdir(parents=True)
        Image.fromarray(IMAGES[number]).resize((6 + number, 6)).save(folder / "photo.png")
    own = {"root": str(tmp_path), "targets": "classes", "fit": "crop", "crop": 1.0, "input_size": None}
    source = Torchvision(name="Country211", **own).located()
    assert (source.decode_size, source.class_names) == ("auto", ("AD", "AE"))
    assert [split.labels.tolist() for split in (source.train(), source.eval(), source.test())] == [[0, 1]] * 3  # type: ignore[union-attr]
    for name in "AnnualCrop", "Forest":
        folder = tmp_path / "eurosat" / "2750" / name
        folder.mkdir(parents=True)
        for number in range(4):
            Image.fromarray(IMAGES[number]).save(folder / f"{number}.png")
    with pytest.raises(InputError, match=r"no Dataset to evaluate; evaluate a share .* dataset.val_share"):
        Torchvision(name="EuroSAT", **own).train()
    cut = Torchvision(name="EuroSAT", val_share=0.25, **own).located()
    assert (cut.decode_size, len(cut.train()), len(cut.eval()), cut.test()) == (None, 6, 2, None)
    with pytest.raises(InputError, match=r"name is Flowers, .* CIFAR10, CIFAR100, CL.* Did you mean 'Flowers102'"):
        Torchvision(name="Flowers", **own).train()


@pytest.mark.parametrize(("name", "part"), [("Imagenette", "imagenette2/val"), ("Country211", "country211/test")])
def test_a_share_of_a_data_set_of_torchvision_is_tested_on_its_last_published_split(
    name: str, part: str, tmp_path: Path
) -> None:
    splits = {"imagenette2/train": 8, "imagenette2/val": 3, "country211/train": 8, "country211/valid": 1, part: 3}
    for path, count in splits.items():
        for label in ("n01440764", "n02102040"):  # classes of Imagenette
            (tmp_path / path / label).mkdir(parents=True)
            for number in range(count):
                Image.fromarray(IMAGES[number]).save(tmp_path / path / label / f"{number}.JPEG", "PNG")
    words = {"root": str(tmp_path), "targets": "classes", "fit": "crop", "crop": 1.0, "input_size": None}
    cut = Torchvision(name=name, val_share=0.25, decode_size=None, **words)
    test = cut.test()
    assert test is not None
    assert (len(cut.train()), len(cut.eval()), len(test)) == (12, 4, 6)
    assert cut.eval().name(0).endswith("of the training split")
    whole = Torchvision(name=name, decode_size=None, **words)
    assert (len(whole.train()), len(whole.eval())) == (16, 6 if name == "Imagenette" else 2)
    assert (whole.test() is None) == (name == "Imagenette")


def test_a_concatenation_has_the_targets_names_and_groups_of_its_parts() -> None:
    parts = Grouped(), Subset(Grouped(), range(4))
    source = option(ConcatDataset(parts), Photos(), val_share=0.4)
    assert source.class_names == ("a", "b", "c")
    splits = (source.train(), source.eval())
    numbers = [[int(split.name(n).split()[1]) % NUMBER for n in range(len(split))] for split in splits]
    assert sorted([*numbers[0], *numbers[1]]) == sorted([*range(NUMBER), *range(4)])
    assert not {number // 2 for number in numbers[0]} & {number // 2 for number in numbers[1]}


def test_an_item_of_composed_datasets_is_of_the_part_that_has_it() -> None:
    one, two, few, fewer = Grouped(), Grouped(), Photos(targets=CLASSES[:4]), Photos(targets=CLASSES[:2])
    inner = Subset(ConcatDataset([fewer, two]), [13, 0, 2, 1])
    whole = ConcatDataset([Subset(one, [7, 3, 9]), few, inner])
    expected = [
        (one, 7),
        (one, 3),
        (one, 9),
        *((few, n) for n in range(4)),
        (two, 11),
        (fewer, 0),
        (two, 0),
        (fewer, 1),
    ]
    assert [source_of(whole, index) for index in range(len(whole))] == expected
    groups = [
        f"patient {index // 2}" if part in (one, two) else f"item {n}" for n, (part, index) in enumerate(expected)
    ]
    assert groups_of(whole) == groups
    assert len({name for name in groups if name.startswith("item")}) == 6, "each is a group of its own"
    stored = ConcatDataset([Subset(one, [7, 3, 9]), Subset(two, [1, 0])])
    assert stored_targets(stored) == [CLASSES[index] for index in (7, 3, 9, 1, 0)]
    assert names_in(stored) == ("a", "b", "c")
    two.classes = ("a", "b", "x")
    assert names_in(stored) == ()
    assert stored_targets(ConcatDataset([one, few])) is None, "one part does not say its targets"


@pytest.mark.parametrize("number", range(len(TARGET_NAMES)))
def test_of_several_attributes_with_targets_the_likeliest_is_read(number: int) -> None:
    assert TARGET_NAMES == ("targets", "labels", "label", "target")
    whole = Photos()
    for at, name in enumerate(TARGET_NAMES[number:]):
        setattr(whole, name, [at] * NUMBER)
    assert stored_targets(whole) == [0] * NUMBER


@pytest.mark.parametrize(
    ("features", "classes", "expected"),
    [
        ({"label": SimpleNamespace(names=["cat", "dog"])}, ("0", "1"), ("cat", "dog")),
        ({"image": SimpleNamespace(names=["x"]), "label": SimpleNamespace()}, ["ant", "bee"], ("ant", "bee")),
        ({"labels": SimpleNamespace(names=None)}, (1, 2), ("1", "2")),
        ({"labels": SimpleNamespace(), "label": SimpleNamespace(names=["cat", "dog"])}, (1, 2), ("cat", "dog")),
        (None, {"a": 0}, ()),
    ],
)
def test_names_are_those_of_the_column_of_targets_or_else_the_classes(
    features: Any, classes: Any, expected: tuple[str, ...]
) -> None:
    assert names_in(SimpleNamespace(features=features, classes=classes)) == expected
    assert names_in(SimpleNamespace(classes=classes)) == (
        () if isinstance(classes, dict) else tuple(map(str, classes))
    )


@pytest.mark.parametrize(
    ("of_parts", "expected"),
    [
        ((["cat", "dog"], ["cat", "dog"]), ("cat", "dog")),
        ((["cat", "dog"], ["dog", "cat"]), ()),
        ((["cat", "dog"], None), ()),
        ((None, ["cat", "dog"]), ()),
        ((None, None), ()),
    ],
)
def test_parts_have_names_where_all_of_them_have_the_same(of_parts: Any, expected: tuple[str, ...]) -> None:
    parts = [Photos(), Photos()]
    for part, classes in zip(parts, of_parts, strict=True):
        part.classes = classes  # type: ignore[attr-defined]
    assert names_in(ConcatDataset(parts)) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("label", 3), ("labels", lambda: CLASSES), ("target", None), ("group", "A"), ("targets", torch.tensor(3))),
        *(("targets", [0, 1]), ("labels", [2] * (NUMBER + 1))),
    ],
)
def test_an_attribute_that_has_another_meaning_is_not_used(name: str, value: Any) -> None:
    train = Photos()
    setattr(train, name, value)
    assert option(train, Photos()).train().labels.tolist() == CLASSES


@pytest.mark.parametrize("target", [b"cat", object(), Image.fromarray(IMAGES[0])])
def test_a_target_that_is_no_number_and_no_name_is_refused(target: Any) -> None:
    with pytest.raises(
        InputError, match=r"item 0 of the training split has a label of type .*expected the number or"
    ):
        option(Photos(targets=[target] * NUMBER), Photos()).train()
    many = ConcatDataset([Photos(), Photos(), Photos(), Photos(targets=[*CLASSES[:-1], target])])
    with pytest.raises(InputError, match=r"item 47 of the training split has a label of type"):
        option(many, Photos()).train()


def test_whole_numbers_for_each_label_are_not_taken_for_the_numbers_of_labels() -> None:
    vectors = [(0, 1, 1), (1, 0, 0)] * 6
    with pytest.raises(InputError, match=r"item 0 of the training split has the labels a, b, b, .*store floats"):
        option(Photos(targets=vectors), Photos(targets=vectors), names=("a", "b", "c"), targets="labels").train()
    lists = [(0, 1, 2), (1,)] * 6
    labels = (
        option(Photos(targets=lists), Photos(targets=lists), names=("a", "b", "c"), targets="labels").train().labels
    )
    assert labels[:2].tolist() == [[1, 1, 1], [0, 1, 0]]


class Failing(Photos):
    targets = CLASSES

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def __getitem__(self, index: int) -> Any:
        if index == 4:
            raise self.error
        return super().__getitem__(index)


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), MemoryError()])
def test_storage_and_memory_that_fail_are_not_skipped_as_broken_items(error: Exception) -> None:
    with pytest.raises((StorageError, MemoryError)):
        option(Failing(error), Photos(), skip=5).train()
    with pytest.raises(StorageError, match="of our own"):
        option(Failing(StorageError("of our own")), Photos(), skip=5).train()
    for broken_item in (FileNotFoundError(errno.ENOENT, "No such file"), OSError("image file is truncated")):
        assert len(option(Failing(broken_item), Photos(), skip=5).train()) == NUMBER


def test_an_item_of_a_subset_is_named_with_the_line_of_its_own_code() -> None:
    with pytest.raises(BrokenImage, match=r"item 3 of the training split: KeyError: .*\(test_items.py, line \d+\)"):
        option(Subset(Failing(KeyError("no")), range(1, NUMBER)), Photos()).train().fetch([3])


def test_items_of_a_dataset_that_is_not_thread_safe_are_read_one_at_a_time() -> None:
    reading = []

    class Slow(Photos):
        def __getitem__(self, index: int) -> Any:
            reading.append(index)
            time.sleep(0.001)
            assert reading == [index]
            return super().__getitem__(reading.pop())

    source = option(Slow(), Photos())
    type(source).thread_safe = False
    split = source.train()
    with ThreadPoolExecutor(4) as pool:
        assert len([*pool.map(split.fetch, ([number] for number in range(NUMBER)))]) == NUMBER


def test_an_image_may_have_the_most_channels_and_one_more_is_refused() -> None:
    assert pixels_of(np.zeros((8, 8, MOST_CHANNELS), np.uint8)).shape == (8, 8, MOST_CHANNELS)
    with pytest.raises(ValueError, match=r"expected \(height, width, channels\)"):
        pixels_of(np.zeros((8, 8, MOST_CHANNELS + 1), np.uint8))


def test_the_bytes_of_an_item_are_those_of_its_pixels() -> None:
    for form in (Image.fromarray, to_tensor):
        split = option(Photos(form), Photos(form)).train()
        assert [split.content(index) for index in (3, 0)] == [IMAGES[3].tobytes(), IMAGES[0].tobytes()]
        assert split.name(3) == "item 3 of the training split"


def test_a_method_that_runs_out_of_memory_is_no_mistake_of_the_data_and_one_of_a_library_has_no_line() -> None:
    def exhausted() -> Any:
        raise MemoryError

    with pytest.raises(MemoryError):
        called(SimpleNamespace(read=exhausted), "read")
    assert called(SimpleNamespace(read=int), "read", "7") == 7
    says = r"^dataset: SimpleNamespace\.read raised ValueError: .*'x' \(SimpleNamespace\)$"
    with pytest.raises(InputError, match=says):
        called(SimpleNamespace(read=int), "read", "x")


class Columns:
    """Like a table of Hugging Face's `datasets`, with an attribute of the name of a column that it does not have."""

    column_names = ("image", "labels", "label")
    targets = (7, 7, 7)

    def __len__(self) -> int:
        return 3

    def __getitem__(self, key: str) -> list[int]:
        return {"labels": [0, 1, 2], "label": [2, 1, 0]}[key]


def test_the_targets_of_a_table_are_in_its_columns() -> None:
    assert stored_targets(Columns()) == [0, 1, 2]
    assert stored_targets(Subset(Columns(), [2, 0])) == [2, 0]  # type: ignore[arg-type]


@pytest.mark.parametrize("split", ["training", "evaluation", "test"])
def test_random_items_are_said_of_their_split(split: str) -> None:
    generator = np.random.default_rng(3)
    random = Photos(lambda image: image[:, :: generator.choice([-1, 1])])
    datasets_of = {name: random if name == split else Photos() for name in ("training", "evaluation", "test")}
    notes = option(*datasets_of.values()).notes()
    assert [note for note in notes if "random" in note] == [
        f"the Dataset of the {split} split draws random numbers of its own, so a run is only the same up to them; "
        "the option augment draws the same ones everywhere"
    ]
    assert option(*datasets_of.values()).changes == (split == "training")


def test_an_option_of_one_dataset_is_cut_and_has_no_test() -> None:
    class Alone(DatasetOption):
        def train_dataset(self) -> Any:
            return Photos()

    words = {"decode_size": None, "targets": "classes", "fit": "crop", "crop": 1.0, "input_size": None}
    cut = Alone(val_share=0.25, **words)  # type: ignore[arg-type]
    assert (len(cut.train()), len(cut.eval()), cut.test()) == (9, 3, None)
    assert cut.val_dataset() is None, "a test is no Dataset to evaluate"

    class Tested(Alone):
        def test_dataset(self) -> Any:
            return Photos()

    assert Tested(val_share=0.25, **words).val_dataset() is None  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"^dataset: there is no Dataset to evaluate; return one in val_dataset\(\)"):
        Alone(**words).train()  # type: ignore[arg-type]

    class Evaluated(Alone):
        def val_dataset(self) -> Any:
            return Photos()

    evaluated = Evaluated(**words)  # type: ignore[arg-type]
    assert (len(evaluated.eval()), evaluated.test()) == (NUMBER, None)


def test_a_stored_size_of_items_is_a_height_and_a_width() -> None:
    source = option(Photos(), Photos(), decode_size=[4, 5], channels=1)
    assert (source.image_shape, source.train().fetch([0]).shape) == ((1, 4, 5), (1, 1, 4, 5))
    for height, width in ((SIDE, 4), (4, SIDE)):
        oblong = option(*[Photos(lambda image, h=height, w=width: image[:h, :w])] * 2)  # type: ignore[misc]
        assert oblong.image_shape == (3, height, width)
        pixels = torch.from_numpy(IMAGES[[7, 2], :height, :width]).permute(0, 3, 1, 2)
        assert torch.equal(oblong.train().fetch([7, 2]), pixels)


def test_numbers_of_classes_have_no_gaps_and_targets_without_names_are_called_as_their_kind() -> None:
    with pytest.raises(
        InputError, match=r"^dataset: item 1 of the training split has the label '2', but numbered cla"
    ):
        option(Photos(targets=[0, 2, 0]), Photos()).train()
    for targets, kind, names in (
        ([0.5, 1.0], "values", ("value",)),
        ([[0.5, 1.0]] * 2, "values", ("value_0", "value_1")),
        ([[0.0, 1.0]] * 2, "labels", ("label_0", "label_1")),
    ):
        assert option(Photos(targets=targets), Photos(targets=targets), targets=kind).class_names == names
