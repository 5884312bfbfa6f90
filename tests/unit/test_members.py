"""Images in tar shards and in saved tables."""

import io
import itertools
import json
import re
import shutil
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.preprocessing import MultiLabelBinarizer

from lockstep.core.errors import InputError
from lockstep.core.safe_read import check_size
from lockstep.data.datasets import HF, WebDataset, webdataset
from lockstep.data.datasets.files import FileSource
from lockstep.data.datasets.tables import TableRow


def png(level: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.full((8, 8, 3), level, dtype=np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def shard(path: Path, **files: bytes) -> None:
    """Write a tar file; two underscores in a name stand for a dot."""
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name.replace("__", "."))
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))


def levels(source: FileSource, indices: list[int]) -> list[int]:
    return source.train().fetch(indices)[:, 0, 0, 0].tolist()


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Two shards to train on and one to evaluate; labels are numbers."""
    shard(tmp_path / "train-0.tar", a__png=png(10), a__cls=b"2", b__cls=b"10\n", b__png=png(20), b__json=b"{}")
    shard(tmp_path / "train-1.tar", c__png=png(30), c__cls=b"2")
    shard(tmp_path / "val-0.tar", d__png=png(40), d__cls=b"10")
    return tmp_path


def test_shards_are_read_in_any_order(shards: Path) -> None:
    source = WebDataset(path=str(shards), decode_size=8)
    source.prepare()
    assert source.class_names == ("2", "10")
    assert source.train().labels.tolist() == [0, 1, 0]
    assert levels(source, [2, 0, 1, 0]) == [30, 10, 20, 10]
    assert source.eval().fetch([0])[0, 0, 0, 0] == 40
    assert source.notes()[0].endswith("skipped 1 other file (1 .json)")
    assert "2" in source.notes()[1]


def test_shards_may_be_links(shards: Path, tmp_path: Path) -> None:
    (linked := tmp_path / "linked").mkdir()
    for file in shards.glob("*.tar"):
        (linked / file.name).symlink_to(file)
    source = WebDataset(path=str(linked), decode_size=8)
    assert (levels(source, [0, 1, 2]), source.train().labels.tolist()) == ([10, 20, 30], [0, 1, 0])


def test_shards_that_moved_are_the_same_and_others_are_not(shards: Path, tmp_path: Path) -> None:
    here = WebDataset(path=str(shards)).fingerprint()
    shutil.copytree(shards, tmp_path / "moved", ignore=shutil.ignore_patterns("moved"))
    assert WebDataset(path=str(tmp_path / "moved")).fingerprint() == here
    shard(tmp_path / "moved" / "train-1.tar", e__png=png(30), e__cls=b"2")
    assert WebDataset(path=str(tmp_path / "moved"), val_shards="./val*.tar").fingerprint()["train"] != here["train"]


def test_what_a_fingerprint_sees_of_a_shard(shards: Path) -> None:
    files = {"a__png": png(10), "a__cls": b"2", "b__cls": b"10\n", "b__png": png(20)}
    contents = {
        "the same": files,
        "a longer image": files | {"a__png": png(10) + b"\0"},
        "another label": files | {"a__cls": b"10", "b__cls": b"2"},
        "another key": {"a__png": png(10), "a__cls": b"2", "d__cls": b"10", "d__png": png(20)},
        "one image less": {"b__png": png(20), "b__cls": b"10"},
    }
    seen = {}
    for name, own in contents.items():
        shutil.copytree(shards, folder := shards / name, ignore=shutil.ignore_patterns(*contents))
        shard(folder / "train-0.tar", **own)
        seen[name] = str(WebDataset(path=str(folder)).fingerprint())
    assert len({*seen.values()}) == len(contents)


def test_of_several_images_of_a_key_the_one_with_the_fewest_dots_is_the_sample_in_any_order(tmp_path: Path) -> None:
    files = {"a__edge__png": png(10), "a__png": png(20), "a__webp__png": png(30), "a__cls": b"1"}
    for number, names in enumerate(itertools.permutations(files)):
        (folder := tmp_path / str(number)).mkdir()
        shard(folder / "val.tar", d__png=png(40), d__cls=b"1")
        shard(folder / "train.tar", **{name: files[name] for name in names})
        assert levels(WebDataset(path=str(folder), decode_size=8), [0]) == [20], names


def test_the_suffix_begins_behind_the_folders_whatever_dots_they_have(tmp_path: Path) -> None:
    files = {
        f"v1.{number}/a__{suffix}": content
        for number in (1, 2)
        for suffix, content in (("png", png(10 * number)), ("cls", b"%d" % number))
    }
    for split in ("train", "val"):
        shard(tmp_path / f"{split}.tar", **files)
    source = WebDataset(path=str(tmp_path), decode_size=8)
    assert (levels(source, [0, 1]), source.train().labels.tolist()) == ([10, 20], [0, 1])


def test_a_share_of_the_shards_is_held_out(tmp_path: Path) -> None:
    files = {f"{number:02}__png": png(number) for number in range(10)}
    files |= {f"{number:02}__cls": b"cat" for number in range(10)}
    shard(tmp_path / "train.tar", **files, a__json=b"{}")
    source = WebDataset(path=str(tmp_path), val_share=0.3, decode_size=8)
    train, val = ({str(path) for path in split.paths} for split in (source.train(), source.eval()))
    assert (len(train), len(val), train & val) == (7, 3, set())
    assert [note for note in source.notes() if "skipped" in note] == [f"{tmp_path}: skipped 1 other file (1 .json)"]
    with pytest.raises(InputError, match=r"no val\*\.tar .*dataset\.val_share=0\.1"):
        WebDataset(path=str(tmp_path)).prepare()


def test_images_of_one_name_in_other_shards_are_different_ones(tmp_path: Path) -> None:
    for number in range(6):
        shard(tmp_path / f"train-{number}.tar", image__png=png(number), image__cls=b"cat")
    folds = [WebDataset(path=str(tmp_path), decode_size=8, folds=3, fold=fold).eval() for fold in range(3)]
    evaluated = [fold.fetch(list(range(len(fold.labels))))[:, 0, 0, 0].tolist() for fold in folds]
    assert [len(levels) for levels in evaluated] == [2, 2, 2]
    assert sorted(itertools.chain(*evaluated)) == list(range(6))
    assert len(WebDataset(path=str(tmp_path), decode_size=8, folds=3, fold=0, limit=0.5).train().labels) == 2


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({"a__png": b"x"}, r"train-2.tar:a.png has no label, expected a.cls next to it"),
        ({"a__png": b"x", "a__PNG": b"x", "a__cls": b"1"}, r"train-2\.tar has two images a\.png, expected one"),
        ({"a__png": b"x", "a__cls": b"\xff\xfe"}, "train-2.tar:a.cls is not a label"),
    ],
)
def test_a_shard_that_does_not_fit_is_named(shards: Path, files: dict[str, bytes], sentence: str) -> None:
    shard(shards / "train-2.tar", **files)
    with pytest.raises(InputError, match=sentence):
        WebDataset(path=str(shards)).prepare()


def test_a_compressed_shard_and_a_class_only_to_evaluate_are_refused(shards: Path) -> None:
    shard(shards / "val-1.tar", e__png=png(1), e__cls=b"7")
    with pytest.raises(InputError, match=r"val-1.tar:e.png has the label '7', which no training example has"):
        WebDataset(path=str(shards)).prepare()
    with tarfile.open(shards / "train-2.tar", "w:gz") as tar:
        tar.add(shards / "val-1.tar")
    with pytest.raises(InputError, match=r"train-2.tar cannot be indexed .*, expected a tar file that is not compr"):
        WebDataset(path=str(shards)).prepare()


@pytest.mark.parametrize("pattern", ["none*.tar", "/data/*.tar", "train**.tar"])
def test_a_pattern_that_names_no_shard_is_one_sentence(shards: Path, pattern: str) -> None:
    with pytest.raises(InputError, match=f"there is no {re.escape(pattern)} in"):
        WebDataset(path=str(shards), train_shards=pattern).prepare()


NAMES = ["bird", "cat", "dog"]
LABELS = [["cat", "dog"], ["dog"], [], ["bird", "cat"]]


def npy(cells: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array(cells))
    return buffer.getvalue()


def labelled(folder: Path, suffix: str, labels: list[bytes]) -> str:
    """A shard of images with these label files, to train on and to evaluate."""
    images = {f"{number}__png": png(number) for number in range(len(labels))}
    for split in ("train", "val"):
        files = {f"{number}__{suffix}": label for number, label in enumerate(labels)}
        shard(folder / f"{split}.tar", **images, **files)
    return str(folder)


@pytest.mark.parametrize(
    ("suffix", "stored", "options", "names"),
    [
        ("cls", [" ; ".join(own).encode() for own in LABELS], {}, NAMES),
        ("txt", [",".join(own).encode() for own in LABELS], {"label_separator": ","}, NAMES),
        ("json", [json.dumps(own).encode() for own in LABELS], {}, NAMES),
        ("json", [json.dumps({"of": own}).encode() for own in LABELS], {"label_keys": ["of"]}, NAMES),
        ("json", None, {"label_keys": NAMES}, NAMES),
        ("json", b"list", {}, ["label_0", "label_1", "label_2"]),
        ("npy", b"npy", {}, ["label_0", "label_1", "label_2"]),
    ],
)
def test_labels_beside_an_image_are_those_of_scikit_learn(
    suffix: str, stored: Any, options: dict[str, Any], names: list[str], tmp_path: Path
) -> None:
    expected = MultiLabelBinarizer(classes=NAMES).fit_transform(LABELS)
    if stored is None:
        stored = [json.dumps(dict(zip(names, row, strict=True))).encode() for row in expected.tolist()]
    elif isinstance(stored, bytes):
        write = npy if stored == b"npy" else lambda row: json.dumps(row.astype(float).tolist()).encode()
        stored = [*map(write, expected)]
    source = WebDataset(path=labelled(tmp_path, suffix, stored), label=suffix, targets="labels", **options)
    assert source.class_names == tuple(names)
    assert source.train().labels.dtype == torch.float32
    np.testing.assert_array_equal(source.eval().labels.numpy(), expected)
    assert "1 of 4 images of the training split have no label" in source.notes()


@pytest.mark.parametrize(
    ("suffix", "write", "options", "names"),
    [
        ("cls", lambda row: ";".join(map(str, row)).encode(), {}, ("value_0", "value_1")),
        ("json", lambda row: json.dumps(row).encode(), {}, ("value_0", "value_1")),
        ("npy", npy, {}, ("value_0", "value_1")),
        ("json", lambda row: json.dumps({"x": row[0], "y": row[1]}).encode(), {"label_keys": ["x", "y"]}, ("x", "y")),
    ],
)
def test_values_beside_an_image_are_its_numbers(
    suffix: str, write: Any, options: dict[str, Any], names: tuple[str, ...], tmp_path: Path
) -> None:
    values = [[1.5, -2.0], [0.0, 3.25], [1e-3, 7.0]]
    path = labelled(tmp_path, suffix, [*map(write, values)])
    source = WebDataset(path=path, label=suffix, targets="values", **options)
    assert source.class_names == names
    torch.testing.assert_close(source.train().labels, torch.tensor(values), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("suffix", "label", "options", "sentence"),
    [
        ("json", b"[1, NaN]", {"targets": "values"}, r"train\.tar:1\.png has nan for 'value_1', expected a finite"),
        ("json", b"[1]", {"targets": "values"}, "has 1 number, expected 2, as the first example to train on has"),
        ("json", b"{", {}, r"train\.tar:1\.json is not a label \(Expecting property"),
        ("json", b"[" * 9999, {}, r"train\.tar:1\.json is not a label"),
        ("json", b"[0, 1]", {}, r"has the label \[0, 1\], expected a class; correct it, or use task=multilabel"),
        ("json", b'{"y": 1}', {"label_keys": ["x"]}, r"dataset\.label_keys: .*1\.json has no 'x'; name a field"),
        ("json", b"[[1], 2]", {"targets": "labels"}, r"has the labels \[\[1\], 2\], expected a list of classes"),
        ("npy", npy([1, 2]), {"targets": "labels"}, "has 2.0 for 'label_1', expected 0 or 1"),
        ("npy", npy(["a", "b"]), {"targets": "values"}, r"1\.npy is not a label \(Cannot cast"),
        ("npy", npy(np.array([None])), {"targets": "values"}, r"1\.npy is not a label \(Object arrays cannot"),
        ("npy", b"no", {"targets": "values"}, r"1\.npy is not a label"),
    ],
)
def test_a_file_that_is_no_label_is_one_sentence(
    suffix: str, label: bytes, options: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    first = {"json": b"[0.0, 1.0]" if "targets" in options else b"1", "npy": npy([0, 1]), "cls": b"1"}[suffix]
    if "label_keys" in options:
        first = b'{"x": 1}'
    source = WebDataset(path=labelled(tmp_path, suffix, [first, label]), label=suffix, **options)
    with pytest.raises(InputError, match=sentence):
        source.prepare()
    with pytest.raises(InputError, match=r"dataset\.label_keys names fields of JSON, .* use dataset\.label=json"):
        WebDataset(path="shards", label_keys=["x"])


def test_shards_that_webdataset_wrote_are_read(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    for split, number in (("train", 4), ("val", 2)):
        with webdataset.TarWriter(str(tmp_path / f"{split}-0.tar")) as writer:
            for index in range(number):
                pixels = np.full((8, 8, 3), 10 * index, dtype=np.uint8)
                writer.write({"__key__": f"{split}/{index:04}", "png": pixels, "cls": index % 2})
    assert levels(WebDataset(path=str(tmp_path), decode_size=8), [3, 1]) == [30, 10]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A data set of six training and two evaluation images, written by `save_to_disk`."""
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["yak", "ant"])})

    def table(numbers: range) -> object:
        rows = {"image": [{"bytes": png(10 * n), "path": None} for n in numbers], "label": [n % 2 for n in numbers]}
        return datasets.Dataset.from_dict(rows, features=features)

    datasets.DatasetDict({"train": table(range(6)), "validation": table(range(2))}).save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


def test_a_saved_table_is_read(saved: Path, tmp_path: Path) -> None:
    source = HF(path=str(saved), decode_size=8)
    source.prepare()
    assert source.class_names == ("yak", "ant")
    assert source.train().labels.tolist() == [0, 1, 0, 1, 0, 1]
    assert levels(source, [5, 0, 3]) == [50, 0, 30]
    assert len(source.eval()) == 2
    shutil.copytree(saved, tmp_path / "moved")
    assert HF(path=str(tmp_path / "moved")).fingerprint() == source.fingerprint()
    datasets = pytest.importorskip("datasets")
    changed = datasets.load_from_disk(saved)
    changed["train"] = changed["train"].map(lambda row: {"image": Image.effect_noise((9, 7), 50)})
    changed.save_to_disk(tmp_path / "changed")
    fingerprint = HF(path=str(tmp_path / "changed")).fingerprint()
    assert fingerprint["train"] != source.fingerprint()["train"], "other images under the same labels"
    assert fingerprint["val"] == source.fingerprint()["val"]


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"val_split": "test"}, "val_split is 'test', but .* has 'train', 'validation'.*dataset.val_share=0.1"),
        ({"train_split": "fit"}, "train_split is 'fit', but .* has 'train', 'validation'"),
        ({"image_column": "img"}, "image_column is 'img', but the table .* has 'image', 'label'"),
        ({"image_column": "label"}, "image_column is 'label', which holds ClassLabel.*, expected images"),
        (
            {"image_column": "label", "label_column": "image"},
            "image_column is 'label', which holds ClassLabel.*, expected images",
        ),
    ],
)
def test_what_a_saved_table_does_not_have_is_named(saved: Path, keys: dict[str, object], sentence: str) -> None:
    with pytest.raises(InputError, match=f"dataset.{sentence}"):
        HF(path=str(saved), **keys).prepare()  # type: ignore[arg-type]


def test_every_split_of_a_saved_table_needs_its_columns(saved: Path, tmp_path: Path) -> None:
    tables = pytest.importorskip("datasets").load_from_disk(saved)
    tables["validation"] = tables["validation"].rename_column("image", "picture")
    tables.save_to_disk(tmp_path / "renamed")
    with pytest.raises(InputError, match=r"dataset.image_column is 'image', but the table .* has 'label', 'picture'"):
        HF(path=str(tmp_path / "renamed")).prepare()


def test_a_folder_that_is_not_a_saved_table_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    with pytest.raises(InputError, match=r"expected a folder that save_to_disk"):
        HF(path=str(tmp_path)).prepare()
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"dataset=hf needs the package datasets, .*pip install 'lockstep\[hf\]'"):
        HF(path=str(tmp_path)).prepare()


@pytest.mark.parametrize("name", ["train", "fit"])
def test_a_saved_table_without_splits_is_the_one_to_train_on_by_any_name(
    saved: Path, tmp_path: Path, name: str
) -> None:
    pytest.importorskip("datasets").load_from_disk(saved)["train"].save_to_disk(tmp_path / "one")
    source = HF(path=str(tmp_path / "one"), train_split=name, val_share=0.4, decode_size=8)
    assert (len(source.train()), len(source.eval())) == (4, 2)


def test_the_number_of_no_class_is_refused_in_a_column_of_names(tmp_path: Path) -> None:
    """A test split of the hub has it where the labels are secret."""
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["yak", "ant"])})
    rows = {"image": [{"bytes": png(n), "path": None} for n in range(4)], "label": [0, 1, -1, 0]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "one")
    with pytest.raises(InputError, match=r"row 2 of .* has the label -1, expected a class; correct it"):
        HF(path=str(tmp_path / "one"), val_share=0.5).prepare()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"group_column": "group"}, r"row 1 of train in .* has no group"),
        ({"group_pattern": "(.*)"}, r"row 0 of train in .* has an image without the name of a file"),
    ],
)
def test_a_row_of_a_saved_table_without_a_group_is_named(
    options: dict[str, str], sentence: str, tmp_path: Path
) -> None:
    datasets = pytest.importorskip("datasets")
    rows = {
        "image": [{"bytes": png(n), "path": None} for n in range(3)],
        "label": ["a"] * 3,
        "group": ["x", None, "y"],
    }
    features = {"image": datasets.Image(), "label": datasets.Value("string"), "group": datasets.Value("string")}
    datasets.Dataset.from_dict(rows, features=datasets.Features(features)).save_to_disk(tmp_path / "one")
    with pytest.raises(InputError, match=f"{sentence}; use dataset.group_column=NAME"):
        HF(path=str(tmp_path / "one"), val_share=0.5, **options).prepare()  # type: ignore[arg-type]


def test_a_row_of_a_saved_table_without_an_image_is_broken(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"image": [{"bytes": png(n), "path": None} for n in range(5)], "label": [0, 1, 0, 1, 0]}
    rows["image"][2] = None
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["yak", "ant"])})
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "one")
    source = HF(path=str(tmp_path / "one"), val_share=0.4, decode_size=8)
    assert source.fingerprint()
    with pytest.raises(InputError, match=r"row 2 of .* \(the table does not contain its bytes\)"):
        torch.cat([split.fetch([*range(len(split))]) for split in (source.train(), source.eval())])


@pytest.mark.parametrize("image", [None, {"path": "7.png"}, {"bytes": None, "path": "7.png"}])
def test_an_image_that_a_table_names_and_does_not_contain_is_broken(image: dict[str, Any] | None) -> None:
    row = TableRow(table=[{"photo": image}], where="a table", column="photo", row=0)
    with pytest.raises(ValueError, match=r"^the table does not contain its bytes$"):
        row.contents()


def test_shards_are_read_in_the_order_of_their_names(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    glob = Path.glob
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: sorted(glob(folder, pattern), reverse=True))
    assert levels(WebDataset(path=str(shards), decode_size=8), [0, 1, 2]) == [10, 20, 30]


def test_of_several_shards_in_two_splits_the_first_by_name_is_named(tmp_path: Path) -> None:
    for number in range(8):
        for split in ("train", "val"):
            (tmp_path / f"{split}-{number}.tar").touch()
    for options, says in (
        ({"test_shards": "val-[2-7].tar"}, f"both name {tmp_path}/val-2.tar; name another"),
        ({"test_shards": "train*.tar"}, f"both name {tmp_path}/train-0.tar; name another"),
        ({"val_share": 0.5}, f"names {tmp_path}/val-0.tar too; remove dataset.val_share"),
        ({"val_share": 0.5, "test_shards": "val-[0-4].tar"}, f"names {tmp_path}/val-5.tar too; remove"),
    ):
        with pytest.raises(InputError, match=re.escape(says)):
            WebDataset(path=str(tmp_path), **options).list_files()  # type: ignore[arg-type]


def test_a_pattern_that_names_no_shard_to_train_on_is_answered_with_its_keys_alone(shards: Path) -> None:
    with pytest.raises(InputError) as caught:
        WebDataset(path=str(shards), train_shards="none*.tar").prepare()
    assert str(caught.value) == (
        f"dataset.train_shards: there is no none*.tar in {shards}; name the shards with dataset.train_shards=PATTERN "
        "and their folder with dataset.path=FOLDER"
    )
    for key in ("val", "test"):
        with pytest.raises(InputError) as caught:
            WebDataset(path=str(shards), **{f"{key}_shards": "none*.tar"}).prepare()
        remedy = f"dataset.path=FOLDER, or hold out a share of the others with dataset.{key}_share=0.1"
        assert str(caught.value).endswith(remedy)


def test_hidden_members_are_counted_and_folders_are_no_members(tmp_path: Path) -> None:
    files = {"x/._é.png": b"x", ".y/é.png": b"x", "x/notes.txt": b"x", "./é.png": png(10), "./é.cls": b"1"}
    for split in ("train", "val"):
        with tarfile.open(tmp_path / f"{split}.tar", "w", format=tarfile.GNU_FORMAT) as tar:
            (folder := tarfile.TarInfo("x")).type = tarfile.DIRTYPE
            tar.addfile(folder)
            for name, content in files.items():
                (entry := tarfile.TarInfo(name)).size = len(content)
                tar.addfile(entry, io.BytesIO(content))
    source = WebDataset(path=str(tmp_path), decode_size=8)
    assert source.notes()[0] == f"{tmp_path}: skipped 6 other files (4 hidden, 2 .txt)"
    assert (source.train().name(0), levels(source, [0])) == (f"{tmp_path}/train.tar:./é.png", [10])


def test_images_of_several_bands_are_members_too(tmp_path: Path) -> None:
    array = np.arange(8 * 8 * 5, dtype=np.uint8).reshape(8, 8, 5)
    for split in ("train", "val"):
        shard(tmp_path / f"{split}.tar", a__npy=npy(array), a__cls=b"1", a__png=png(10))
    source = WebDataset(path=str(tmp_path), decode_size=8, channels=5)
    assert torch.equal(source.train().fetch([0])[0], torch.from_numpy(array).permute(2, 0, 1))
    assert len(WebDataset(path=str(tmp_path), decode_size=8).train()) == 1
    assert levels(WebDataset(path=str(tmp_path), decode_size=8), [0]) == [10]


@pytest.mark.parametrize(
    ("label", "keys", "stored", "names"),
    [
        ("json", ["size"], {"size": 2.5}, ("size",)),
        ("json", ["size"], {"size": [2.5, 3.5]}, ("size_0", "size_1")),
        ("meta.JSON", ["size"], {"size": 2.5}, ("size",)),
        ("json", [], 2.5, ("value",)),
        ("json", ["y", "x"], {"x": 1, "y": 2}, ("y", "x")),
    ],
)
def test_values_are_called_as_the_fields_that_have_them(
    label: str, keys: list[str], stored: Any, names: tuple[str, ...], tmp_path: Path
) -> None:
    path = labelled(tmp_path, label.lower().replace(".", "__"), [json.dumps(stored).encode()] * 2)
    source = WebDataset(path=path, label=label, label_keys=keys, targets="values")
    assert source.class_names == names
    expected = [stored[key] for key in keys] if isinstance(stored, dict) else [stored]
    assert source.train().labels.tolist()[0] == [*np.ravel(expected)]


@pytest.mark.parametrize(
    ("label", "keys", "sentence"),
    [
        (b'{"x": 1}', ["x", "y"], r"^dataset\.label_keys: .*train\.tar:0\.json has no 'y'; name a field that every"),
        (
            b"[1]",
            ["x"],
            r"^dataset\.label_keys: .*train\.tar:0\.json has no 'x'; .* with dataset.label_keys=\[NAME\]$",
        ),
        (
            b"5",
            ["x"],
            r"^dataset\.label_keys: .*train\.tar:0\.json has no 'x'; .* with dataset.label_keys=\[NAME\]$",
        ),
        (
            b'"x"',
            ["x"],
            r"^dataset\.label_keys: .*train\.tar:0\.json has no 'x'; .* with dataset.label_keys=\[NAME\]$",
        ),
    ],
)
def test_a_field_that_a_label_does_not_have_is_named(
    label: bytes, keys: list[str], sentence: str, tmp_path: Path
) -> None:
    source = WebDataset(path=labelled(tmp_path, "json", [label]), label="json", label_keys=keys, targets="values")
    with pytest.raises(InputError, match=sentence):
        source.prepare()
    says = "dataset.label_keys names fields of JSON, but dataset.label is a.CLS; use dataset.label=json"
    with pytest.raises(InputError, match=f"^{re.escape(says)}$"):
        WebDataset(path="shards", label="a.CLS", label_keys=keys)


def test_an_empty_label_is_none(shards: Path) -> None:
    shard(shards / "train-2.tar", a__png=b"x", a__cls=b" \n")
    with pytest.raises(InputError, match=r"train-2.tar:a.png has no label, expected a.cls next to it; name another"):
        WebDataset(path=str(shards)).prepare()


def test_all_labels_of_a_shard_together_have_a_limit(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webdataset, "check_size", lambda size, what: check_size(size, what, most=600))
    members = {
        f"{number}__{suffix}": content
        for number in range(3)
        for suffix, content in (("png", b"x"), ("cls", b"a" * 201))
    }
    shard(shards / "train-2.tar", **members)
    with pytest.raises(InputError, match=r"with '2\.cls' its labels have 603 bytes, expected at most 600"):
        WebDataset(path=str(shards)).prepare()


def test_rows_of_every_split_are_checked_and_named_by_their_split(saved: Path, tmp_path: Path) -> None:
    assert HF(path=str(saved)).eval().name(1) == f"row 1 of validation in {saved}"
    datasets = pytest.importorskip("datasets")
    splits = datasets.load_from_disk(saved)
    without = datasets.DatasetDict(train=splits["train"], validation=splits["validation"].remove_columns("label"))
    without.save_to_disk(tmp_path / "without")
    with pytest.raises(InputError, match=r"dataset.label_column is 'label', but the table .* has 'image'; name one"):
        HF(path=str(tmp_path / "without")).prepare()
    for name in (None, "numpy", "torch"):
        for table in splits.values():
            table.set_format(name)
        splits.save_to_disk(tmp_path / str(name))
        source = HF(path=str(tmp_path / str(name)), decode_size=8)
        assert (source.train().labels.tolist(), levels(source, [5])) == ([0, 1, 0, 1, 0, 1], [50])


def test_what_a_library_says_in_several_lines_is_one_sentence(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise ValueError("two\n  lines")

    monkeypatch.setattr(pytest.importorskip("datasets"), "load_from_disk", refuse)
    says = (
        rf"^dataset\.path: {saved} cannot be read \(two lines\), expected a folder that save_to_disk of the package"
    )
    with pytest.raises(InputError, match=says):
        HF(path=str(saved)).prepare()


def test_classes_of_a_saved_table_may_be_read_as_values(saved: Path) -> None:
    source = HF(path=str(saved), targets="values")
    assert (source.class_names, source.classes) == (("label",), 1)
    assert source.train().labels.tolist() == [[0.0], [1.0]] * 3


def test_a_missing_image_an_empty_one_and_one_in_another_place_are_other_data(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})
    seen = list[object]()
    for name, place, image in (("last", 4, None), ("first", 0, None), ("empty", 4, {"bytes": b"", "path": None})):
        images: list[object] = [{"bytes": png(n), "path": None} for n in range(4)]
        rows = {"image": [*images[:place], image, *images[place:]], "label": [*"ababa"]}
        datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / name)
        seen.append(HF(path=str(tmp_path / name), val_share=0.5).fingerprint())
    assert all(one != other for one, other in itertools.combinations(seen, 2))
