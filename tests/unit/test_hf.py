"""Images in saved tables."""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.core.errors import InputError
from lockstep.data.datasets import HF
from lockstep.data.datasets.files import FileSource


def png(level: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.full((8, 8, 3), level, dtype=np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def levels(source: FileSource, indices: list[int]) -> list[int]:
    return source.train().fetch(indices)[:, 0, 0, 0].tolist()


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


def test_a_saved_table_without_a_split_for_it_is_evaluated_on_a_share(saved: Path) -> None:
    source = HF(path=str(saved), decode_size=8, val_split="none", val_share=0.34)
    assert torch.bincount(source.eval().labels).tolist() == [1, 1]
    assert len(source.train()) == 4


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"val_split": "test"}, "val_split is 'test', but .* has 'train', 'validation'.*dataset.val_share=0.1"),
        ({"train_split": "fit"}, "train_split is 'fit', but .* has 'train', 'validation'"),
        ({"val_share": 0.1}, "val_share is 0.1, but .* has the split 'validation' too"),
        ({"image_column": "img"}, "image_column is 'img', but the columns of .* are image, label"),
        ({"image_column": "label"}, "image_column is 'label', which holds ClassLabel.*, expected images"),
    ],
)
def test_what_a_saved_table_does_not_have_is_named(saved: Path, keys: dict[str, object], sentence: str) -> None:
    with pytest.raises(InputError, match=f"dataset.{sentence}"):
        HF(path=str(saved), **keys).prepare()  # type: ignore[arg-type]


def test_a_folder_that_is_not_a_saved_table_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    with pytest.raises(InputError, match=r"expected a folder that save_to_disk"):
        HF(path=str(tmp_path)).prepare()
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install datasets"):
        HF(path=str(tmp_path)).prepare()
