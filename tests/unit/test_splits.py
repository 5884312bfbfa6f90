"""The two kinds of split, and the decoding of image files."""

from __future__ import annotations

import hashlib
import pickle
import shutil
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import functional as T

from lockstep.config.options import declared
from lockstep.core.errors import BrokenImage, InputError
from lockstep.core.monitor import Direction
from lockstep.core.run import State
from lockstep.data.datasets import decode
from lockstep.data.datasets.files import Crop, FileSource, FileSplit
from lockstep.data.datasets.folder import Folder
from lockstep.data.datasets.listing import ranked
from lockstep.data.datasets.targets import check_labels
from lockstep.sweep.record import Record, seeds_together

PIXELS = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)


def decoded(path: Path, size: int = 20) -> Tensor:
    """The file's pixels, read by a split."""
    return FileSplit([path], torch.tensor([0]), size).fetch([0])[0]


def centre(image: Image.Image) -> Tensor:
    """The central 20x20 of a 20x30 image, decoded by Pillow."""
    return T.center_crop(T.pil_to_tensor(image.convert("RGB")), [20, 20])


def test_the_shorter_side_is_resized_and_the_centre_kept(tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    Image.fromarray(PIXELS).save(path)
    whole = T.resize(T.pil_to_tensor(Image.fromarray(PIXELS)), [8], antialias=True)
    assert whole.shape == (3, 8, 12)
    difference = decoded(path, size=8).int() - T.center_crop(whole, [8, 8]).int()
    # With vector instructions torch resizes bytes, on other CPUs floats, whose rounding depends on the crop.
    assert difference.abs().max() <= 1


@pytest.mark.parametrize("crop", [None, Crop(lambda rng, sizes: torch.tensor([[5, 3, 8, 12]]), 0, (20, 30))])
def test_a_file_is_resized_by_the_interpolation_that_is_asked_for(tmp_path: Path, crop: Crop | None) -> None:
    Image.fromarray(PIXELS).save(tmp_path / "image.png")
    whole = T.pil_to_tensor(Image.fromarray(PIXELS))
    for interpolation in ("bilinear", "bicubic"):
        mode = T.InterpolationMode(interpolation)
        split = FileSplit([tmp_path / "image.png"], torch.tensor([0]), 30, crop=crop, interpolation=interpolation)
        if crop is None:
            expected = T.center_crop(T.resize(whole, [30, 45], mode, antialias=True), [30, 30])
        else:
            expected = T.resize(whole[:, 5:13, 3:15], [20, 30], mode, antialias=True)
        assert (split.fetch([0])[0].int() - expected.int()).abs().max() <= 1


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "gif", "bmp", "tif"])
@pytest.mark.parametrize("damage", ["cut", "empty", "missing", "other bytes"])
def test_a_file_that_cannot_be_decoded_is_named_with_its_index(tmp_path: Path, suffix: str, damage: str) -> None:
    good, bad = tmp_path / f"good.{suffix}", tmp_path / f"bad.{suffix}"
    Image.fromarray(PIXELS).save(good)
    content = {"cut": good.read_bytes()[:300], "empty": b"", "other bytes": b"no image " * 9}
    if damage in content:
        bad.write_bytes(content[damage])
    split = FileSplit([good, good, bad], torch.tensor([0, 0, 0]), 20)
    split.fetch([0])
    with pytest.raises(InputError) as caught:
        split.fetch([0, 2])
    sentence = str(caught.value)
    assert sentence.startswith(f"dataset: image 2, {bad}, cannot be decoded (")
    assert "remove or replace the file" in sentence
    assert ".cpp" not in sentence


def bomb(path: Path, side: int = 50_000) -> Path:
    """Write a small image file whose header claims `side` by `side` pixels."""
    Image.fromarray(PIXELS).save(path)
    content = bytearray(path.read_bytes())
    if path.suffix == ".png":
        content[16:24] = struct.pack(">II", side, side)
        content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    elif path.suffix == ".gif":
        content[6:10] = struct.pack("<HH", side, side)
    elif path.suffix == ".bmp":
        content[18:26] = struct.pack("<ii", side, side)
    else:
        frame = content.index(b"\xff\xc0") + 5
        content[frame : frame + 4] = struct.pack(">HH", side, side)
    path.write_bytes(content)
    return path


def test_a_strip_that_resizing_would_make_huge_is_refused(tmp_path: Path) -> None:
    Image.new("RGB", (1, 60_000)).save(tmp_path / "strip.png")
    assert FileSplit([tmp_path / "strip.png"], torch.tensor([0]), 4).fetch([0]).shape == (1, 3, 4, 4)
    with pytest.raises(InputError, match="its header says 1x60000, expected at most"):
        FileSplit([tmp_path / "strip.png"], torch.tensor([0]), 224).fetch([0])


@pytest.mark.parametrize("suffix", ["png", "gif", "jpg", "bmp"])
def test_a_header_that_asks_for_too_much_is_refused_before_anything_is_decoded(tmp_path: Path, suffix: str) -> None:
    path = bomb(tmp_path / f"bomb.{suffix}")
    with pytest.raises(
        InputError, match=rf"image 0, {path}, cannot be decoded \(its header says .*(50000x50000|2500000000)"
    ):
        decoded(path)


@pytest.mark.parametrize("suffix", ["png", "gif", "jpg"])
def test_the_bound_on_pixels_is_ours_and_not_that_of_pillow(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"image.{suffix}"
    Image.fromarray(PIXELS).save(path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 310)  # Pillow warns above, and refuses what has twice as many
    monkeypatch.setattr(decode, "PIXELS", 600)
    assert decoded(path).shape == (3, 20, 20)
    assert Image.MAX_IMAGE_PIXELS == 310, "it guards other code of this process"
    monkeypatch.setattr(decode, "PIXELS", 599)
    with pytest.raises(InputError, match="30x20, expected at most 599 pixels"):
        decoded(path)


def test_a_file_of_another_kind_is_not_opened_whatever_it_is_called(tmp_path: Path) -> None:
    # Pillow would start Ghostscript for an EPS file.
    Image.fromarray(PIXELS).save(tmp_path / "image.eps")
    path = (tmp_path / "image.eps").rename(tmp_path / "image.png")
    with pytest.raises(InputError, match="cannot identify image file"):
        decoded(path)


def test_a_broken_image_keeps_its_sentence_on_its_way_from_a_worker() -> None:
    error = BrokenImage(17, Path("a.png"), "cut short")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.failure) == (str(error), error.failure)
    assert error.failure == "image 17, a.png, cannot be decoded (cut short)"


def test_a_label_that_is_no_class_is_named() -> None:
    check_labels(torch.tensor([0, 9]), 10, "the training split")
    for wrong in (10, -1):
        with pytest.raises(InputError, match=rf"example 2 of the training split has label {wrong}, expected 0 to 9"):
            check_labels(torch.tensor([0, 9, wrong, 11]), 10, "the training split")


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


def test_a_file_that_is_added_moves_few_others(tmp_path: Path) -> None:
    before = evaluated(folder_of(tmp_path / "one", {"a": 100, "b": 50}), folds=5)
    after = evaluated(folder_of(tmp_path / "two", {"a": 101, "b": 50}), folds=5)
    both = [[{name.split("train")[1] for name in fold} for fold in folds] for folds in (before, after)]
    moved = sum(len(fold - other) for fold, other in zip(*both, strict=True))
    assert moved <= 4, "one over each of the cuts of its class"


@pytest.mark.parametrize(("limit", "left"), [(0.1, [10, 1, 1]), (30, [19, 10, 1]), (1, [100, 50, 3])])
def test_a_limit_leaves_a_share_of_each_class(limit: float, left: list[int], tmp_path: Path) -> None:
    sizes = {"a": 100, "b": 8 if limit == 0.1 else 50, "c": 3}
    path = folder_of(tmp_path, sizes)
    for name in sizes:
        shutil.copytree(tmp_path / "train" / name, tmp_path / "val" / name)
    source = Folder(path=path, limit=limit)
    for split in (source.train(), source.eval()):
        counts = split.labels.bincount(minlength=3).tolist()
        assert counts == left or abs(sum(counts) - limit) <= 2
        assert min(counts) >= 1
    assert source.fingerprint() != Folder(path=path).fingerprint() or limit == 1


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"fold": 1}, "dataset.fold is 1, but dataset.folds is null; add dataset.folds=5"),
        ({"folds": 3}, r"dataset.fold is null, expected a fold from 0 to 2 .*: dataset.fold=0,1,2 -m"),
        ({"folds": 3, "fold": 3}, "dataset.fold is 3, expected a fold from 0 to 2"),
        ({"folds": 3, "fold": 0, "val_share": 0.1}, "both choose the evaluation split"),
        (
            {"folds": 5, "fold": 0},
            "the class b has 4 images, so a fold would have none; use dataset.folds=4",
        ),
    ],
)
def test_folds_that_cannot_be_cut_are_one_sentence(options: dict[str, Any], expected: str, tmp_path: Path) -> None:
    path = folder_of(tmp_path, {"a": 9, "b": 4})
    with pytest.raises(InputError, match=expected):
        Folder(path=path, **options).eval()


FILE_SOURCES = [cls for cls in declared("dataset").values() if issubclass(cls, FileSource)]


@pytest.mark.parametrize("source", FILE_SOURCES, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("options", [{"fold": 1}, {"folds": 3}, {"folds": 3, "fold": 0, "val_share": 0.1}])
def test_every_source_of_files_refuses_half_a_choice_of_folds(
    source: type[FileSource], options: dict[str, Any]
) -> None:
    assert {cls.__name__ for cls in FILE_SOURCES} >= {"Folder", "CSV", "HF", "WebDataset"}
    with pytest.raises(InputError, match=r"dataset\.fold"):
        source(path="nowhere", **options)


def test_folds_beside_an_evaluation_split_are_refused(tmp_path: Path) -> None:
    path = folder_of(tmp_path, {"a": 9, "b": 9})
    (tmp_path / "val" / "a").mkdir(parents=True)
    with pytest.raises(InputError, match=r"dataset.folds is 3, but there is a validation folder"):
        Folder(path=path, folds=3, fold=0).eval()


def test_the_folds_of_a_setting_are_samples_of_its_score() -> None:
    records = [
        Record(
            number=number,
            overrides=(f"optimizer.lr={rate}", f"dataset.fold={fold}"),
            folder=f"{number:03}-a",
            state=State.done,
            objective=score,
        )
        for number, (rate, fold, score) in enumerate([(1, 0, 90.0), (1, 1, 92.0), (2, 0, 80.0), (2, 1, 82.0)])
    ]
    lines = seeds_together(records, ("optimizer.lr", "dataset.fold"), Direction.maximize)
    assert lines == ["optimizer.lr=1: 91.00 ± 1.41 over 2 folds", "optimizer.lr=2: 81.00 ± 1.41 over 2 folds"]


@pytest.mark.parametrize("apart", [False, True])
def test_ranks_are_those_of_the_hashes_in_each_stratum(apart: bool) -> None:
    rng = np.random.default_rng(0)
    names = [b"%d" % number for number in rng.integers(0, 40, 60)]  # some are listed twice
    labels = torch.from_numpy(rng.integers(0, 3, 60))
    rank, count = ranked(names, labels, b"key", apart=apart)
    digests = [hashlib.blake2b(name, digest_size=16, key=b"key").digest() for name in names]
    hashes = [(digest, position * apart) for position, digest in enumerate(digests)]
    for example, (own_hash, label) in enumerate(zip(hashes, labels.tolist(), strict=True)):
        ordered = sorted({other for other, of in zip(hashes, labels.tolist(), strict=True) if of == label})
        assert (rank[example], count[example]) == (ordered.index(own_hash), len(ordered))
