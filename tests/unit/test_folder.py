"""Image files in class folders."""

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.core.errors import InputError
from lockstep.data.datasets.files import FileSplit
from lockstep.data.datasets.folder import (
    HIDDEN,
    NO_SUFFIX,
    Folder,
    ImageNet,
    kind_of,
    left_out_note,
    scan_split,
    suffixes_of,
)
from lockstep.data.datasets.listing import Files, as_names


def fill(folder: Path, **levels: list[int]) -> None:
    """Make a class folder for each name, with an image of one grey level for each number."""
    for name, numbers in levels.items():
        (folder / name).mkdir(parents=True)
        for number in numbers:
            Image.fromarray(np.full((12, 16, 3), number, dtype=np.uint8)).save(folder / name / f"{number:03}.png")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three classes to train on, of which the evaluation split has two."""
    fill(tmp_path / "train", zebra=[10, 20], ant=[30], cat=[40, 50, 60])
    fill(tmp_path / "val", zebra=[70], cat=[80])
    return tmp_path


def test_the_order_of_the_disk_does_not_matter(tmp_path: Path) -> None:
    names = [chr(97 + (7 * number) % 26) * 3 for number in range(26)]
    for split in ("train", "val"):
        fill(tmp_path / split, **{name: [ord(name[0]), 3, 2] for name in names})
    split = Folder(path=str(tmp_path), decode_size=8).train()
    assert split.labels.tolist() == [number for number in range(26) for _ in range(3)]
    levels = split.fetch(list(range(78)))[:, 0, 0, 0].tolist()
    assert levels == [level for letter in range(97, 123) for level in (2, 3, letter)]


@pytest.mark.parametrize("backwards", [False, True])
def test_of_several_folders_to_evaluate_the_first_by_name_is_taken_however_a_disk_lists_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backwards: bool
) -> None:
    @contextmanager
    def listing(path: Any) -> Iterator[Any]:
        with scan(path) as entries:
            yield iter(sorted(entries, key=lambda entry: entry.name, reverse=backwards))

    scan = os.scandir
    for number, split in enumerate(("train", "my_val_a", "my_val_b")):
        fill(tmp_path / split, ant=[10 * number], bee=[10 * number + 1])
    monkeypatch.setattr(os, "scandir", listing)
    folder = Folder(path=str(tmp_path), decode_size=8)
    assert folder.eval().fetch([0, 1])[:, 0, 0, 0].tolist() == [10, 11]


def test_files_and_classes_are_in_the_order_of_their_letters_capitals_first(tmp_path: Path) -> None:
    for split in ("train", "val"):
        fill(tmp_path / split, ant=[1], Zebra=[2])
        for name, level in (("b", 4), ("A", 3), ("a", 5), ("C", 6)):
            Image.fromarray(np.full((8, 8, 3), level, dtype=np.uint8)).save(tmp_path / split / "ant" / f"{name}.png")
    folder = Folder(path=str(tmp_path), decode_size=8)
    assert list(folder.class_names) == ["Zebra", "ant"]
    assert folder.train().fetch(list(range(6)))[:, 0, 0, 0].tolist() == [2, 1, 3, 6, 5, 4]


@pytest.mark.parametrize("words", [{"train_folder": "train"}, {"val_folder": "valid"}, {}], ids=str)
def test_each_folder_is_located_also_where_the_other_is_named(tmp_path: Path, words: dict[str, str]) -> None:
    fill(tmp_path / "train", ant=[1, 2], cat=[3])
    fill(tmp_path / "valid", ant=[4], cat=[5])
    folder = Folder(path=str(tmp_path), decode_size=8, **words)
    assert {split: len(files) for split, files in folder.listings().items()} == {"train": 3, "val": 2}


def test_the_evaluation_split_numbers_its_classes_as_the_training_split_does(root: Path) -> None:
    split = Folder(path=str(root), decode_size=8).eval()
    assert split.labels.tolist() == [1, 2]
    assert split.fetch([0, 1])[:, 0, 0, 0].tolist() == [80, 70]


def test_images_have_the_decode_size_and_the_model_its_own(root: Path) -> None:
    folder = Folder(path=str(root), decode_size=10, input_size=8, crop=0.8)
    assert folder.image_shape == (3, 10, 10)
    assert folder.input_shape == (3, 8, 8)
    assert folder.eval_crop == 0.8
    assert folder.train().fetch([0]).shape == (1, 3, 10, 10)
    assert Folder(path=str(root), decode_size=10).input_shape == (3, 10, 10)


def test_files_that_are_no_images_are_left_out_counted_and_reported(root: Path) -> None:
    (root / "train" / "list.csv").write_text("a,b")
    for name in ("notes.txt", "more.TXT", "Thumbs.db", ".DS_Store", "._030.png", "README"):
        (root / "train" / "ant" / name).write_text("about ants")
    (root / "train" / "cat" / ".thumbnails").mkdir()
    (root / "train" / "cat" / ".thumbnails" / "040.png").write_text("hidden")
    folder = Folder(path=str(root), decode_size=8)
    assert len(folder.train()) == 6
    kinds = "3 hidden, 2 .txt, 1 .csv, 1 .db, 1 without a suffix"
    assert folder.notes()[0] == f"{root}/train: skipped 8 other files ({kinds})"


def test_what_is_left_out_is_counted_anew_in_each_data_set_of_a_process(root: Path) -> None:
    (root / "train" / "notes.txt").touch()
    (root / "train" / "cat" / "more.txt").touch()
    (root / "val" / "cat" / "list.csv").touch()
    for limit in (None, 0.9, 0.8):
        notes = [note for note in Folder(path=str(root), limit=limit).notes() if "skipped" in note]
        assert notes == [
            f"{root}/train: skipped 2 other files (2 .txt)",
            f"{root}/val: skipped 1 other file (1 .csv)",
        ]


def test_a_class_without_an_image_to_evaluate_is_reported(root: Path) -> None:
    note = Folder(path=str(root)).notes()[0]
    assert note == "1 of 3 classes have no image in the evaluation split, so no score tells anything about them: ant"


def test_folders_in_a_class_folder_hold_images_of_the_class(root: Path) -> None:
    fill(root / "train" / "cat", **{"2023": [41], "2024.jpg": [42]})
    fill(root / "train" / "cat" / "2023", summer=[43])
    for name, above in (("again", root / "train" / "cat"), ("split", root / "train"), ("all", root)):
        (root / "train" / "cat" / "2023" / name).symlink_to(above)
    folder = Folder(path=str(root), decode_size=8)
    split = folder.train()
    names = [str(path.relative_to(root / "train" / "cat")) for path in list(split.paths)[1:7]]
    assert names == ["040.png", "050.png", "060.png", "2023/041.png", "2023/summer/043.png", "2024.jpg/042.png"]
    assert split.fetch([4, 5, 6])[:, 0, 0, 0].tolist() == [41, 43, 42]
    assert split.labels.tolist() == [0, *[1] * 6, 2, 2]
    assert "3 links back to a folder above" in folder.notes()[0]


def names_of(split: FileSplit) -> set[str]:
    return {f"{path.parent.name}/{path.name}" for path in split.paths}


def test_a_held_out_share_is_taken_from_each_class_and_nothing_is_in_both(tmp_path: Path) -> None:
    fill(tmp_path / "train", a=list(range(50)), b=list(range(10)), c=[1, 2], d=[1])
    (tmp_path / "train" / "a" / "notes.txt").touch()
    folder = Folder(path=str(tmp_path), val_share=0.2, decode_size=8)
    assert sum("skipped 1 other file" in note for note in folder.notes()) == 1
    assert torch.bincount(folder.eval().labels).tolist() == [10, 2, 1]
    assert torch.bincount(folder.train().labels).tolist() == [40, 8, 1, 1]
    train, val = names_of(folder.train()), names_of(folder.eval())
    assert not train & val
    assert len(train | val) == 63
    assert [note for note in folder.notes() if note.endswith(": d")]
    assert folder.fingerprint() != Folder(path=str(tmp_path), val_share=0.3).fingerprint()


def test_a_share_of_classes_with_one_file_each_is_refused(tmp_path: Path) -> None:
    fill(tmp_path / "train", a=[1], b=[2])
    with pytest.raises(InputError, match=r"val_share is 0\.5, but every class has one image"):
        Folder(path=str(tmp_path), val_share=0.5).prepare()


def test_imagenet_is_stored_at_256_and_seen_at_224() -> None:
    imagenet = ImageNet(path="nowhere")
    assert imagenet.image_shape == (3, 256, 256)
    assert imagenet.input_shape == (3, 224, 224)
    assert round(256 * imagenet.eval_crop) == 224


def test_a_single_class_is_reported(tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / split / "cat").mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / split / "cat" / "a.png")
    assert Folder(path=str(tmp_path)).notes()[0] == "all images are of one class, cat, so there is nothing to learn"


def test_a_class_without_images_is_refused(root: Path) -> None:
    (root / "train" / "dog").mkdir()
    with pytest.raises(InputError, match=r"train/dog has no images \(.*\.jpg"):
        Folder(path=str(root)).prepare()


def test_links_to_images_are_images_and_one_that_leads_nowhere_ends_the_run(root: Path) -> None:
    (root / "train" / "ant" / "1.png").symlink_to(root / "train" / "cat" / "040.png")
    (root / "train" / "ant" / "2.png").symlink_to(root / "nowhere.png")
    split = Folder(path=str(root), decode_size=8).train()
    assert split.fetch([0, 1])[:, 0, 0, 0].tolist() == [30, 40]
    with pytest.raises(InputError, match=r"2\.png is an image of the data set and cannot be read \(No such file"):
        split.fetch([2])


def test_the_files_of_a_split_are_paths_by_their_numbers(root: Path) -> None:
    odd = os.fsdecode(b"\xff odd\xe2\x82\xac.PNG")
    (root / "train" / "ant" / "030.png").rename(root / "train" / "ant" / odd)
    files = Folder(path=str(root), decode_size=8).train().paths
    expected = sorted((root / "train").rglob("*.[pP][nN][gG]"))
    assert list(files) == expected
    assert [files[at] for at in (0, -1, len(expected) - 1)] == [expected[0], expected[-1], expected[-1]]
    for beyond in (len(expected), -len(expected) - 1):
        with pytest.raises(IndexError):
            files[beyond]


def test_a_folder_is_listed_once_however_often_it_is_asked_for(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scanned, scan = [], os.scandir

    def counted(path: str) -> Any:
        scanned.append(str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", counted)
    for _ in range(2):
        source = Folder(path=str(root), decode_size=8)
        source.prepare()
        assert (source.classes, len(source.train()), len(source.eval())) == (3, 6, 2)
        source.fingerprint()
        looked_for = [str(root), str(root / "train"), str(root / "val")]
    classes = [str(file) for name in ("train", "val") for file in (root / name).iterdir()]
    assert sorted(scanned) == sorted([*looked_for, *looked_for[1:], *classes])


def test_the_fingerprint_is_that_of_the_names_by_class_wherever_the_folder_lies(root: Path, tmp_path: Path) -> None:
    here = Folder(path=str(root)).fingerprint()
    assert here["train"].keys() == {"ant", "cat", "zebra"}
    assert here["val"].keys() == {"cat", "zebra"}
    assert here["train"]["cat"].startswith("3 files ")
    shutil.copytree(root, tmp_path / "moved", ignore=shutil.ignore_patterns("moved"))
    assert Folder(path=str(tmp_path / "moved")).fingerprint() == here
    shutil.copytree(root, tmp_path / "other", ignore=shutil.ignore_patterns("moved", "other"))
    (tmp_path / "other" / "train" / "cat" / "040.png").rename(tmp_path / "other" / "train" / "cat" / "041.png")
    there = Folder(path=str(tmp_path / "other")).fingerprint()
    assert [name for name in here["train"] if here["train"][name] != there["train"][name]] == ["cat"]
    assert there["val"] == here["val"]
    shutil.copytree(root / "val", root / "test")
    tested = Folder(path=str(root), test_folder="test")
    assert tested.fingerprint() == {**here, "test": here["val"]}


def test_six_kinds_of_other_files_are_named_and_the_rest_are_others() -> None:
    kinds = Counter({f".{letter}": 10 - number for number, letter in enumerate("abcdefg")})
    six = Counter(dict(kinds.most_common(6)))
    assert left_out_note(Path("p"), six) == ("p: skipped 45 other files (10 .a, 9 .b, 8 .c, 7 .d, 6 .e, 5 .f)",)
    assert left_out_note(Path("p"), kinds)[0].endswith("6 .e, 5 .f, others)")


@pytest.mark.parametrize(("side", "smaller"), [(111, 111), (112, 112), (113, None)])
@pytest.mark.parametrize("longer", [(40, 0), (0, 40)], ids=["wide", "high"])
def test_files_of_at_most_half_of_the_input_are_called_small(
    tmp_path: Path, side: int, smaller: int | None, longer: tuple[int, int]
) -> None:
    for place in ("train/a", "train/b", "val/a", "val/b"):
        (tmp_path / place).mkdir(parents=True)
        Image.new("RGB", (side + longer[0], side + longer[1])).save(tmp_path / place / "0.png")
    assert Folder(path=str(tmp_path)).enlarged_side() == smaller


@pytest.mark.parametrize(
    ("sizes", "seen", "share", "augment"),
    [
        ({"decode_size": 256}, (224, 224), 0.875, "standard"),
        ({"decode_size": 256, "input_size": None}, (256, 256), 1.0, "standard"),
        ({"decode_size": [256, 320]}, (256, 320), 1.0, "standard"),
        ({"decode_size": [320, 256]}, (320, 256), 1.0, "standard"),
        ({"decode_size": [64, 300]}, (64, 300), 1.0, "crop_flip"),
        ({"decode_size": [300, 64]}, (300, 64), 1.0, "crop_flip"),
        ({"decode_size": 65}, (65, 65), 1.0, "standard"),
        ({"decode_size": 300, "input_size": [224, 160]}, (224, 160), 1.0, "standard"),
        ({"input_size": [224, 160]}, (224, 160), 0.875, "standard"),
    ],
)
def test_only_squares_of_256_pixels_have_the_usual_centre_and_only_small_images_are_shifted(
    sizes: Any, seen: tuple[int, int], share: float, augment: str
) -> None:
    source = Folder(path="nowhere", **sizes)
    assert (source.input_shape[1:], source.eval_crop, source.usual_augment) == (seen, share, augment)


def test_names_that_run_into_each_other_are_other_data() -> None:
    labels = torch.zeros(2, dtype=torch.int64)
    facts = [Files(Path, as_names(names), labels, ("x",)).fingerprint() for names in (["ab", "c"], ["a", "bc"])]
    assert facts[0] != facts[1]
    of_many = [
        Files(Path, as_names("ab"), own, ("x",)).fingerprint() for own in (torch.zeros(2, 1), torch.ones(2, 1))
    ]
    assert of_many[0] != of_many[1]
    members = [Files(Path, np.arange(2), own, ("x", "y"), "shards").fingerprint() for own in (labels, 1 - labels)]
    assert members[0] != members[1]


@pytest.mark.parametrize(
    ("folders", "test_folder", "expected"),
    [
        ("train val", None, ("val", None)),
        ("train val test", "test", ("val", None)),
        ("train val test", "val", ("test", None)),
        ("train val", "val", ("none", 0.1)),
        ("train test", "test", ("none", 0.1)),
        ("train", None, ("none", 0.1)),
    ],
)
def test_the_folder_to_test_on_is_not_the_one_that_is_evaluated(
    tmp_path: Path, folders: str, test_folder: str | None, expected: tuple[str, float | None]
) -> None:
    for name in folders.split():
        (tmp_path / name / "a").mkdir(parents=True)
    located = Folder(path=str(tmp_path), test_folder=test_folder).located()
    assert (located.train_folder, (located.val_folder, located.val_share)) == ("train", expected)


@pytest.mark.parametrize(
    ("folders", "train", "expected"),
    [
        ("train val mine", "mine", ("val", None)),
        ("train test mine", "mine", ("test", None)),
        ("train val", ".", ("none", 0.1)),
        ("train val", "val", ("none", 0.1)),
        ("mine", "mine", ("none", 0.1)),
        ("train val", "nowhere", ("val", None)),
        ("train", "nowhere", ("val", None)),
    ],
)
def test_a_folder_to_train_on_that_is_typed_is_kept_and_the_other_one_is_looked_for(
    tmp_path: Path, folders: str, train: str, expected: tuple[str, float | None]
) -> None:
    for name in folders.split():
        (tmp_path / name / "a").mkdir(parents=True)
    located = Folder(path=str(tmp_path), train_folder=train).located()
    assert (located.train_folder, (located.val_folder, located.val_share)) == (train, expected)
    cut = Folder(path=str(tmp_path), train_folder=train, folds=3, fold=0).located()
    assert (cut.train_folder, cut.val_folder, cut.val_share) == (train, "val", None)


@pytest.mark.parametrize(
    ("key", "folders", "remedy"),
    [
        ("val", "train valid", "valid, or hold out a share of {}/train with dataset.val_share=0.1"),
        ("val", "train", "NAME, or hold out a share of {}/train with dataset.val_share=0.1"),
        ("test", "train val valid", "valid, or hold out a share of {}/train with dataset.test_share=0.1"),
    ],
)
def test_a_folder_that_is_not_there_is_answered_with_one_that_is_not_used_yet(
    tmp_path: Path, key: str, folders: str, remedy: str
) -> None:
    for name in folders.split():
        fill(tmp_path / name, a=[1])
    own = {"val_folder": "val", f"{key}_folder": "nowhere"}
    with pytest.raises(InputError) as caught:
        Folder(path=str(tmp_path), train_folder="train", **own).prepare()
    sentence = f"dataset.{key}_folder: there is no folder {tmp_path}/nowhere; name another with dataset.{key}_folder="
    assert str(caught.value) == sentence + remedy.format(tmp_path)


@pytest.mark.parametrize("channels", [1, 3])
def test_photos_have_the_suffixes_of_photos_and_other_channels_those_of_arrays(channels: int) -> None:
    assert {".jpg", ".png", ".tif"} < suffixes_of(channels)
    assert ".npy" not in suffixes_of(channels)
    assert suffixes_of(2) == suffixes_of(4) == {".npy", ".tif", ".tiff"}
    names = {"a.b.PNG": ".png", "2026.11.30.tif": ".tif", "a": NO_SUFFIX, "a.": ".", ".a.png": HIDDEN}
    assert {name: kind_of(name) for name in names} == names


def small_files(root: Path, *sides: int) -> str:
    """A folder of one class to train on with files of these sides, in their order; 0 is a broken one."""
    for split, own in (("train", sides), ("val", (300,))):
        (root / split / "a").mkdir(parents=True)
        for number, side in enumerate(own):
            path = root / split / "a" / f"{number:03}.png"
            if side:
                Image.new("RGB", (side + number % 2, side)).save(path)
            else:
                path.write_bytes(b"no image")
    return str(root)


@pytest.mark.parametrize(
    ("sides", "expected"),
    [
        ([56] * 3, 56),
        ([8] * 3, 32),
        ([31, 32], 32),
        ([8, 8, 100, 100, 100], 100),
        ([8, 8, 100, 100], 32),
        ([0, 56, 0, 56], 56),
        ([0, 0], None),
        ([40, 300, 300] * 9, 40),
        ([300, 40, 40] * 9, None),
        ([*[300, 40, 40] * 4, *[40, 300, 300] * 6], 40),
    ],
    ids=str,
)
def test_the_size_of_small_files_is_the_lower_median_of_nine_of_them(
    tmp_path: Path, sides: list[int], expected: int | None
) -> None:
    source = Folder(path=small_files(tmp_path, *sides))
    assert source.enlarged_side() == expected
    notes = [note for note in source.notes() if "are enlarged" in note]
    words = "the files are at most about {0} pixels high or wide, and are enlarged to 224: dataset.input_size={0} "
    less = f"dataset.decode_size={expected} is {(224 / (expected or 1)) ** 2:.0f} times less work"
    assert notes == ([] if expected is None else [words.format(expected) + less])


def test_files_are_small_for_the_shorter_side_of_an_input(tmp_path: Path) -> None:
    path = small_files(tmp_path, 112)
    for size, expected in (([224, 448], 112), ([448, 224], 112), ([222, 448], None), ([448, 222], None)):
        source = Folder(path=path, input_size=size)
        assert source.enlarged_side() == expected
        notes = [note for note in source.notes() if "are enlarged to 224: " in note]
        assert [note.endswith("decode_size=112 is 4 times less work") for note in notes] == [True] * bool(expected)


@pytest.mark.parametrize(("file", "seen"), [("IMG.JPG", True), ("b.png", True), ("a.txt", False), ("._a.jpg", False)])
def test_a_folder_of_images_without_classes_is_told_to_sort_them(tmp_path: Path, file: str, seen: bool) -> None:
    (folder := tmp_path / "photos").mkdir()
    (folder / file).touch()
    (tmp_path / "notes.txt").touch()
    with pytest.raises(InputError) as refused:
        scan_split(folder)
    remedy = f"; move its images into folders of their classes, such as {folder / 'cats'}" * seen
    assert str(refused.value) == f"dataset.path: {folder} has no subfolders, expected one per class{remedy}"


def test_a_class_to_evaluate_that_is_not_trained_is_named_with_what_to_do(root: Path) -> None:
    for name, remedy in (("dog", "remove it, or add it there"), ("CAT", "rename it to cat, as it is there")):
        fill(root / "val", **{name: [1]})
        with pytest.raises(InputError) as caught:
            Folder(path=str(root), skip=1).prepare()
        says = f"dataset.path: {root}/val/{name} is a class that {root}/train does not have; {remedy}"
        assert str(caught.value) == says
        shutil.rmtree(root / "val" / name)
        scan_split.cache_clear()


def test_a_folder_that_may_not_be_read_says_why(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "scandir", denied)
    says = rf"^dataset\.path: {root}/train cannot be read \(Permission denied\); give this user access$"
    with pytest.raises(InputError, match=says):
        Folder(path=str(root), train_folder="train", val_folder="val").prepare()


def test_a_class_without_images_names_the_suffixes_that_are_read(root: Path) -> None:
    (root / "train" / "dog").mkdir()
    (root / "train" / "dog" / "a.npy").touch()
    for channels, hint in ((3, "; .npy files are read with dataset.channels=N, if N is neither 1 nor 3"), (5, None)):
        if hint is None:
            (root / "train" / "dog" / "a.npy").unlink()
        with pytest.raises(InputError) as caught:
            Folder(path=str(root), train_folder="train", val_folder="val", channels=channels).prepare()
        expected = ".npy, .tif, .tiff" if channels == 5 else ".apng, .avif, .bmp, .dib, .gif, .heic"
        name = "ant" if channels == 5 else "dog"
        assert str(caught.value).startswith(f"dataset.path: {root}/train/{name} has no images ({expected}")
        assert str(caught.value).endswith(hint or ")")


@pytest.mark.parametrize(("number", "says"), [(1, "1 other file"), (2, "2 other files"), (1234, "1,234 other files")])
def test_files_that_are_left_out_are_counted_in_words(number: int, says: str) -> None:
    kinds = Counter({".b": number})
    assert left_out_note(Path("p"), kinds) == (f"p: skipped {says} ({number:,} .b)",)
    assert left_out_note(Path("p"), Counter({".b": 0})) == ()
    equal = left_out_note(Path("p"), Counter({".b": number, ".a": number}))[0]
    assert equal.endswith(f"({number:,} .a, {number:,} .b)")


def test_a_link_to_a_folder_above_the_one_where_one_works_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "outer" / "inner"
    for split in ("train", "val"):
        fill(place / split, cat=[1, 2], ant=[3])
    (place / "train" / "cat" / "again").symlink_to(tmp_path / "outer")
    Image.new("RGB", (8, 8)).save(tmp_path / "outer" / "4.png")
    monkeypatch.chdir(place)
    folder = Folder(path=".", train_folder="train", val_folder="val", decode_size=8)
    assert (len(folder.train()), len(folder.eval())) == (3, 3)
    assert folder.notes()[0] == "train: skipped 1 other file (1 links back to a folder above)"


def test_folders_without_one_to_train_on_are_classes_also_a_level_below(tmp_path: Path) -> None:
    for place in ("photos/val/lamp", "photos/val/mug", "photos/other/lamp"):
        (tmp_path / place).mkdir(parents=True)
    located = Folder(path=str(tmp_path)).located()
    assert (located.train_folder, located.val_folder, located.val_share) == ("photos", "none", 0.1)


def test_photos_are_normalised_as_the_published_weights_of_imagenet_expect(root: Path) -> None:
    source = Folder(path=str(root))
    assert (source.mean, source.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    for channels in (1, 2, 4):
        other = Folder(path=str(root), channels=channels)
        assert other.mean == pytest.approx([(0.485 + 0.456 + 0.406) / 3] * channels)
        assert other.std == pytest.approx([(0.229 + 0.224 + 0.225) / 3] * channels)
