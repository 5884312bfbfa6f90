"""Data sets of arrays of a user's own: what they may return, and what is refused with the line that converts it."""

import dataclasses
import hashlib
import re
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.core.errors import InputError
from lockstep.data.datasets.builtin import ArraySource

PIXELS = np.arange(12 * 48, dtype=np.uint8).reshape(12, 3, 4, 4)
KINDS = np.arange(12) % 2
SHARES = np.stack([KINDS, 1 - KINDS], axis=1)


def source(images: Any = PIXELS, labels: Any = KINDS, kind: str = "classes", **fields: Any) -> Any:
    """A data set of these arrays, as an own class has it."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Own(ArraySource):
        targets = kind
        classes = 2
        image_shape = (3, 4, 4)
        mean = std = (0.5, 0.5, 0.5)

        def read(self, train: bool) -> tuple[Any, Any]:
            return images, labels

    return Own(**fields)


def as_floats(dtype: Any) -> Any:
    return (PIXELS / np.float64(255)).astype(dtype)


@pytest.mark.parametrize(
    "images",
    [
        *(
            PIXELS,
            torch.from_numpy(PIXELS),
            PIXELS[:, :, ::-1].copy()[:, :, ::-1],
            np.frombuffer(PIXELS.tobytes(), np.uint8).reshape(PIXELS.shape),
        ),
        *(as_floats(np.float16), as_floats(np.float32), as_floats(np.float64), torch.from_numpy(as_floats("f4"))),
        *(np.asfortranarray(as_floats("f4")), torch.from_numpy(as_floats("f4")).requires_grad_()),
    ],
    ids=["uint8", "tensor", "strides", "bytes", "f2", "f4", "f8", "float tensor", "Fortran", "with a gradient"],
)
def test_images_of_any_kind_are_the_same_bytes(images: Any) -> None:
    own = source(images)
    assert own.train().images.dtype == torch.uint8
    assert torch.equal(own.train().images, torch.from_numpy(PIXELS))
    assert own.fingerprint() == source().fingerprint()
    assert [own.train().content(index) for index in range(12)] == [image.tobytes() for image in PIXELS]


def test_booleans_are_black_and_white() -> None:
    assert torch.equal(source(PIXELS > 99).train().images, torch.from_numpy(PIXELS > 99) * torch.tensor(255).byte())


def test_other_pixels_and_other_labels_are_other_data() -> None:
    own = source().fingerprint()
    assert source(labels=1 - KINDS).fingerprint() != own
    assert source(PIXELS[::-1].copy()).fingerprint() != own
    assert source(PIXELS.copy(), KINDS.copy()).fingerprint() == own
    stored = {"images": PIXELS.tobytes(), "labels": KINDS.astype("<i8").tobytes()}
    assert own["val"] == {part: hashlib.sha256(content).hexdigest() for part, content in stored.items()}


@pytest.mark.parametrize("off", [-0.49, 0.49])
def test_floats_become_the_nearest_bytes(off: float) -> None:
    floats = ((PIXELS + off) / 255).clip(0, 1)
    assert torch.equal(source(floats).train().images, torch.from_numpy(PIXELS))


@pytest.mark.parametrize(
    ("images", "says"),
    [
        (
            PIXELS.astype(np.uint16),
            "an image of the training split is uint16, expected uint8, or floats from 0",
        ),
        (torch.from_numpy(PIXELS).long(), "is int64, expected uint8"),
        (PIXELS.astype(np.float32), "has floats from 0 to 255, expected 0 to 1; leave out a Normalize"),
        (as_floats("f4") - 0.5, "has floats from -0.5 to 0.5, expected 0 to 1"),
        (as_floats("f4") * 1.01, "has floats from 0 to 1.01, expected 0 to 1"),
        (np.full(PIXELS.shape, np.nan), "has floats from nan to nan, expected 0 to 1"),
        (
            PIXELS.transpose(0, 2, 3, 1),
            "has images (12, 4, 4, 3), expected one for each label, (12, 3, 4, 4); re",
        ),
        (PIXELS[:5], "has images (5, 3, 4, 4), expected one for each label, (12, 3, 4, 4)"),
        (PIXELS[:, 0], "has images (12, 4, 4), expected one for each label"),
        ([[1], [1, 2]], "inhomogeneous shape"),
    ],
)
def test_other_images_are_refused_in_one_sentence(images: Any, says: str) -> None:
    with pytest.raises(InputError, match=f"^dataset: .*{re.escape(says)}"):
        source(images).train()


@pytest.mark.parametrize("images", [PIXELS.astype(np.int16), PIXELS.astype(np.float32)], ids=["integers", "floats"])
def test_the_line_that_converts_other_images_makes_bytes_of_their_range(images: Any) -> None:
    with pytest.raises(InputError) as caught:
        source(images).train()
    line = str(caught.value).rpartition("return ")[2]
    converted = eval(line, {"x": np.array([-5, -3, 0, 3, 5]), "LOW": -3, "HIGH": 3})
    assert (converted.dtype, converted.tolist()) == (np.uint8, [0, 0, 127, 255, 255])


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"])
def test_labels_of_any_width_are_int64(dtype: str) -> None:
    own = KINDS.astype(dtype)
    for labels in (own, torch.from_numpy(own), own.tolist(), np.frombuffer(own.tobytes(), own.dtype)):
        numbers = source(labels=labels).train().labels
        assert numbers.dtype == torch.int64
        assert numbers.tolist() == KINDS.tolist()


@pytest.mark.parametrize("kind", ["labels", "values"])
@pytest.mark.parametrize("dtype", ["bool", "i4", "f4", "f8"])
def test_numbers_of_labels_and_values_are_float32(kind: str, dtype: str) -> None:
    own = source(labels=SHARES.astype(dtype), kind=kind)
    assert own.train().labels.dtype == torch.float32
    assert own.train().labels.tolist() == SHARES.tolist()


@pytest.mark.parametrize(
    ("labels", "kind", "says"),
    [
        (KINDS / 1, "classes", "the classes of the training split are float64 (12,), expected integers (N,)"),
        (KINDS > 0, "classes", "are bool (12,), expected integers (N,)"),
        (["cat"] * 12, "classes", "are <U3 (12,), expected integers (N,)"),
        (KINDS + 5, "classes", "example 0 of the training split has label 5, expected 0 to 1"),
        *(
            (KINDS, kind, f"the {kind} of the training split are float32 (12,), expected floats (N, 2)")
            for kind in ("labels", "values")
        ),
        (SHARES + 5, "labels", "expected shares from 0 to 1"),
        ([[1], [1, 2]], "values", "are no array ("),
    ],
)
def test_other_labels_are_refused_in_one_sentence(labels: Any, kind: str, says: str) -> None:
    with pytest.raises(InputError, match=f"^dataset: .*{re.escape(says)}"):
        source(labels=labels, kind=kind).train()


@pytest.mark.parametrize(("kind", "labels"), [("classes", KINDS), ("labels", SHARES), ("values", SHARES / 3)])
def test_shares_folds_and_limits_hold_for_each_kind_of_targets(kind: str, labels: Any) -> None:
    folds = [source(labels=labels, kind=kind, folds=3, fold=fold) for fold in range(3)]
    evaluated = [own.eval().numbers.tolist() for own in folds]
    assert sorted(number for fold in evaluated for number in fold) == [*range(12)]
    assert all(not {*own.train().numbers.tolist()} & {*own.eval().numbers.tolist()} for own in folds)
    if kind != "values":  # as many of each in every fold
        assert [sorted(number % 2 for number in fold) for fold in evaluated] == [[0, 0, 1, 1]] * 3
    assert len(folds[0].test()) == 12
    assert len(source(labels=labels, kind=kind, val_share=0.25).train()) in (8, 9)
    limited = source(labels=labels, kind=kind, limit=4).train()
    assert len(limited) == 4
    assert torch.equal(limited.labels, source(labels=labels, kind=kind).train().labels[limited.numbers])


def test_the_number_of_classes_is_their_names_or_is_asked_for() -> None:
    own = source()
    own_class = type(own)
    del own_class.classes
    with pytest.raises(InputError, match="Own has no classes; write `classes = N` in the class"):
        own.train()
    own_class.class_names = ("a", "b")
    assert own.classes == 2


@pytest.mark.parametrize(
    ("result", "sentence"),
    [
        (KeyError("x"), r"Own.read raised KeyError: 'x' \(test_own_arrays.py, line \d+\)"),
        (None, "Own.read returns NoneType"),
        *(((PIXELS, KINDS, 1)[:number], r"Own.read returns tuple, expected \(images, labels\)") for number in (1, 3)),
    ],
    ids=["raises", "nothing", "one", "three"],
)
def test_what_read_does_wrong_is_one_sentence(result: Any, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(self: Any, train: bool) -> Any:
        if isinstance(result, Exception):
            raise result
        return result

    own = source()
    monkeypatch.setattr(type(own), "read", read)
    with pytest.raises(InputError, match=f"dataset: {sentence}"):
        own.train()
    monkeypatch.setattr(type(own), "read", lambda self, train: [PIXELS, KINDS])
    assert len(own.train()) == 12


def test_what_is_wrong_with_the_evaluation_split_is_said_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    own, wrong = source(), (PIXELS, KINDS + 5)
    monkeypatch.setattr(type(own), "read", lambda self, train: (PIXELS, KINDS) if train else wrong)
    assert len(own.train()) == 12
    with pytest.raises(InputError, match="example 0 of the evaluation split has label 5, expected 0 to 1"):
        own.eval()
    wrong = (PIXELS.astype(np.int16), KINDS)
    with pytest.raises(InputError, match="an image of the evaluation split is int16, expected uint8"):
        own.eval()


@pytest.mark.parametrize("number", [2, 3])
def test_one_column_of_numbers_is_a_list_of_them_and_of_several_none(number: int) -> None:
    own = source(labels=KINDS / 2, kind="values")
    type(own).classes = 1
    assert own.train().labels.tolist() == [[kind / 2] for kind in KINDS]
    type(own).classes = number
    with pytest.raises(InputError, match=rf"are float32 \(12,\), expected floats \(N, {number}\)"):
        own.eval()


def test_images_with_channels_last_are_told_the_line_that_moves_them_and_others_are_not() -> None:
    last = PIXELS.transpose(0, 2, 3, 1)
    for images, moved in ((last, True), (last[:, :2], False), (PIXELS[:, :2], False), (PIXELS[:, 0], False)):
        with pytest.raises(InputError) as caught:
            source(images).train()
        assert str(caught.value).endswith("; return np.moveaxis(images, -1, 1)") == moved
