"""The names and the order of classes: the same from every kind of data set, and by name between data and models."""

import io
import json
import os
import tarfile
import unicodedata
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import ImageFolder

import lockstep
from helpers import built, refusal, train_here
from lockstep.checkpoint.reading import describe_differences
from lockstep.data.datasets import CSV, HF, WebDataset, packed
from lockstep.data.datasets.files import FileSource
from lockstep.data.datasets.folder import SYSTEM_FOLDERS, Folder
from lockstep.data.datasets.packed import Packed
from lockstep.inference.evaluate import evaluate
from lockstep.inference.images import files_in
from lockstep.job import validate_with_data
from lockstep.training import banner

NFC, NFD = "caf\u00e9", "cafe\u0301"


def png(level: int = 0) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.full((8, 8, 3), level, dtype=np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def write(root: Path, *names: str) -> None:
    """Write an image to each of these files below `root`, each with another grey level."""
    for level, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(png(level))


def write_tar(path: Path, *members: tuple[str, bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))


def samples_of(shard: Path) -> list[dict[str, Any]]:
    """The samples of a shard as the package webdataset groups them."""
    tariterators = pytest.importorskip("webdataset.tariterators")
    with shard.open("rb") as stream:
        files = tariterators.tar_file_expander([{"stream": stream, "url": str(shard)}])
        return list(tariterators.group_by_keys(files))


def as_folder(root: Path, names: list[str]) -> Folder:
    write(root, *(f"{split}/{name}/0.png" for split in ("train", "val") for name in names))
    return Folder(path=str(root), decode_size=8)


def as_packed(root: Path, names: list[str]) -> Packed:
    packed.pack_source(as_folder(root / "source", names), root / "packed", threads=1, advanced=lambda images: None)
    return Packed(path=str(root / "packed"))


def as_table(root: Path, names: list[str]) -> CSV:
    write(root, *(f"{split}/{number}.png" for split in ("train", "val") for number in range(len(names))))
    rows = [f"{split}/{number}.png;{name};{split}" for split in ("train", "val") for number, name in enumerate(names)]
    (root / "list.csv").write_text("\n".join(["path;label;split", *rows]))
    return CSV(path=str(root / "list.csv"), decode_size=8)


def as_shards(root: Path, names: list[str]) -> WebDataset:
    root.mkdir()
    for split in ("train", "val"):
        pairs = [((f"{n}.png", png(n)), (f"{n}.cls", name.encode())) for n, name in enumerate(names)]
        write_tar(root / f"{split}.tar", *(member for pair in pairs for member in pair))
    return WebDataset(path=str(root), decode_size=8)


def as_saved(root: Path, names: list[str], *, declared: bool = False) -> HF:
    datasets = pytest.importorskip("datasets")
    label = datasets.ClassLabel(names=sorted(set(names))) if declared else datasets.Value("string")
    features = datasets.Features({"image": datasets.Image(), "label": label})
    rows = {"image": [{"bytes": png(number), "path": None} for number in range(len(names))], "label": names}
    table = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict({"train": table, "validation": table}).save_to_disk(root)
    return HF(path=str(root), decode_size=8)


def as_declared(root: Path, names: list[str]) -> HF:
    """As `datasets.load_dataset("imagefolder")` has it: the names are declared in lexical order."""
    return as_saved(root, names, declared=True)


@pytest.mark.parametrize("kind", [as_folder, as_packed, as_table, as_shards, as_saved, as_declared])
@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([str(number) for number in range(11, -1, -1)], [str(number) for number in range(12)]),
        ([f"{number:02}" for number in range(11, -1, -1)], [f"{number:02}" for number in range(12)]),
        (["zebra", "Zoo", "ant 2", "ant 10", "ant"], sorted(["zebra", "Zoo", "ant 2", "ant 10", "ant"])),
        (["10", "9", "b"], ["10", "9", "b"]),
        (["z", NFD, "a"], ["a", NFC, "z"]),
        (["z", NFC, "a", NFD], ["a", NFC, "z"]),
        (["\u00e9t\u00e9", "zoo"], ["zoo", "\u00e9t\u00e9"]),
    ],
    ids=["numbers", "padded", "names", "mixed", "decomposed", "both", "beyond ASCII"],
)
def test_every_kind_of_data_set_has_the_same_classes_in_the_same_order(
    tmp_path: Path, kind: Callable[[Path, list[str]], FileSource], names: list[str], expected: list[str]
) -> None:
    source = kind(tmp_path / "data", names)
    assert list(source.class_names) == expected
    for split in (source.train(), source.eval()):
        levels = split.fetch([*range(len(names))])[:, 0, 0, 0].tolist()
        shown = [expected[label] for _, label in sorted(zip(levels, split.labels.tolist(), strict=True))]
        assert shown == [unicodedata.normalize("NFC", name) for name in names]


@pytest.mark.parametrize("train", [NFC, NFD])
@pytest.mark.parametrize("val", [NFC, NFD])
def test_a_class_may_be_spelled_in_two_ways(tmp_path: Path, train: str, val: str) -> None:
    write(tmp_path, f"train/{train}/0.png", "train/b/0.png", f"val/{val}/0.png")
    folder = Folder(path=str(tmp_path), decode_size=8)
    assert folder.class_names == ("b", NFC)
    assert (folder.train().labels.tolist(), folder.eval().labels.tolist()) == ([0, 1], [1])
    assert folder.train().fetch([0, 1])[:, 0, 0, 0].tolist() == [1, 0]


def test_images_of_a_class_with_two_folders_are_in_the_order_of_the_names_of_these(tmp_path: Path) -> None:
    write(tmp_path, f"train/{NFC}/0.png", f"train/{NFD}/2.png", "train/b/1.png", f"train/{NFD}/1.png", "val/b/0.png")
    levels = Folder(path=str(tmp_path), decode_size=8).train().fetch([*range(4)])[:, 0, 0, 0].tolist()
    assert levels == [2, 3, 1, 0], "an e with an accent behind it comes before an e with one"


def test_the_images_of_a_class_are_in_the_order_of_its_spellings(tmp_path: Path) -> None:
    e = {"d": "e\u0301", "c": "\u00e9"}  # decomposed, which comes first, and composed
    spellings = [f"{e[one]}t{e[two]}{e[three]}" for one in "dc" for two in "dc" for three in "dc"]
    write(tmp_path, *(f"{split}/{name}/0.png" for split in ("train", "val") for name in spellings))
    folder = Folder(path=str(tmp_path), decode_size=8)
    assert folder.class_names == (spellings[-1],)
    assert folder.train().fetch([*range(8)])[:, 0, 0, 0].tolist() == [*range(8)]


def test_a_resume_compares_the_order_of_the_classes() -> None:
    numbers = [str(number) for number in range(12)]
    lexical = {"class_names": sorted(numbers)}
    assert describe_differences({"class_names": numbers}, lexical).startswith("class_names[2]: here 2, there 10")


SIDECARS = [
    *(f"{folder}/0.png" for folder in sorted(SYSTEM_FOLDERS)),
    *(f"{folder}/0.png" for folder in (".ipynb_checkpoints", ".thumbnails", ".Trash-1000")),
    *("@eaDir/1.png/SYNOPHOTO_THUMB_M.jpg", "__MACOSX/a/._0.png", "._0.png", ".DS_Store", ".0.png.swp"),
    *("Thumbs.db", "desktop.ini", "0.txt", "README"),
]


@pytest.mark.parametrize("place", ["", "a/", "a/2024/"])
def test_files_that_systems_leave_behind_are_no_photos(tmp_path: Path, place: str) -> None:
    files = ["a/0.png", "a/2024/1.png", "b/2.png"]
    write(tmp_path, *(f"{split}/{file}" for split in ("train", "val") for file in files))
    right = ImageFolder(str(tmp_path / "train"))
    write(tmp_path, *(f"train/{place}{sidecar}" for sidecar in SIDECARS))
    folder = Folder(path=str(tmp_path), decode_size=8)
    split = folder.train()
    assert list(folder.class_names) == right.classes
    assert sorted(zip(map(str, split.paths), split.labels.tolist(), strict=True)) == sorted(right.imgs)
    assert files_in(tmp_path / "train") == sorted(Path(file) for file, _ in right.imgs)
    number = len({sidecar.partition("/")[0] for sidecar in SIDECARS})
    assert folder.notes()[0].startswith(f"{tmp_path}/train: skipped {number} other files (")


def test_members_that_systems_leave_behind_are_no_examples(tmp_path: Path) -> None:
    clean = [("./x/0.png", png(1)), ("./x/0.cls", b"cat"), ("x.y/1.png", png(2)), ("x.y/1.cls", b"dog")]
    before = [(sidecar, b"\x00\x05\x16\x07\xff") for sidecar in SIDECARS]
    for name in ("train", "val"):
        write_tar(tmp_path / f"{name}.tar", *before, *clean, *((f"x/{sidecar}", b"\xff") for sidecar in SIDECARS))
    write_tar(tmp_path / "clean.tar", *clean)
    samples = samples_of(tmp_path / "clean.tar")
    right = [(sample["__key__"], sample["png"], sample["cls"].decode()) for sample in samples]
    (tmp_path / "._train.tar").write_bytes(b"\x00\x05\x16\x07")
    source = WebDataset(path=str(tmp_path), train_shards="*train*.tar", decode_size=8)
    split = source.train()
    names = [source.class_names[label] for label in split.labels.tolist()]
    assert [(path.key, path.contents(), name) for path, name in zip(split.paths, names, strict=True)] == right


CHOICES = {
    "jpg png": "jpg",
    "png jpg": "jpg",
    "mask.png png": "png",
    "seg.jpg webp": "webp",
    "input.png": "input.png",
}
CHOICES |= {"JPG depth.PNG": "jpg", "jpeg png webp": "jpeg"}


@pytest.mark.parametrize("words", CHOICES)
def test_one_image_of_a_sample_is_taken_and_the_others_are_counted(tmp_path: Path, words: str) -> None:
    suffixes, choice = words.split(), CHOICES[words]
    members = [(f"{key}.{suffix}", png(10 * key + n)) for key in range(3) for n, suffix in enumerate(suffixes)]
    members = [*members, *((f"{key}.Label", b"cat") for key in range(3))]
    for name in ("train", "val"):
        write_tar(tmp_path / f"{name}.tar", *sorted(members, key=lambda member: member[0][0]))
    right = [sample[choice] for sample in samples_of(tmp_path / "train.tar")]
    for label in ("Label", "label", ".LABEL"):
        source = WebDataset(path=str(tmp_path), label=label, decode_size=8)
        assert [path.contents() for path in source.train().paths] == right
    skipped = [note for note in source.notes() if "skipped" in note]
    assert len(skipped) == (len(suffixes) > 1)
    assert all(f"skipped {6 * (len(suffixes) - 1)} other files" in note for note in skipped)


LAYOUTS = [
    (["seg_train/seg_train", "seg_test/seg_test", "seg_pred"], "seg_train/seg_train"),
    (["train/train", "val/val"], "train/train"),
    (["train", "val/val"], "train"),
    (["archive/train", "archive/val", "archive/test"], "archive/train"),
    (["My Photos/data/Training", "My Photos/data/Testing"], "My Photos/data/Training"),
    (["imagenet_train", "imagenet_val"], "imagenet_train"),
    (["trainval", "test"], "trainval"),
    (["only_train/images"], "only_train/images"),
    (["wrapped/again"], "wrapped/again"),
    (["."], "."),
]


@pytest.mark.parametrize(("folders", "train"), LAYOUTS, ids=[folders[0] for folders, _ in LAYOUTS])
def test_splits_anywhere_in_a_folder_train_the_right_classes(tmp_path: Path, folders: list[str], train: str) -> None:
    files = (f"{folder}/{name}/{n}.png" for folder in folders for name in ("bus", "bullet_train") for n in "01")
    write(tmp_path, *files)
    right = ImageFolder(str(tmp_path / train))
    write(tmp_path, "__MACOSX/val/a/._0.png", ".val/a/0.png", ".train/a/0.png", "notes.txt")
    source = built("dataset=folder", f"dataset.path={tmp_path}").dataset
    source.prepare()
    assert list(source.class_names) == right.classes
    files = {str(path) for split in (source.train(), source.eval()) for path in split.paths}
    assert {file for file, _ in right.imgs} <= {os.path.normpath(file) for file in files}


@pytest.mark.parametrize(
    ("targets", "names", "shown"),
    [
        ("classes", ("cat", "dog"), "cat 0+1, dog 2+0"),
        ("labels", ("cat", "dog"), "cat 1+1, dog 2+0"),
        ("values", ("angle", "size"), "angle, size"),
        ("values", (), "2 values"),
    ],
)
def test_the_banner_names_what_a_job_predicts(targets: str, names: tuple[str, ...], shown: str) -> None:
    labels = [torch.tensor([1, 1]), torch.tensor([0])]
    if targets != "classes":
        labels = [torch.tensor([[0.9, 0.6], [0.2, 1.0]]), torch.tensor([[1.0, 0.0]])]
    train, val = (SimpleNamespace(labels=of) for of in labels)
    dataset, task = SimpleNamespace(classes=2, class_names=names), SimpleNamespace(targets=targets)
    job: Any = SimpleNamespace(dataset=dataset, task=task)
    data: Any = SimpleNamespace(train=train, val=val)
    assert banner._classes(job, data) == shown


def test_names_weights_cannot_keep_are_refused_before_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("train/ants/0.png", "train/bees/0.png", "val/ants/0.png"):
        (tmp_path / place).parent.mkdir(parents=True)
        (tmp_path / place).touch()
    monkeypatch.setattr(validate_with_data, "NAMES_LIMIT", 15)
    says = "dataset: the names of its 2 classes take 16 characters, expected at most 15, because weights keep them; "
    data = ("dataset=folder", f"dataset.path={tmp_path}", "dataset.decode_size=8")
    assert says in refusal(tmp_path / "runs", *data)


def test_a_class_whose_folder_has_bytes_that_are_no_text_is_trained_resumed_and_evaluated(tmp_path: Path) -> None:
    owl = os.fsdecode(b"ow\xffl")
    write(tmp_path / "images", *(f"{split}/{name}/1.png" for split in ("train", "val") for name in ("cat", owl)))
    data = (
        "dataset=folder",
        f"dataset.path={tmp_path / 'images'}",
        "dataset.decode_size=8",
        "model=linear",
        "batch=2",
    )
    words = (*data, "metric=[recall]", "metric.recall.average=none", "telemetry.report=always")
    for steps in (1, 2):
        run = train_here(tmp_path / "run", *words, f"steps={steps}")
        summary = run.read_summary()
        assert (summary["status"], summary["step"]) == ("completed", steps)
        assert {"recall/cat", "recall/ow\\udcffl"} <= summary["scores"].keys()
    predictor = lockstep.load(run.path, device="cpu")
    assert predictor.predict(tmp_path / "images" / "val" / owl / "1.png")[0].names == ("cat", "ow\\udcffl")
    evaluate(str(run.path), (), split="val", device="cpu", out=None)
    evaluation = json.loads((run.path / "evaluation.json").read_text())
    recalls = {f"recall/{facts['name']}": facts["recall"] for facts in evaluation["classes"]}
    assert recalls == {name: value for name, value in summary["scores"].items() if name in recalls}
