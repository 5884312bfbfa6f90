"""Splits that are cut by hashes: shares, folds, limits, test splits and groups."""

import contextlib
import hashlib
import itertools
import os
import re
import shutil
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import lockstep
from lockstep.config.options import classes_of
from lockstep.core.data_protocols import SPLIT_NAMES
from lockstep.core.errors import InputError
from lockstep.core.run import State
from lockstep.core.tags import Monitor
from lockstep.data.datasets import CSV, Digits, Folder, listing
from lockstep.data.datasets.builtin import ArraySource
from lockstep.data.datasets.files import FileSource, FileSplit
from lockstep.data.datasets.folder import ImageNet
from lockstep.data.datasets.splitting import Examples
from lockstep.diagnostics.inspection import inspect
from lockstep.records.ledger import Ledger
from lockstep.records.record import Record
from lockstep.records.runs import JobRun, groups


def folder_of(root: Path, sizes: dict[str, int]) -> str:
    for name, size in sizes.items():
        (root / "train" / name).mkdir(parents=True, exist_ok=True)
        for number in range(size):
            Image.new("RGB", (4, 4), (number, 0, 0)).save(root / "train" / name / f"{number}.png")
    return str(root)


def evaluated(path: str, **options: Any) -> list[set[str]]:
    """The names of the files that each fold evaluates."""
    splits = [Folder(path=path, fold=fold, **options).eval() for fold in range(options["folds"])]
    return [{split.name(index) for index in range(len(split))} for split in splits]


def test_folds_are_disjoint_complete_and_stratified(tmp_path: Path) -> None:
    path = folder_of(tmp_path, {"a": 23, "b": 7, "c": 40})
    folds = evaluated(path, folds=5)
    assert sum(map(len, folds)) == len(set().union(*folds)) == 70
    for fold in range(5):
        source = Folder(path=path, folds=5, fold=fold)
        train, val = source.train(), source.eval()
        assert not {train.name(n) for n in range(len(train))} & folds[fold]
        for label, size in enumerate((23, 7, 40)):
            assert abs(int((val.labels == label).sum()) - size / 5) < 1, "as in StratifiedKFold"


def test_a_share_of_the_data_is_the_same_from_each_loader_whatever_was_listed_before(tmp_path: Path) -> None:
    path = folder_of(tmp_path, {"a": 40, "b": 20, "c": 8})
    words = f"dataset=folder dataset.path={path} dataset.decode_size=4 dataset.val_share=0.25 augment=none".split()
    words += ["model=linear", "device=cpu", "batch=4", "epochs=1", "optimizer=sgd"]

    def trained_on(limit: float, *loader: str) -> torch.Tensor:
        parts = lockstep.compose([*words, f"dataset.limit={limit}", *loader])
        return torch.cat([images for _, images, _ in parts.batches()])

    sizes = dict[float, int]()
    for limit in (0.2, 1.0, 0.5, 0.2):  # of 30, 15 and 6
        resident = trained_on(limit, "loader=resident")
        assert torch.equal(resident, trained_on(limit, "loader=streaming", "loader.workers=0"))
        sizes[limit] = len(resident)
    assert sizes == {0.2: 6 + 3 + 1, 1.0: 51, 0.5: 15 + 8 + 3}


def test_a_file_that_is_added_moves_few_others(tmp_path: Path) -> None:
    before = evaluated(folder_of(tmp_path / "one", {"a": 100, "b": 50}), folds=5)
    after = evaluated(folder_of(tmp_path / "two", {"a": 101, "b": 50}), folds=5)
    both = [[{name.split("train")[1] for name in fold} for fold in folds] for folds in (before, after)]
    moved = sum(len(fold - other) for fold, other in zip(*both, strict=True))
    assert moved <= 4, "one over each of the cuts of its class"


@pytest.mark.parametrize(
    ("limit", "left", "words"),
    [(0.1, [10, 1, 1], "10 %"), (30, [19, 10, 1], "30 images"), (1, [100, 50, 3], "100 %")],
)
def test_a_limit_leaves_a_share_of_each_class(limit: float, left: list[int], words: str, tmp_path: Path) -> None:
    sizes = {"a": 100, "b": 8 if limit == 0.1 else 50, "c": 3}
    path = folder_of(tmp_path, sizes)
    for name in sizes:
        shutil.copytree(tmp_path / "train" / name, tmp_path / "val" / name)
    source = Folder(path=path, limit=limit)
    for split in (source.train(), source.eval()):
        counts = split.labels.bincount(minlength=3).tolist()
        assert counts == left
    assert source.fingerprint() != Folder(path=path).fingerprint() or limit == 1
    assert source.notes()[0] == f"dataset.limit leaves {words} of each split: a first try"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"fold": 1}, "dataset.fold is 1, but dataset.folds is null; add dataset.folds=5"),
        ({"folds": 3}, r"dataset.fold is null, expected a fold from 0 to 2 .*: dataset.fold=0,1,2 -m"),
        ({"folds": 3, "fold": 3}, "dataset.fold is 3, expected a fold from 0 to 2"),
        ({"folds": 3, "fold": 0, "val_share": 0.1}, "both choose the evaluation split"),
        ({"folds": 5, "fold": 0}, "the class b has 4 images, and a fold would have none; use dataset.folds=4, or"),
    ],
)
def test_folds_that_cannot_be_cut_are_one_sentence(options: dict[str, Any], expected: str, tmp_path: Path) -> None:
    path = folder_of(tmp_path, {"a": 9, "b": 4})
    with pytest.raises(InputError, match=expected):
        Folder(path=path, **options).eval()


@pytest.mark.parametrize("options", [{"fold": 1}, {"folds": 3}, {"folds": 3, "fold": 0, "val_share": 0.1}])
def test_every_source_of_files_refuses_half_a_choice_of_folds(options: dict[str, Any]) -> None:
    sources = {name: cls for name, cls in classes_of("dataset").items() if issubclass(cls, FileSource)}
    for source in sources.values():
        with pytest.raises(InputError, match=r"dataset\.fold"):
            source(**options)
    assert sources.keys() == {*FILES, "torchvision"}


def test_folds_beside_an_evaluation_split_are_refused(tmp_path: Path) -> None:
    path = folder_of(tmp_path, {"a": 9, "b": 9})
    (tmp_path / "val" / "a").mkdir(parents=True)
    with pytest.raises(InputError, match=r"folds is 3, but dataset.val_folder names .*/val too; .*test_folder=val"):
        Folder(path=path, folds=3, fold=0).eval()


def test_the_folds_of_a_setting_are_samples_of_its_score(tmp_path: Path) -> None:
    jobs = []
    for number, (rate, fold, score) in enumerate([(1, 0, 90.0), (1, 1, 92.0), (2, 0, 80.0), (2, 1, 82.0)]):
        words, facts = (f"optimizer.lr={rate}", f"dataset.fold={fold}"), {"state": State.done, "objective": score}
        jobs.append(JobRun(Ledger(tmp_path), Record(number=number, overrides=words, folder="a", **facts), Monitor()))
    rows = groups(jobs)
    shown = [(row["optimizer.lr"], row["score"], row["jobs"]) for row in rows]
    assert shown == [("1", 91.0, [0, 1]), ("2", 81.0, [2, 3])]


@pytest.mark.parametrize("apart", [False, True])
def test_ranks_are_those_of_the_hashes_in_each_stratum(apart: bool) -> None:
    rng = np.random.default_rng(0)
    numbers = rng.integers(0, 40, 60)  # some are listed twice
    names, labels = [b"%d" % number for number in numbers], torch.from_numpy(numbers % 3)
    of, rank, total = Examples(names, labels, "abc", "classes", apart=apart).units("key")
    digests = [hashlib.blake2b(name, digest_size=16, key=b"lockstep key").digest() for name in names]
    hashes = [(digest, position * apart) for position, digest in enumerate(digests)]
    for example, (own_hash, label) in enumerate(zip(hashes, labels.tolist(), strict=True)):
        ordered = sorted({other for other, its in zip(hashes, labels.tolist(), strict=True) if its == label})
        assert (rank[of[example]], total[of[example]]) == (ordered.index(own_hash), len(ordered))


FILES = {
    **dict.fromkeys(("folder", "imagenet"), "test_folder"),
    **dict.fromkeys(("csv", "hf"), "test_split"),
    "webdataset": "test_shards",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each kind of data set, with 24 images to train on (two classes, six groups), 8 to evaluate and 6 to test."""
    datasets, root = pytest.importorskip("datasets"), tmp_path_factory.mktemp("splits")
    table, saved = ["path,label,split,group"], {}
    for split, size in {"train": 24, "val": 8, "test": 6}.items():
        images = []
        with tarfile.open(root / f"{split}.tar", "w") as tar:
            for number in range(size):
                group, label = f"{split}{number % 6}", "ab"[number // 3 % 2]
                file = root / split / label / f"{group}_{number}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (4, 4), (number, len(split), 0)).save(file)
                file.with_suffix(".cls").write_text(label)
                tar.add(file, file.name)
                tar.add(file.with_suffix(".cls"), f"{file.stem}.cls")
                table.append(f"{split}/{label}/{file.name},{label},{split},{group}")
                images.append({"image": str(file), "label": label, "group": group})
        texts = dict.fromkeys(("label", "group"), datasets.Value("string"))
        features = datasets.Features(image=datasets.Image(), **texts)
        saved[split] = datasets.Dataset.from_list(images, features=features)
    (root / "table.csv").write_text("\n".join(table))
    datasets.DatasetDict(saved).save_to_disk(root / "saved")
    return root


def source(name: str, root: Path, **options: Any) -> FileSource:
    path = root / {"csv": "table.csv", "hf": "saved"}.get(name, "")
    own: dict[str, Any] = {"hf": {"val_split": "val"}, "imagenet": {"crop_from": "square"}}.get(name, {})
    return classes_of("dataset")[name](path=str(path), decode_size=4, **{**own, **options})


def levels(source: FileSource) -> list[set[tuple[int, ...]]]:
    """The images of the three splits, by their pixels."""
    splits = [source.train(), source.eval(), source.test()]
    images = [torch.zeros(0, 3, 4, 4) if split is None else split.fetch([*range(len(split))]) for split in splits]
    return [set(map(tuple, pixels[:, :2, 0, 0].tolist())) for pixels in images]


@pytest.mark.parametrize("name", FILES)
def test_every_source_of_files_has_a_test_split(name: str, root: Path) -> None:
    shards = "{}.tar" if name == "webdataset" else "{}"
    train, val, test = levels(source(name, root, **{FILES[name]: shards.format("test")}))
    assert [*map(len, (train, val, test))] == [24, 8, 6]
    assert levels(source(name, root))[2] == set()
    cut = source(name, root, val_share=0.25, **{FILES[name]: shards.format("val")})
    parts = levels(cut)
    assert [*map(len, parts)] == [18, 6, 8]
    assert (parts[0] | parts[1], parts[2]) == (train, val), "what was for evaluation is for the test"
    assert cut.fingerprint().keys() == {"train", "val", "test"}
    assert [*map(len, levels(source(name, root, test_share=0.25, limit=0.5)))] == [10, 5, 4], "half of each class"
    none = {FILES[name].replace("test", "val"): "none"}
    tested = levels(source(name, root, test_share=0.25, folds=3, fold=1, **none))
    assert (len(tested[2]), set().union(*tested), sum(map(len, tested))) == (6, train, 24)
    for fold in range(3):
        assert levels(source(name, root, test_share=0.25, folds=3, fold=fold, **none))[2] == tested[2]


@pytest.mark.parametrize(
    ("name", "by"), [*((name, "group_pattern") for name in FILES), ("csv", "group_column"), ("hf", "group_column")]
)
def test_every_source_of_files_keeps_groups_whole(name: str, by: str, root: Path) -> None:
    none = {FILES[name].replace("test", "val"): "none"}
    how = {"group_pattern": r"(train\d)_", "group_column": "group"}[by]
    sizes = []
    for fold in range(2):
        parts = levels(source(name, root, test_share=0.3, folds=2, fold=fold, **{by: how}, **none))
        groups = [{number % 6 for number, _ in part} for part in parts]
        assert sum(map(len, groups)) == 6 == len(set().union(*groups))
        sizes.append([*map(len, parts)])
    assert sizes == [[8, 8, 8], [8, 8, 8]], "one group of each class"
    limited = levels(source(name, root, limit=9, **{by: how if by == "group_column" else r"(\w+\d)_"}))
    assert (len(limited[0]), len({number % 6 for number, _ in limited[0]})) == (8, 2), "two whole groups"


def test_a_share_has_the_images_of_each_class_with_the_smallest_hashes_for_its_own_key(tmp_path: Path) -> None:
    path = folder_of(tmp_path, {"a": 40, "b": 20})

    def smallest(key: bytes, names: set[bytes], share: float) -> set[bytes]:
        own = [sorted(name for name in names if name.startswith(label)) for label in (b"a", b"b")]
        ranked = [sorted(of, key=lambda name: hashlib.blake2b(name, digest_size=16, key=key).digest()) for of in own]
        return {name for of in ranked for name in of[: round(share * len(of))]}

    files = Folder(path=path, test_share=0.25, val_share=0.2).listings()
    parts = {name: set(of.names.tolist()) for name, of in files.items()}
    every = set().union(*parts.values())
    assert parts["test"] == smallest(b"lockstep test_share", every, 0.25)
    assert parts["val"] == smallest(b"lockstep val_share", every - parts["test"], 0.2)
    assert len(every) == sum(map(len, parts.values())) == 60


@pytest.mark.parametrize("name", FILES)
def test_images_are_cut_by_names_that_no_place_of_the_data_changes(name: str, root: Path) -> None:
    """A data set that moved, or a shard that was renamed, has the splits that it had."""
    files = [f"{'ab'[n // 3 % 2]}/train{n % 6}_{n}" for n in range(24)]
    by_class = sorted(files, key=lambda file: (file[0], f"{file}.png"))
    expected = {
        "csv": [f"train/{file}.png" for file in by_class],
        "hf": [str(n) for n in range(24)],
        "webdataset": [file[2:] for file in files],
    }.get(name, [f"{file}.png" for file in by_class])
    names = source(name, root).listings()["train"].names.tolist()
    assert [text.decode() for text in names] == expected


def digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


@pytest.mark.parametrize("name", FILES)
def test_the_fingerprint_of_data_is_that_of_earlier_versions(name: str, root: Path) -> None:
    """Runs that they began are resumed."""
    own = source(name, root)
    files = own.listings()["train"]
    labels = np.array([n // 3 % 2 for n in range(24)])
    members = digest(np.arange(24).tobytes(), labels.tobytes())
    photos = [root / "train" / "ab"[label] / f"train{n % 6}_{n}.png" for n, label in enumerate(labels)]
    sizes = [photo.stat().st_size for photo in photos]
    if name == "webdataset":
        keys = "\0".join(f"{photo.stem} {size}" for photo, size in zip(photos, sizes, strict=True))
        expected = {"examples": f"24 of {digest(keys.encode())} ({members})"}
    elif name == "hf":
        expected = {"examples": f"24 of train, 24 rows, {digest(np.array(sizes).tobytes())} ({members})"}
    else:
        by_class = files.keys.reshape(2, 12).tolist()
        hashes = [digest(*(name + b"\0" for name in names)) for names in by_class]
        expected = {label: f"12 files ({own_hash})" for label, own_hash in zip("ab", hashes, strict=True)}
    assert own.fingerprint()["train"] == expected


@pytest.mark.parametrize("two", [*itertools.combinations(SPLIT_NAMES, 2)], ids="-".join)
def test_a_group_in_any_two_of_the_splits_is_refused(two: tuple[str, str]) -> None:
    splits = {}
    for name in SPLIT_NAMES:
        groups = listing.as_names([f"own of {name}", "shared" if name in two else f"other of {name}"])
        splits[name] = listing.Files(Path, groups, torch.zeros(2), ("a",), groups=groups)
    names = " and in the ".join(SPLIT_NAMES[name] for name in two)
    with pytest.raises(InputError, match=f"the group 'shared' has images in the {names} split, as 1 groups have"):
        listing.check_groups(splits)


CUTS = [  # by version 1.0: four folds, a share to evaluate, one to test, a limit as a share and as a number
    "001001000000",
    "000110000110",
    "000000110000",
    "110000001001",
    "000001100110",
    "000010001101",
    "001100011011",
    "001000011011",
]


def test_cuts_are_those_of_earlier_versions() -> None:
    """A run that resumes, and the folds of a cross-validation that was half done, cut as before."""
    examples = examples_of([(number, number % 2) for number in range(12)])
    cuts = [examples.fold(4, fold) for fold in range(4)]
    cuts += [examples.share("val_share", 0.3), examples.share("test_share", 0.3), examples.within(0.5)]
    cuts += [examples.within(5)]
    assert ["".join(map(str, cut.astype(int))) for cut in cuts] == CUTS


@pytest.mark.parametrize("name", FILES)
def test_a_choice_of_splits_that_contradicts_itself_is_one_sentence(name: str, root: Path) -> None:
    key = FILES[name]
    val, shards = key.replace("test", "val"), ".tar" if name == "webdataset" else ""
    for options, sentence in (
        ({key: "x", "test_share": 0.1}, f"dataset.test_share and dataset.{key} both choose the test split"),
        ({key: f"val{shards}", val: f"val{shards}"}, f"dataset.{key} and dataset.{val} both name .*val.*val_share=0"),
        ({key: f"train{shards}"}, f"dataset.{key} and dataset.train_.* both name .*train"),
        ({key: "nowhere"}, f"dataset.{key}.*nowhere.*dataset.test_share=0.1"),
        ({"val_share": 0.1, val: f"val{shards}"}, f"dataset.val_share is 0.1, but dataset.{val} names .*{key}=val"),
        ({"group_pattern": "(nobody)"}, r"dataset.group_pattern is '\(nobody\)', which names no group in '.*train"),
        ({"group_pattern": r"\d_"}, "the group '0_' has images in the training and in the evaluation split"),
        ({"group_pattern": "train", "val_share": 0.1, val: "none"}, "there is one group, expected two or more"),
    ):
        with pytest.raises(InputError, match=sentence) as refused:
            source(name, root, **options).prepare()
        assert "\n" not in str(refused.value)


def test_the_published_evaluation_images_are_the_test_split_of_a_cut_array() -> None:
    whole = Digits()
    assert whole.test() is None
    assert whole.fingerprint().keys() == {"train", "val"}
    for options in ({"val_share": 0.2}, *({"folds": 3, "fold": fold} for fold in range(3))):
        digits = Digits(**options)  # type: ignore[arg-type]
        test = digits.test()
        assert test is not None
        assert torch.equal(test.images, whole.eval().images)
        both = torch.cat([digits.train().images, digits.eval().images]).flatten(1)
        assert sorted(both.tolist()) == sorted(whole.train().images.flatten(1).tolist())
        assert digits.fingerprint()["test"] == whole.fingerprint()["val"]
        few = Digits(limit=10, **options)  # type: ignore[arg-type]
        assert [len(few.train()), len(few.eval()), len(few.test() or ())] == [10, 10, 10], "as of files"
    assert all({"val_share", "folds"} <= vars(cls)["__dataclass_fields__"].keys() for cls in (Digits, ArraySource))


UNITS = st.lists(st.tuples(st.integers(0, 25), st.integers(0, 2)), min_size=1, max_size=80)


def examples_of(units: list[tuple[int, int]]) -> Examples:
    """Examples with a group and a class each."""
    names, groups = [b"%d" % n for n in range(len(units))], [b"g%d" % group for group, _ in units]
    return Examples(names, torch.tensor([label for _, label in units]), "abc", "classes", groups)


@given(UNITS, st.sampled_from([0.1, 0.3, 0.5, 0.9]), st.integers(2, 4))
def test_cuts_are_disjoint_and_complete_and_leave_groups_whole(
    units: list[tuple[int, int]], share: float, folds: int
) -> None:
    examples, groups = examples_of(units), np.array([group for group, _ in units])
    masks = []
    with contextlib.suppress(InputError):
        masks += [chosen := examples.share("val_share", share)]
        for label, number in Counter(label for _, label in {*units}).items():
            assert label in examples.labels[~chosen]
            assert number == 1 or label in examples.labels[chosen]
    masks += [examples.within(share), examples.within(2.0 + 10 * share)]
    with contextlib.suppress(InputError):
        parts = [examples.fold(folds, fold) for fold in range(folds)]
        assert (np.sum(parts, axis=0) == 1).all()
        assert len({label for _, label in units}) == min(len({*examples.labels[part].tolist()}) for part in parts)
        masks += parts
    for chosen in masks:
        assert not {*groups[chosen].tolist()} & {*groups[~chosen].tolist()}


@pytest.mark.parametrize("key", ["val_share", "test_share"])
def test_the_only_group_with_a_class_is_trained_or_refused(key: str) -> None:
    outcomes = set[str]()
    for group in range(10):
        units = [(group, 0), (group, 0), (group, 1), (100, 0)]
        cut = examples_of([(own, 0) for own, _ in units]).share(key, 0.5).tolist()
        if cut[0]:
            says = "the class b has 1 group, and the training split would have none; remove the class"
            with pytest.raises(InputError, match=f"^dataset.{key} is 0.5, but {says}$"):
                examples_of(units).share(key, 0.5)
        else:
            assert examples_of(units).share(key, 0.5).tolist() == cut == [False] * 3 + [True]
        outcomes.add("refused" if cut[0] else "trained")
    assert outcomes == {"refused", "trained"}


@given(UNITS)
def test_a_group_is_ranked_among_the_groups_of_its_commonest_class(units: list[tuple[int, int]]) -> None:
    of, place, total = examples_of(units).units("key")
    labels: dict[int, list[int]] = {}
    for unit, (_, label) in zip(of.tolist(), units, strict=True):
        labels.setdefault(unit, []).append(label)
    classes = {unit: min(own, key=lambda label: (-own.count(label), label)) for unit, own in labels.items()}
    for label in {*classes.values()}:
        own_units = sorted(unit for unit, its in classes.items() if its == label)
        assert place[own_units].tolist() == [*range(len(own_units))], "numbered in the order of their hashes"
        assert {*total[own_units].tolist()} == {len(own_units)}


@given(st.lists(st.integers(0, 3), min_size=8, max_size=80), st.integers(2, 70))
def test_a_limit_is_a_number_of_examples_and_leaves_one_of_each_class(labels: list[int], limit: int) -> None:
    examples = Examples([b"%d" % n for n in range(len(labels))], torch.tensor(labels), "abcd", "classes")
    chosen = examples.within(limit)
    counts, left = np.bincount(labels), np.bincount(np.array(labels)[chosen], minlength=max(labels) + 1)
    assert chosen.sum() == min(len(labels), max(limit, (counts > 0).sum()))
    assert (left[counts > 0] >= 1).all()
    quotas = counts * limit / len(labels)
    if (quotas[counts > 0] >= 1).all() and limit < len(labels):
        assert (np.abs(left - quotas) < 1).all(), "Hamilton's method"


@pytest.mark.parametrize(("limit", "left"), [(16, [12, 4]), (32, [24, 8]), (35, [24, 8]), (47, [32, 12])])
def test_a_limit_on_images_in_groups_leaves_as_many_groups_of_each_class_as_is_its_share(
    limit: int, left: list[int]
) -> None:
    examples = examples_of([(group, int(group >= 9)) for group in range(12) for _ in range(4)])
    assert examples.labels[examples.within(limit)].bincount().tolist() == left


@given(st.integers(10, 60), st.integers(0, 59))
def test_a_group_that_is_added_moves_at_most_one_other_of_its_class(number: int, new: int) -> None:
    units = [(group, group % 2) for group in range(number) for _ in range(2)]
    before, after = examples_of(units), examples_of([*units, (1000 + new, 0), (1000 + new, 0)])
    for share in (0.1, 0.4):
        one, other = before.share("val_share", share), after.share("val_share", share)[: len(units)]
        assert (one != other).sum() <= 2, "the two images of one group"


def test_the_stratum_of_several_labels_is_the_rarest() -> None:
    rng = np.random.default_rng(0)
    labels = torch.from_numpy(rng.random((400, 5)) < [0.5, 0.3, 0.1, 0.05, 0.03]).float()
    examples = Examples([b"%d" % n for n in range(400)], labels, "abcde", "labels")
    counts = labels.sum(0)
    for row, stratum in zip(labels, examples.strata().tolist(), strict=True):
        own = row.nonzero()[:, 0].tolist()
        assert stratum == (min(own, key=lambda label: counts[label]) if own else 5)
    folds = torch.stack([labels[examples.fold(5, fold)].sum(0) for fold in range(5)])
    rarest = int(counts.argmin())
    assert folds[:, rarest].max() - folds[:, rarest].min() <= 1, "those with the rarest label are a stratum"
    assert Examples(examples.names, labels, "abcde", "values").strata().tolist() == [0] * 400
    halves = Examples(examples.names, labels / 2, "abcde", "labels")
    assert halves.strata().tolist() == examples.strata().tolist(), "a share of a label is a label"


def test_a_cut_that_leaves_a_side_without_a_label_is_refused() -> None:
    names, groups = [b"%d" % n for n in range(12)], [b"%d" % (n % 3) for n in range(9)] + [b"x"] * 3
    labels = torch.tensor([[1.0, 0.0]] * 9 + [[1.0, 1.0]] * 3)
    single, grouped = Examples(names, labels, "ab", "labels"), Examples(names, labels, "ab", "labels", groups)
    with pytest.raises(InputError, match=r"the label b has 3 images, and a fold would have none; use .*folds=3,"):
        single.fold(4, 0)
    with pytest.raises(InputError, match="the label b has 1 group, and a fold would have none; remove the label"):
        grouped.fold(2, 0)
    with pytest.raises(InputError, match=r"the class 1 has 3 images, and a fold would have none; .*the class$"):
        Examples(names, labels[:, 1].long(), (), "classes").fold(4, 0)
    values = Examples(names, labels, (), "values", [b"x"] * 12)
    with pytest.raises(InputError, match=r"the data set has 1 group, and a fold would have none; remove dataset\.f"):
        values.fold(2, 0)
    assert not grouped.share("val_share", 0.3)[-1], "the only group with a label is trained"


def test_images_that_are_trained_on_and_in_the_test_split_are_named(tmp_path: Path) -> None:
    path = folder_of(tmp_path, {"a": 6, "b": 6})
    shutil.copytree(tmp_path / "train", tmp_path / "test")
    texts = [finding.text for finding in inspect(Folder(path=path, test_folder="test", val_share=0.2), 10)]
    assert "all 2 have images in every split: 10 to train on, 2 to evaluate, 12 to test" in texts
    assert any(re.match(r"\d+ twice in two splits, such as .*: the score is too good", text) for text in texts)


def test_images_that_cannot_be_read_are_no_image_that_is_there_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(self: FileSplit, index: int) -> bytes:
        raise OSError

    source = Folder(path=folder_of(tmp_path, {"a": 6, "b": 6}), val_share=0.2)
    monkeypatch.setattr(FileSplit, "content", unreadable)
    assert not [finding.text for finding in inspect(source, 10) if "twice" in finding.text]


@pytest.mark.parametrize("options", [{"group_column": "patient"}, {"group_column": "group", "group_pattern": "x"}])
def test_a_group_column_that_names_no_groups_is_one_sentence(options: dict[str, str], root: Path) -> None:
    for name in ("csv", "hf"):
        with pytest.raises(InputError, match=r"group_column is 'patient', but the table|names no group in 'train0'"):
            source(name, root, **options).prepare()
    (root / "bare.csv").write_text("path,label,group\ntrain/a/train0_0.png,a,\n")
    with pytest.raises(InputError, match=r"line 2 of .* has nothing in the column 'group'"):
        CSV(path=str(root / "bare.csv"), group_column="group", val_share=0.5).prepare()
    (root / "bare.csv").write_text("path,label,group\n" + "".join(f"train/a/train0_0.png,a,{n}\n" for n in "xy"))
    with pytest.raises(InputError, match=r"line 3 of .* with another group than line 2"):
        CSV(path=str(root / "bare.csv"), group_column="group", folds=2, fold=0).prepare()


@pytest.mark.parametrize(
    ("how", "missing"),
    [({"group_column": "group"}, "no group"), ({"group_pattern": "(x)"}, "an image without the name of a file")],
)
def test_a_row_of_no_group_is_one_sentence(how: dict[str, str], missing: str, root: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [
        {"image": {"bytes": file.read_bytes(), "path": None if n == 2 else "x.png"}, "label": "a", "group": None}
        for n, file in enumerate(sorted((root / "val").rglob("*.png")))
    ]
    for row in rows[:2]:
        row["group"] = "x"
    texts = dict.fromkeys(("label", "group"), datasets.Value("string"))
    table = datasets.Dataset.from_list(rows, features=datasets.Features(image=datasets.Image(), **texts))
    datasets.DatasetDict(train=table).save_to_disk(tmp_path / "saved")
    with pytest.raises(InputError, match=f"row 2 of train in .* has {missing}; use dataset.group_column=NAME"):
        source("hf", tmp_path, val_split="auto", folds=2, fold=0, **how).prepare()


def test_an_image_in_memory_has_its_number_in_the_whole_split_in_every_fold() -> None:
    whole = Digits().train()
    numbers = []
    for fold in range(3):
        split = Digits(folds=3, fold=fold).eval()
        own = [int(split.name(index)) for index in range(len(split))]
        assert torch.equal(split.images, whole.images[own])
        numbers += own
    assert sorted(numbers) == list(range(len(whole)))
    limited = Digits(folds=3, fold=0, limit=0.1).eval()
    assert torch.equal(limited.images, whole.images[[int(limited.name(index)) for index in range(len(limited))]])


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)*$", "(a*)*b", "(.*a){12}$"])
def test_a_pattern_that_does_not_end_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    monkeypatch.setattr(listing, "MATCHING_S", 3.0)
    for number in range(2):
        (folder := tmp_path / "photos" / f"class{number}").mkdir(parents=True)
        (folder / f"{'a' * 60}!.png").write_bytes(b"")
    split = Folder(path=str(tmp_path / "photos"), val_share=0.5, group_pattern=pattern)
    with pytest.raises(InputError, match=r"dataset.group_pattern is .* takes more than 3 s for 2 names"):
        split.prepare()


def test_a_pattern_that_takes_too_long_is_told_by_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    timeouts = list[float]()

    def run(words: list[str], *, timeout: float, **options: Any) -> None:
        timeouts.append(timeout)
        raise listing.subprocess.TimeoutExpired(words, timeout)

    monkeypatch.setattr(listing.subprocess, "run", run)
    with pytest.raises(InputError) as caught:
        files_of(*map(str, range(1234))).grouped("(a+)+")
    assert str(caught.value) == (
        "dataset.group_pattern is '(a+)+', which takes more than 30 s for 1,234 names; write it without repetitions "
        "inside of repetitions, such as (a+)+"
    )
    assert timeouts == [30]


def files_of(*names: str, **facts: Any) -> listing.Files:
    return listing.Files(
        Path, listing.as_names(names), torch.zeros(len(names), dtype=torch.int64), ("a", "b"), **facts
    )


@pytest.mark.parametrize(
    ("pattern", "groups"),
    [
        (r"p\d", ["p1", "p2", "p1"]),
        (r"(p\d)_(\d)", ["p1", "p2", "p1"]),
        (r"_(\d)(\d)?", ["1", "1", "2"]),
        (r"(?:p)(\d)", ["1", "2", "1"]),
        (r"(z*)", ["", "", ""]),
        (r"^x/(p1)?", None),
        (r"y", None),
    ],
)
def test_the_first_group_of_a_pattern_or_all_of_it_names_a_group_anywhere_in_a_name(
    pattern: str, groups: list[str] | None
) -> None:
    files = files_of("x/p1_1", "x/p2_1", "x/p1_2")
    if groups is None:
        with pytest.raises(InputError, match=r"which names no group in 'x/p[12]_1'; correct it, so that it matches"):
            files.grouped(pattern)
        return
    assert files.grouped(pattern).groups.tolist() == [group.encode() for group in groups]  # type: ignore[union-attr]
    of_bytes = files_of(*(os.fsdecode(b"x/\xff" + name[2:]) for name in files.keys.tolist())).grouped(pattern)
    assert of_bytes.groups.tolist() == [group.encode() for group in groups], "of names that are no text"  # type: ignore[union-attr]
    of_column = files_of("a", "b", "c", groups=files.keys).grouped(pattern)
    assert of_column.groups.tolist() == [group.encode() for group in groups], "of the groups of a column"  # type: ignore[union-attr]


def test_a_part_of_the_files_keeps_what_each_is() -> None:
    files = files_of("x", "y", "z", groups=listing.as_names("uvw"), notes=("one",))
    parts = files.without("val", np.array([True, False, True]))
    assert [(name, of.keys.tolist(), of.groups.tolist()) for name, of in parts.items()] == [  # type: ignore[union-attr]
        ("train", [b"y"], [b"v"]),
        ("val", [b"x", b"z"], [b"u", b"w"]),
    ]
    assert [(len(of), of.labels.tolist(), of.notes) for of in parts.values()] == [
        (1, [0], ("one",)),
        (2, [0, 0], ("one",)),
    ]
    assert [*files_of("x").fingerprint()] == ["a"], "a class without files is not named"
    members = listing.Files(str, np.array([2, 0]), torch.zeros(2), ("a",), "shards", member_names=files.keys)
    assert members.names.tolist() == [b"z", b"x"]
    one, another = (listing.Files(Path, files.keys, torch.zeros(3, 1), (name,)).fingerprint() for name in "xy")
    assert one["examples"] == another["examples"]
    assert one["labels"] != another["labels"]
    more = "hgfedba"
    both = [files_of(*more, groups=listing.as_names(more)), files_of(*more, groups=listing.as_names(more))]
    splits = dict(zip(("train", "val"), both, strict=True))
    with pytest.raises(InputError, match=r"the group 'a' has images .* as 7 groups have"):
        listing.check_groups(splits)


def test_a_pattern_is_matched_without_the_modules_of_the_folder_where_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("json", "re"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('of the user')\n")
    monkeypatch.chdir(tmp_path)
    assert files_of("p1_a", "p2_b").grouped(r"p\d").groups.tolist() == [b"p1", b"p2"]  # type: ignore[union-attr]


def test_other_members_and_other_names_are_other_data() -> None:
    labels, names = torch.zeros(2, dtype=torch.int64), listing.as_names("abcd")
    parts = [
        listing.Files(str, np.array(keys), labels, ("x",), "shards", member_names=names).fingerprint()
        for keys in ([0, 1], [0, 2], [1, 0])
    ]
    assert len({*map(str, parts)}) == 3
    assert {part["examples"].partition(" (")[0] for part in parts} == {"2 of shards"}
    many = [
        listing.Files(Path, listing.as_names(own), labels[:, None] * 1.0, ("x",))
        for own in (["ab", "c"], ["a", "bc"])
    ]
    assert many[0].fingerprint() != many[1].fingerprint()
    assert files_of("ab", "c").fingerprint() == {"a": f"2 files ({digest(b'ab', bytes(1), b'c', bytes(1))})"}
    assert files_of("x").fingerprint() == {"a": f"1 file ({digest(b'x', bytes(1))})"}
    assert many[0].fingerprint() == {
        "examples": f"2 files ({digest(b'ab', bytes(1), b'c', bytes(1))})",
        "labels": f"of x ({digest(bytes(2 * 4))})",
    }


@pytest.mark.parametrize(("folds", "every"), [(2, "0,1"), (5, "0,1,2,3,4"), (6, "0,1,...,5"), (1000, "0,1,...,999")])
def test_a_few_folds_are_listed_and_many_by_the_last_one(folds: int, every: str) -> None:
    for fold in (None, folds):
        number = "null" if fold is None else fold
        with pytest.raises(InputError) as caught:
            Folder(path="nowhere", folds=folds, fold=fold)
        assert str(caught.value) == (
            f"dataset.fold is {number}, expected a fold from 0 to {folds - 1} to evaluate; all of them: "
            f"dataset.fold={every} -m"
        )
    assert Folder(path="nowhere", folds=folds, fold=folds - 1).is_cut
    with pytest.raises(InputError, match=r"^dataset\.fold is 0, but dataset\.folds is null; add dataset\.folds=5$"):
        Folder(path="nowhere", fold=0)


def test_a_share_that_leaves_a_split_without_a_label_is_refused_with_another_share() -> None:
    labels = torch.tensor([[1.0, 0, 0, 0]] * 8 + [[0, 1.0, 0, 1.0], [0, 0, 1.0, 1.0]])
    examples = Examples([b"%d" % n for n in range(10)], labels, "abcd", "labels")
    sentence = "the label d has 2 images, and the {} split would have none; use another share, or remove the label"
    for key, name in (("val_share", "evaluation"), ("test_share", "test")):
        with pytest.raises(InputError) as caught:
            examples.share(key, 0.3)
        assert str(caught.value) == f"dataset.{key} is 0.3, but {sentence.format(name)}"


@pytest.mark.parametrize(("key", "first"), [("val_share", 11), ("test_share", 8)])
def test_a_share_that_takes_all_images_of_a_label_is_refused_with_another_share(key: str, first: int) -> None:
    """The label d is on two of the three images of b, and of c, and their hashes are the smallest ones."""
    labels = torch.zeros(12, 4)
    labels[:, 0] = labels[0:3, 1] = labels[3:6, 2] = labels[[0, 1, 3, 4], 3] = 1
    examples = Examples([b"%d" % n for n in range(first, first + 12)], labels, "abcd", "labels")
    with pytest.raises(InputError) as caught:
        examples.share(key, 0.67)
    assert str(caught.value) == (
        f"dataset.{key} is 0.67, but the label d has 4 images, and the training split would have none; use another "
        "share, or remove the label"
    )


def test_images_in_memory_are_cut_by_their_numbers() -> None:
    labels = Digits().train().labels
    examples = Examples([b"%d" % number for number in range(len(labels))], labels, (), "classes")
    cuts: dict[str, tuple[Any, Any]] = {
        "folds": (Digits(folds=5, fold=2).eval(), examples.fold(5, 2)),
        "a share": (Digits(val_share=0.3).eval(), examples.share("val_share", 0.3)),
        "a limit": (Digits(limit=50).train(), examples.within(50)),
    }
    for name, (split, chosen) in cuts.items():
        assert split.numbers.tolist() == np.flatnonzero(chosen).tolist(), name


def test_data_sets_of_the_same_files_are_listed_once_however_they_are_read(tmp_path: Path) -> None:
    usual = Folder(path=str(tmp_path))
    for options in ({"decode_size": 9}, {"skip": 3}, {"input_size": 8, "crop": 0.5}, {"fit": "pad"}):
        assert Folder(path=str(tmp_path), **options).place == usual.place  # type: ignore[arg-type]
    different = [
        ImageNet(path=str(tmp_path), train_folder="auto", val_folder="auto", crop_from="square"),
        *(
            Folder(path=str(tmp_path), **options)  # type: ignore[arg-type]
            for options in (
                *({"val_share": 0.5}, {"limit": 5}, {"test_folder": "x"}, {"group_pattern": "y"}),
                {"test_folder": "None"},
            )
        ),
    ]
    assert len({source.place for source in (usual, *different)}) == 1 + len(different)


SAID = {
    "a split beside a share": (
        {"val_share": 0.25},
        "dataset.val_share is 0.25, but dataset.val_folder names {}/val too; remove dataset.val_share, test on it "
        "with dataset.test_folder=val, or name none with dataset.val_folder=none",
    ),
    "a split beside folds": (
        {"folds": 3, "fold": 0},
        "dataset.folds is 3, but dataset.val_folder names {}/val too; remove dataset.folds, test on it with "
        "dataset.test_folder=val, or name none with dataset.val_folder=none",
    ),
    "two of one name": (
        {"test_folder": "val"},
        "dataset.test_folder and dataset.val_folder both name {}/val; name another, or remove dataset.test_folder, "
        "or evaluate a share of the training split with dataset.val_share=0.1",
    ),
    "the one to train on": (
        {"test_folder": "train"},
        "dataset.test_folder and dataset.train_folder both name {}/train; name another, or remove "
        "dataset.test_folder",
    ),
    "the same split": ({"val_share": 0.25, "val_folder": "train"}, ""),
    "the test split": ({"val_share": 0.25, "test_folder": "val"}, ""),
}


@pytest.mark.parametrize("case", SAID)
def test_splits_that_exclude_each_other_are_named_with_what_to_do(case: str, tmp_path: Path) -> None:
    options, sentence = SAID[case]
    for split in ("train", "val"):
        for number in range(8):
            (file := tmp_path / split / "ab"[number % 2] / f"{number}.png").parent.mkdir(parents=True, exist_ok=True)
            file.touch()
    source = Folder(path=str(tmp_path), **{"train_folder": "train", "val_folder": "val", **options})  # type: ignore[arg-type]
    if not sentence:
        assert (len(source.train()), len(source.eval())) == (6, 2)
        return
    with pytest.raises(InputError) as caught:
        source.prepare()
    assert str(caught.value) == sentence.format(tmp_path)


@pytest.mark.parametrize(
    ("number", "shared", "limited"), [(2, 1, 1), (3, 2, 2), (4, 2, 2), (5, 2, 3), (7, 4, 4), (9, 4, 5)]
)
def test_half_of_an_odd_number_is_rounded_as_in_earlier_versions(number: int, shared: int, limited: int) -> None:
    """The next even number in a share, and the next larger one within a limit."""
    examples = Examples([b"%d" % n for n in range(number)], torch.zeros(number, dtype=torch.int64), "a", "classes")
    assert [examples.share(key, 0.5).sum() for key in ("val_share", "test_share")] == [shared] * 2
    assert [examples.within(limit).sum() for limit in (0.5, 1e-6, 1.0)] == [limited, 1, number]
