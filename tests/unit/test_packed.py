"""Packed data sets: they hold the pixels of their folder, and a damaged one is refused."""

import functools
import hashlib
import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from helpers import Case, forked, gang, records, train_here, weights
from lockstep.cli import pack as command
from lockstep.core.data_protocols import LoaderContext
from lockstep.core.errors import BrokenImage, InputError, StorageError
from lockstep.core.safe_write import locked
from lockstep.core.world import World
from lockstep.data.datasets import Digits, packed
from lockstep.data.datasets.files import FileSplit
from lockstep.data.datasets.folder import Folder
from lockstep.data.datasets.packed import Packed
from lockstep.data.loading.loaders import Auto, Resident
from lockstep.runtime.host import cores


def fill(root: Path) -> Folder:
    """150 training images of different shapes in three classes, more than one chunk, and nine to evaluate."""
    generator = np.random.default_rng(0)
    for split, count in (("train", 50), ("val", 3)):
        for label in ("cat", "ant", "zebra"):
            (root / split / label).mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(0, 256, (12 + number % 5, 14, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / label / f"{number:02}.{('png', 'jpg')[number % 2]}")
    return Folder(path=str(root), decode_size=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return fill(tmp_path_factory.mktemp("images"))


def pack(source: Folder, target: Path, threads: int = 2) -> list[str]:
    """Pack a folder; returns one sentence for each image that was left out."""
    return [error.failure for error in packed.pack_source(source, target, threads=threads, advanced=lambda n: None)]


@pytest.fixture(scope="module")
def target(folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packed") / "target"
    assert pack(folder, path) == []
    return path


def test_a_run_is_evaluated_on_val_and_tested_on_test_of_what_was_packed(tmp_path: Path) -> None:
    for split, count in (("train", 4), ("val", 2), ("exam", 3)):
        (tmp_path / "photos" / split / "cat").mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (8, 8)).save(tmp_path / "photos" / split / "cat" / f"{number}.png")
    assert pack(Folder(path=str(tmp_path / "photos"), decode_size=8, test_folder="exam"), tmp_path / "target") == []
    dataset = Packed(path=str(tmp_path / "target"))
    test = dataset.test()
    assert test is not None
    assert (len(dataset.train()), len(dataset.eval()), len(test)) == (4, 2, 3)


def jobs(root: Path, folder: Folder, target: Path) -> list[Case]:
    """A run on the folder, and a run on its packed images with each loader."""
    common = ("batch=32", "steps=7", "telemetry.samples=true", "augment=crop_flip", "model=linear")
    theirs = ("dataset=folder", f"dataset.path={folder.path}", "dataset.decode_size=8", "loader=resident")
    ours = [(f"loader.workers={workers}", "loader=streaming") for workers in (0, 2)]
    named = {"folder": theirs, "resident": ("loader=resident",), "streaming 0": ours[0], "streaming 2": ours[1]}
    packed = ("dataset=packed", f"dataset.path={target}")
    return [
        Case(root / name, (*common, *(() if name == "folder" else packed), *words)) for name, words in named.items()
    ]


def seen(run: Path) -> tuple[list[tuple[int, ...]], list[float]]:
    """Step, epoch, index and a hash of the pixels of every example that a run trained on, and all its losses."""
    lines = [json.loads(line) for file in run.glob("logs/*.samples.jsonl") for line in file.read_text().splitlines()]
    samples = [tuple(line[key] for key in ("step", "epoch", "index", "hash")) for line in lines]
    both = ("loss/train", "loss/val")
    return sorted(samples), [line[key] for line in records(run) for key in both if key in line]


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_loader_gives_the_pixels_and_the_losses_of_the_folder(
    folder: Folder, target: Path, tmp_path: Path, ranks: int
) -> None:
    planned = jobs(tmp_path, folder, target)
    if ranks > 1:
        planned = [planned[0], planned[-1]]
        gang(tmp_path / "gang", ranks, planned)
    else:
        for chunk in planned:
            train_here(chunk.path, *chunk.overrides)
    samples, losses = seen(tmp_path / "folder")
    assert len(samples) == 32 * 6 + 22  # the fifth batch of an epoch of 150 is short
    for run in planned[1:]:
        assert seen(run.path) == (samples, losses), run.path.name


@pytest.mark.parametrize("task", ["multiclass", "multilabel", "regression"])
def test_a_packed_set_of_any_task_trains_as_its_source(task: str, tmp_path: Path) -> None:
    columns = "dataset.label_column=class" if task == "multiclass" else "dataset.label_columns=[x,y]"
    generator = np.random.default_rng(0)
    lines = ["path,class,names,x,y,split"]
    for number in range(40):
        x, y = generator.integers(0, 2, 2) if task == "multilabel" else generator.normal(size=2)
        names = ("", "a", "b;c", "a;c")[number % 4]
        lines.append(f"{number}.png,{'uv'[number % 2]},{names},{x},{y},{'val' if number >= 30 else 'train'}")
        Image.fromarray(generator.integers(0, 256, (9, 10, 3), dtype=np.uint8)).save(tmp_path / f"{number}.png")
    (tmp_path / "3.png").write_bytes(b"no image")
    for name, rows in {"a=b": lines, "whole": [line for line in lines if not line.startswith("3.png")]}.items():
        (tmp_path / f"{name}.csv").write_text("\n".join(rows) + "\n")
    words = ("dataset=csv", columns, "dataset.decode_size=8", f"task={task}")
    with pytest.raises(InputError, match=r"3\.png, cannot be decoded .* skip up to N of them with --skip=N"):
        command.pack([f"{tmp_path}/c=d", *words, f"dataset.path={tmp_path}/a=b.csv"])
    command.pack([f"{tmp_path}/c=d", *words, f"dataset.path={tmp_path}/a=b.csv"], skip="1")
    packed.check(tmp_path / "c=d", lambda number: None)
    runs = {
        "own": ("dataset=packed", f"dataset.path='{tmp_path}/c=d'", f"task={task}"),
        "theirs": (*words, f"dataset.path={tmp_path}/whole.csv"),
    }
    own, theirs = (
        train_here(tmp_path / name, "batch=8", "epochs=2", "model=linear", "train.mixup=0.2", *words)
        for name, words in runs.items()
    )

    def scores(line: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in line.items() if key.partition("/")[0] in ("loss", "val", "metric")}

    figures = [*map(scores, records(own))]
    assert figures == [*map(scores, records(theirs))]
    assert len(figures) == 10, "eight steps and two evaluations"
    assert own.read_summary()["best"] == theirs.read_summary()["best"]
    pairs = zip(weights(own).values(), weights(theirs).values(), strict=True)
    assert all(itertools.starmap(torch.equal, pairs))


class WithTest(Folder):
    """A folder with its evaluation images as a test split, too."""

    def test(self) -> FileSplit:
        return self.eval()


def test_a_test_split_is_packed_where_there_is_one(
    folder: Folder, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "DECODE_CHUNK", 4)
    pack(WithTest(path=folder.path, decode_size=8), tmp_path / "new")
    source = Packed(path=str(tmp_path / "new"))
    assert torch.equal(source.test().images, folder.eval().fetch([*range(9)]))
    assert torch.equal(source.test().labels, folder.eval().labels)
    without = Packed(path=str(target))
    assert torch.equal(source.train().images, without.train().images)
    assert source.fingerprint() == {**without.fingerprint(), "test": without.fingerprint()["val"]}
    assert without.test() is None
    packed.check(tmp_path / "new", lambda number: None)
    (tmp_path / "new" / "test.labels").write_bytes(bytes(9 * 8))
    with pytest.raises(InputError, match=r"test\.labels does not match its sha256"):
        packed.check(tmp_path / "new", lambda number: None)


def test_a_packed_set_and_its_splits_are_what_the_folder_is(folder: Folder, target: Path) -> None:
    source = Packed(path=str(target))
    for ours, theirs in ((source.train(), folder.train()), (source.eval(), folder.eval())):
        assert torch.equal(ours.labels, theirs.labels)
        assert torch.equal(ours.images, theirs.fetch(list(range(len(theirs)))))
        assert torch.equal(ours.fetch([5, 2, 5]), theirs.fetch([5, 2, 5]))
        assert ours.fetch([]).shape == (0, 3, 8, 8)
    source = Packed(path=str(target), input_size=6, crop=0.5)
    for name in ("classes", "image_shape", "mean", "std"):
        assert getattr(source, name) == getattr(folder, name)
    assert (source.input_shape, source.eval_crop) == ((3, 6, 6), 0.5)
    assert Packed(path=str(target)).input_shape == (3, 8, 8)
    for split, sums in source.fingerprint().items():
        contents = {kind: (target / f"{split}.{kind}").read_bytes() for kind in ("images", "labels")}
        assert sums == {kind: hashlib.sha256(content).hexdigest() for kind, content in contents.items()}


def test_a_split_maps_its_file_and_nothing_done_to_it_reaches_the_file(folder: Folder, tmp_path: Path) -> None:
    pack(folder, tmp_path / "target")
    files = [tmp_path / "target" / "train.images", tmp_path / "target" / "train.labels"]
    before = [file.read_bytes() for file in files]
    split = Packed(path=str(tmp_path / "target")).train()
    assert split.mapped
    assert all(str(file) in Path("/proc/self/maps").read_text() for file in files)
    split.images.zero_()
    split.labels.zero_()
    assert [file.read_bytes() for file in files] == before


def test_workers_auto_has_workers_read_what_is_mapped(target: Path) -> None:
    source = Packed(path=str(target))
    splits = (source.train(), source.eval())
    facts: dict[str, Any] = {"gigabytes": 1.0, "reads": 10**9, "changes": False, "training_rate": lambda: None}
    task = LoaderContext(world=World.solo(), splits=splits, **facts)
    chosen, reason = Auto(resident_gb=0.5).choose(task)
    assert chosen.workers == cores()  # also for small images: rows are copied without holding Python's lock
    assert "one worker" in reason
    assert isinstance(Auto(resident_gb=2.0).choose(task)[0], Resident)


def test_broken_images_are_left_out_up_to_the_allowed_number(tmp_path: Path) -> None:
    source = fill(tmp_path / "images")
    for path in ("train/ant/03.jpg", "val/zebra/00.png"):
        (tmp_path / "images" / path).write_bytes(b"no image")
    with pytest.raises(InputError, match=r"image 3, .*03\.jpg, cannot be decoded"):
        pack(source, tmp_path / "target")
    with pytest.raises(InputError, match=r"image 6, .*zebra/00\.png, cannot be decoded"):
        pack(Folder(path=source.path, decode_size=8, skip=1), tmp_path / "target")
    assert [path.name for path in tmp_path.iterdir()] == ["images"]
    broken = pack(Folder(path=source.path, decode_size=8, skip=2), tmp_path / "target")
    assert [line.partition(",")[0] for line in broken] == ["image 3", "image 6"]
    ours, theirs = Packed(path=str(tmp_path / "target")).train(), source.train()
    whole = [index for index in range(150) if index != 3]
    assert torch.equal(ours.images, theirs.fetch(whole))
    assert torch.equal(ours.labels, theirs.labels[whole])


def test_what_a_killed_pack_left_is_removed_but_nothing_of_a_pack_that_runs(folder: Folder, tmp_path: Path) -> None:
    for name in (".target.killed.partial", ".target.running.partial", ".target.mine", ".other.killed.partial"):
        (tmp_path / name / "packed").mkdir(parents=True)
    with locked(tmp_path / ".target.running.partial" / packed.LOCK):
        pack(folder, tmp_path / "target")
    left = {".target.running.partial", ".target.mine", ".other.killed.partial", "target"}
    assert {path.name for path in tmp_path.iterdir()} == left


def test_a_split_without_an_image_that_can_be_decoded_is_not_packed(tmp_path: Path) -> None:
    source = fill(tmp_path / "images")
    for path in Path(source.path, "val").rglob("*.*"):
        path.write_bytes(b"no image")
    with pytest.raises(InputError, match="dataset: no image of the evaluation split can be decoded"):
        pack(replace(source, skip=99), tmp_path / "target")
    assert [path.name for path in tmp_path.iterdir()] == ["images"]


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_nothing_that_exists_is_overwritten(folder: Folder, tmp_path: Path, kind: str) -> None:
    place = tmp_path / "target"
    {"folder": place.mkdir, "file": place.touch, "link": lambda: place.symlink_to(tmp_path / "nowhere")}[kind]()
    with pytest.raises(InputError, match="exists, and nothing is overwritten"):
        pack(folder, place)
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_a_full_disk_is_a_storage_error_and_leaves_nothing(folder: Folder, tmp_path: Path, full_disk: Any) -> None:
    with full_disk(20_000), pytest.raises(StorageError, match=r"target cannot be written \(File too large\)"):
        pack(folder, tmp_path / "target")
    huge = Folder(path=folder.path, decode_size=10**7)
    with pytest.raises(StorageError, match=r"needs [\d.]+ GB, and [\d.]+ GB are free"):
        pack(huge, tmp_path / "target")
    assert list(tmp_path.iterdir()) == []


def copied(target: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(target, tmp_path / "copy"))


@pytest.mark.parametrize(
    ("file", "change"), [("train.images", "cut"), ("val.labels", "longer"), ("train.labels", "gone")]
)
def test_a_file_of_another_size_is_refused_before_a_run(target: Path, tmp_path: Path, file: str, change: str) -> None:
    path = copied(target, tmp_path) / file
    content = path.read_bytes()
    path.write_bytes(content[:-1] if change == "cut" else content + b"0")
    if change == "gone":
        path.unlink()
    sentence = rf"is not a complete packed data set \({file} .*; make one with lockstep pack"
    with pytest.raises(InputError, match=sentence):
        Packed(path=str(path.parent)).prepare()


def test_a_check_moves_by_the_bytes_of_its_files(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    totals, steps = list[int](), list[int]()

    @contextmanager
    def progress(activity: str, total: int) -> Iterator[Callable[[int], None]]:
        totals.append(total)
        yield steps.append

    monkeypatch.setattr(command, "progress", progress)
    command.check_packed(str(target))
    read = sum(file.stat().st_size for file in target.iterdir() if file.name != "manifest.json")
    assert (sum(steps), totals) == (read, [read])


def without(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda manifest: manifest.pop(key)


@pytest.mark.parametrize(
    "change",
    [
        *map(without, ("classes", "shape", "mean", "std", "splits")),
        lambda manifest: manifest.update(targets="other"),
        lambda manifest: manifest.update(fit="stretch"),
        lambda manifest: manifest.update(classes=[]),
        lambda manifest: manifest.update(shape=[3, 0, 8]),
        lambda manifest: manifest.update(mean=[0.5]),
        lambda manifest: manifest.update(std=[0.2]),
        lambda manifest: manifest.update(mean=[0.5, 0.5], std=[0.2, 0.2]),
        lambda manifest: manifest["splits"].pop("val"),
        lambda manifest: manifest["splits"].update(other=manifest["splits"]["val"]),
        lambda manifest: manifest["splits"].update(test=None),
        lambda manifest: manifest["splits"]["train"].update(count="150"),
        lambda manifest: manifest["splits"]["train"]["sha256"].pop("labels"),
    ],
)
def test_a_manifest_with_wrong_fields_is_refused(target: Path, tmp_path: Path, change: Callable[[Any], Any]) -> None:
    path = copied(target, tmp_path) / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
    with pytest.raises(InputError, match=r"\(manifest.json is not a manifest of `lockstep pack`\)"):
        Packed(path=str(path.parent)).prepare()


def test_a_set_from_before_the_key_targets_has_classes(target: Path, tmp_path: Path) -> None:
    path = copied(target, tmp_path) / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["targets"], manifest["fit"], manifest["format"], manifest["lockstep"]
    path.write_text(json.dumps(manifest))
    old, new = Packed(path=str(path.parent)), Packed(path=str(target))
    assert (old.targets, old.classes, old.fit) == ("classes", new.classes, "crop")
    assert torch.equal(old.train().labels, new.train().labels)


@pytest.mark.parametrize(
    ("targets", "labels"),
    [
        ("classes", np.array([1, 0, 2], "<i8")),
        ("labels", np.eye(3, dtype="<f4")),
        ("values", np.ones((3, 3), "<f4")),
        ("values", np.ones((3, 1), "<f4")),
    ],
)
def test_labels_are_read_as_their_kind_is_stored(targets: str, labels: Any, tmp_path: Path) -> None:
    pixels, facts = np.arange(3 * 2 * 4, dtype="u1"), {"count": 3, "sha256": {"images": "", "labels": ""}}
    for split in ("train", "val"):
        pixels.tofile(tmp_path / f"{split}.images")
        labels.tofile(tmp_path / f"{split}.labels")
    classes = [*"abc"][: labels.shape[-1]]
    manifest = {"targets": targets, "classes": classes, "shape": [1, 2, 4], "mean": [0.5], "std": [0.2]}
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "splits": {"train": facts, "val": facts}}))
    split = Packed(path=str(tmp_path)).eval()
    assert torch.equal(split.images, torch.from_numpy(pixels.reshape(3, 1, 2, 4)))
    assert split.labels.dtype == torch.from_numpy(labels).dtype
    assert torch.equal(split.labels, torch.from_numpy(labels))


def test_a_label_that_is_no_class_is_refused(target: Path, tmp_path: Path) -> None:
    path = copied(target, tmp_path)
    labels = np.fromfile(path / "train.labels", dtype="<i8")
    labels[7] = 3
    labels.tofile(path / "train.labels")
    with pytest.raises(InputError, match=r"example 7 of .*train\.labels has label 3, expected 0 to 2"):
        Packed(path=str(path)).prepare()


def test_the_check_finds_one_flipped_bit(target: Path, tmp_path: Path) -> None:
    read: list[int] = []
    packed.check(target, read.append)
    assert sum(read) == sum(file.stat().st_size for file in target.iterdir() if file.suffix != ".json")
    path = copied(target, tmp_path)
    data = bytearray((path / "val.images").read_bytes())
    data[100] ^= 1
    (path / "val.images").write_bytes(data)
    Packed(path=str(path)).prepare()
    with pytest.raises(InputError, match=r"val\.images does not match its sha256"):
        packed.check(path, lambda n: None)


def test_the_check_reads_files_of_several_megabytes_to_their_end(tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / "photos" / split / "a").mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "photos" / split / "a" / "0.png")
    pack(Folder(path=str(tmp_path / "photos"), decode_size=1200), tmp_path / "target")
    read = list[int]()
    packed.check(tmp_path / "target", read.append)
    assert sum(read) == 2 * (3 * 1200 * 1200 + 8)
    with (tmp_path / "target" / "train.images").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\1")
    with pytest.raises(InputError, match=r"train\.images does not match its sha256"):
        packed.check(tmp_path / "target", read.append)


def test_the_command_packs_checks_and_refuses(folder: Folder, target: Path, tmp_path: Path) -> None:
    pack_command = functools.partial(forked, "lockstep", "pack")
    done = pack_command(folder.path, str(tmp_path / "new"), "--size", "8")
    assert done.code == 0, done.err
    assert f"packed 159 images, 31 kB; train with dataset=packed dataset.path={tmp_path}/new" in done.out
    assert (tmp_path / "new" / "train.images").read_bytes() == (target / "train.images").read_bytes()
    checked = pack_command("--check", str(tmp_path / "new"))
    assert checked.out == f"{tmp_path}/new is complete: every file matches its sha256\n"
    again = pack_command(folder.path, str(tmp_path / "new"))
    assert (again.code, again.err.count("\n")) == (2, 1)
    wrong = pack_command(str(tmp_path), str(tmp_path / "other"))
    assert wrong.code == 2
    assert wrong.err.startswith(f"lockstep: dataset.path: {tmp_path}/new has no images (.apng, ")


@pytest.mark.parametrize(
    ("words", "check"), [(["source"], None), (["source"], "target"), (["dataset=csv"], None), ([*"abc"], None)]
)
def test_a_command_that_names_too_little_or_too_much_is_refused(words: list[str], check: str | None) -> None:
    says = "expected TARGET and the overrides of a data set, SOURCE and TARGET, or --check TARGET alone"
    with pytest.raises(InputError, match=says):
        command.pack(words, check=check)


@pytest.mark.parametrize("fit", ["crop", "pad", "squash"])
def test_a_packed_set_says_how_its_images_were_fitted(tmp_path: Path, fit: str) -> None:
    for place in ("train/a", "train/b", "val/a", "val/b"):
        (tmp_path / place).mkdir(parents=True)
        Image.new("RGB", (24, 12)).save(tmp_path / place / "0.png")
    source = Folder(path=str(tmp_path), decode_size=[8, 16], fit=fit)
    pack(source, tmp_path / "target")
    own = Packed(path=str(tmp_path / "target"))
    assert (own.fit, own.image_shape, own.eval_crop) == (fit, (3, 8, 16), source.eval_crop)


@pytest.mark.parametrize(
    ("shape", "fits"), [([3, 8, 0], False), ([3, 0, 8], False), ([3, 4, 16], True), ([3, 16, 4], True)]
)
def test_the_sides_in_a_manifest_are_at_least_a_pixel(
    target: Path, tmp_path: Path, shape: list[int], fits: bool
) -> None:
    path = copied(target, tmp_path) / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "shape": shape}))
    if fits:
        assert list(Packed(path=str(path.parent)).train().images.shape) == [150, *shape]
    else:
        with pytest.raises(InputError, match=r"\(manifest.json is not a manifest of `lockstep pack`\)"):
            Packed(path=str(path.parent)).prepare()


def test_a_packed_set_of_a_newer_format_is_refused(target: Path, tmp_path: Path) -> None:
    path = copied(target, tmp_path) / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    with pytest.raises(InputError, match=r"manifest\.json has format 99 of a .*, "):
        Packed(path=str(path.parent)).prepare()


def test_a_file_of_another_size_is_named_with_both_sizes(target: Path, tmp_path: Path) -> None:
    path = copied(target, tmp_path)
    (path / "val.labels").write_bytes(bytes(73))
    sentence = (
        f"dataset.path: {path} is not a complete packed data set (val.labels has 73 bytes, expected 72); make one "
        "with lockstep pack"
    )
    with pytest.raises(InputError) as caught:
        Packed(path=str(path)).prepare()
    assert str(caught.value) == sentence


def test_a_packed_set_may_be_a_folder_of_links(target: Path, tmp_path: Path) -> None:
    (linked := tmp_path / "linked").mkdir()
    for file in target.iterdir():
        (linked / file.name).symlink_to(file)
    packed.check(linked, lambda number: None)
    assert torch.equal(Packed(path=str(linked)).eval().images, Packed(path=str(target)).eval().images)


def test_a_manifest_of_many_names_is_read_although_it_is_longer_than_a_text(target: Path, tmp_path: Path) -> None:
    path = copied(target, tmp_path) / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["classes"] = [name.ljust(2**17, "x") for name in manifest["classes"]]
    path.write_text(json.dumps(manifest))
    assert packed.read_manifest(path.parent).classes == (*manifest["classes"],)


def test_a_check_reads_the_labels_also_where_their_hash_is_right(target: Path, tmp_path: Path) -> None:
    path = copied(target, tmp_path)
    content = np.array([0, 1, 2, 3, *[0] * 5], "<i8").tobytes()
    (path / "val.labels").write_bytes(content)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["splits"]["val"]["sha256"]["labels"] = hashlib.sha256(content).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match=r"example 3 of .*val\.labels has label 3, expected 0 to 2"):
        packed.check(path, lambda number: None)


@pytest.mark.parametrize("missing", [0, 1])
def test_a_pack_needs_the_bytes_of_its_images_and_labels(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: int
) -> None:
    need = 159 * (3 * 8 * 8 + 8)
    monkeypatch.setattr(packed.shutil, "disk_usage", lambda path: SimpleNamespace(free=need - missing))
    if not missing:
        assert pack(folder, tmp_path / "target") == []
        return
    with pytest.raises(StorageError, match=r"target needs 0\.0 GB, and 0\.0 GB are free; free disk space there$"):
        pack(folder, tmp_path / "target")
    monkeypatch.setattr(packed.shutil, "disk_usage", lambda path: SimpleNamespace(free=2.34e9))
    with pytest.raises(StorageError, match=r"needs 30\.5 GB, and 2\.3 GB are free"):
        pack(replace(folder, decode_size=8000), tmp_path / "target")


def test_a_pack_makes_the_folders_above_it_and_tells_how_far_it_is(tmp_path: Path) -> None:
    source, target = fill(tmp_path / "images"), tmp_path / "new" / "a[b]*" / "target[1]"
    (leftover := target.parent / ".target[1].killed.partial" / "packed").mkdir(parents=True)
    (tmp_path / "images" / "train" / "ant" / "03.jpg").write_bytes(b"no image")
    numbers, locks = list[int](), list[bool]()

    def advanced(number: int) -> None:
        numbers.append(number)
        (own,) = target.parent.glob(".target*.partial")
        try:
            with locked(own / packed.LOCK):
                locks.append(False)
        except BlockingIOError:
            locks.append(True)

    packed.pack_source(replace(source, skip=1), target, threads=2, advanced=advanced)
    assert numbers == [64, 64, 22, 9], "also of what is left out"
    assert locks == [True] * 4, "another pack leaves it alone"
    assert not leftover.exists()
    assert [path.name for path in target.parent.iterdir()] == ["target[1]"]


def test_classes_without_names_are_called_by_their_numbers_and_folders_are_made(tmp_path: Path) -> None:
    source = Digits(limit=20)
    packed.pack_source(source, tmp_path / "new" / "folder" / "target.v2", threads=1, advanced=lambda number: None)
    own = Packed(path=str(tmp_path / "new" / "folder" / "target.v2"))
    assert own.class_names == tuple(map(str, range(10)))
    assert (own.mean, own.std, own.image_shape) == (source.mean, source.std, (1, 8, 8))
    assert torch.equal(own.train().images, source.train().images)


def test_a_pack_decodes_by_the_threads_that_it_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = list[int]()

    def mapped(function: Any, items: Any, *, workers: int, prefetch: int) -> Any:
        chosen.append(workers)
        return map(function, items)

    monkeypatch.setattr(packed, "map_in_order", mapped)
    packed.pack_source(Digits(limit=20), tmp_path / "target", threads=3, advanced=lambda number: None)
    assert chosen == [3, 3], "the training and the evaluation split"


def test_of_broken_images_the_last_one_is_the_one_too_many(tmp_path: Path) -> None:
    source = fill(tmp_path / "images")
    for name in ("ant/03.jpg", "ant/05.jpg", "zebra/01.jpg"):
        (tmp_path / "images" / "train" / name).write_bytes(b"no image")
    for skip, image in ((0, 3), (1, 5), (2, 101)):
        with pytest.raises(BrokenImage, match=f"image {image}, "):
            pack(replace(source, skip=skip), tmp_path / "target")
    assert len(pack(replace(source, skip=3), tmp_path / "target")) == 3


@pytest.fixture
def packing(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the command packs, with the words and the arguments that it has passed on."""

    def job_here(words: list[str], who: str) -> SimpleNamespace:
        passed.update(words=words, who=who)
        return SimpleNamespace(dataset=passed["source"])

    def pack_source(source: Any, target: Path, *, threads: int, advanced: Any) -> list[BrokenImage]:
        passed.update(packed=source, target=target, threads=threads)
        advanced(3)
        return passed["broken"]

    @contextmanager
    def progress(activity: str, total: int) -> Iterator[Callable[[int], None]]:
        passed.update(activity=activity, total=total)
        yield lambda number: passed.update(advanced=number)

    source = SimpleNamespace(image_shape=(3, 20, 40), crops_files=False, notes=lambda: ["a note"])
    sizes = {"train": 1499, "eval": 20, "test": 3}
    vars(source).update({name: lambda size=size: range(size) for name, size in sizes.items()})
    passed: dict[str, Any] = {"source": source, "broken": []}
    monkeypatch.setattr(command, "job_here", job_here)
    monkeypatch.setattr(command, "progress", progress)
    monkeypatch.setattr(packed, "pack_source", pack_source)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: passed.update(torch=number))
    return passed


def test_a_pack_reads_the_source_of_its_words_and_says_what_it_has_and_how_to_train_on_it(
    packing: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    packing["broken"] = [BrokenImage(7, "a.png", "cut"), BrokenImage(9, "b.png", "empty")]
    words = ["photos, mine", "out", "task=multilabel", "seed=1"]
    command.pack(words, decode_size="32", skip="2", val_share=None)
    assert packing["words"] == [
        *("batch=1", "dataset=folder", 'dataset.path="photos, mine"', "dataset.decode_size=32", "dataset.skip=2"),
        *("task=multilabel", "seed=1"),
    ]
    assert packing["packed"] is packing["source"]
    assert packing["who"] == "pack decodes images"
    assert (packing["activity"], packing["total"], packing["advanced"]) == ("packing", 1522, 3)
    assert (packing["target"], packing["threads"], packing["torch"]) == (tmp_path / "out", cores(), 1)
    shown = capsys.readouterr()
    lines = [*shown.out.splitlines(), *shown.err.splitlines()]
    train = "train with dataset=packed dataset.path=out task=multilabel"
    assert f"packed 1,520 images, 3.6 MB; {train}" in lines  # 1,520 times 2,400 bytes
    for line in ("a note", "image 7, a.png, cannot be decoded (cut): skipped", "image 9, b.png, cannot be decoded"):
        assert any(line in text for text in lines), line
    assert "random crops" not in "".join(lines)


def test_a_pack_of_overrides_has_no_folder_and_says_that_crops_are_cut_from_what_is_stored(
    packing: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packing["source"].crops_files = True
    command.pack([str(tmp_path / "out"), "dataset=csv"], val_share="0.5")
    assert packing["words"] == ["batch=1", "dataset.val_share=0.5", "dataset=csv"]
    assert packing["target"] == tmp_path / "out"
    shown = capsys.readouterr().out
    assert f"train with dataset=packed dataset.path={tmp_path}/out\n" in shown
    assert "random crops are now cut from squares of 20 pixels, and not from the files" in shown


@pytest.mark.parametrize(
    ("words", "flags"),
    [(["dataset=csv", "out"], {}), (["a"], {"skip": "1"}), ([], {}), (["a", "b", "c", "seed=1"], {})]
    + [(words, {"check": "out", **flags}) for words, flags in ((["seed=1"], {}), ([], {"skip": "1"}))],
)
def test_a_pack_that_has_no_target_or_two_commands_in_one_is_refused(
    words: list[str], flags: dict[str, str], packing: dict[str, Any]
) -> None:
    with pytest.raises(InputError, match=r"^pack: expected TARGET and .* alone; `lockstep pack --help`$"):
        command.pack(words, **flags)
    assert "words" not in packing


def test_a_check_reads_the_packed_folder_alone_and_says_that_it_is_whole(
    target: Path, packing: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(target.parent)
    command.pack([], check="target", decode_size=None, skip=None)
    read = sum(file.stat().st_size for file in target.iterdir() if file.name != "manifest.json")
    assert (packing["activity"], packing["total"]) == ("checking", read)
    assert capsys.readouterr().out == "target is complete: every file matches its sha256\n"
    for file in sorted({*target.iterdir()} - {target / "manifest.json"}):
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(InputError, match=file.name):
            command.check_packed("target")
        file.write_bytes(content)
    assert capsys.readouterr().out == ""
