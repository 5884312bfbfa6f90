"""Images of any number of channels: grey photos, arrays of NumPy, and TIFF files of several bands."""

import importlib.util
import io
import itertools
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torchvision.transforms.v2 import functional as T

import lockstep
from helpers import preprocessing, refusal, resolved, train_here
from lockstep.config.options import classes_of
from lockstep.core.errors import BrokenImage, InputError
from lockstep.data.datasets import CSV, Folder
from lockstep.data.datasets.decode import ImageFile
from lockstep.data.datasets.files import FileSplit
from lockstep.data.transforms.crops import RandomResizedCrop
from lockstep.data.transforms.policies import RandAugment, ThreeAugment, TrivialAugment
from lockstep.diagnostics.show import show
from lockstep.inference.export import export_folder
from lockstep.inference.images import files_in, stored_image

CHANNELS = 5
IMAGE = np.random.default_rng(0).integers(0, 256, (30, 22, CHANNELS), dtype=np.uint8)
Pixels = NDArray[np.uint8]


def array(pixels: Any, **options: Any) -> bytes:
    np.save(file := io.BytesIO(), pixels, **options)
    return file.getvalue()


def of_version(number: int, pixels: Pixels) -> bytes:
    np.lib.format.write_array(file := io.BytesIO(), pixels, version=(number, 0))
    return file.getvalue()


def bands(pixels: Pixels, **options: Any) -> bytes:
    options = {"photometric": "minisblack", "planarconfig": "contig", **options}
    pytest.importorskip("tifffile").imwrite(file := io.BytesIO(), pixels, **options)
    return file.getvalue()


def planes(pixels: Pixels, **options: Any) -> bytes:
    return bands(np.moveaxis(pixels, 2, 0), planarconfig="separate", **options)


FILES: dict[str, Callable[[Pixels], bytes]] = {
    "npy": array,
    "npy of version 2": lambda pixels: of_version(2, pixels),
    "npy of version 3": lambda pixels: of_version(3, pixels),
    "npy by columns": lambda pixels: array(np.asfortranarray(pixels)),
    "TIFF": bands,
    "big-endian TIFF": lambda pixels: bands(pixels, byteorder=">"),
    "big-endian big TIFF": lambda pixels: bands(pixels, byteorder=">", bigtiff=True),
    "TIFF of strips, compressed": lambda pixels: bands(pixels, rowsperstrip=7, compression="zlib", predictor=True),
    "TIFF of tiles": lambda pixels: bands(pixels, tile=(16, 16), compression="zlib"),
    "TIFF of planes": lambda pixels: planes(pixels, compression="zlib"),
    "big TIFF of planes in tiles": lambda pixels: planes(pixels, tile=(16, 16), bigtiff=True),
    "TIFF, turned": lambda pixels: bands(np.rot90(pixels), extratags=[(274, "H", 1, 6, True)], metadata=None),
}


@pytest.mark.parametrize("kind", FILES)
def test_every_channel_is_read_and_resized_as_torchvision_resizes_it_alone(kind: str) -> None:
    file = ImageFile.of(FILES[kind](IMAGE), CHANNELS)
    channels = torch.from_numpy(IMAGE).permute(2, 0, 1)
    assert np.array_equal(file.box((0, 0, 30, 22), (30, 22)), channels)
    alone = [T.resize(channel[None, 4:24, 1:21], [9, 13], antialias=True)[0] for channel in channels]
    assert np.array_equal(file.box((4, 1, 20, 20), (9, 13)), torch.stack(alone))
    assert np.array_equal(file.stored(preprocessing(22, 22, CHANNELS)), channels[:, 4:26])


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF", "BMP"])
def test_grey_is_pillows_conversion_of_the_decoded_photo(kind: str, tmp_path: Path) -> None:
    noise = Image.fromarray(IMAGE[..., :3]).resize((64, 64))
    noise.save(file := tmp_path / "noise", kind)
    with Image.open(file) as image:
        expected = np.asarray(image.convert("L"))
    how = preprocessing(64, 64, 1)
    assert np.array_equal(ImageFile.of(file.read_bytes(), 1).stored(how)[0], expected)
    assert np.array_equal(FileSplit([file], torch.tensor([0]), how).fetch([0])[0, 0], expected)


REFUSED: dict[str, tuple[Callable[[], bytes], str]] = {
    "channels first": (lambda: array(np.moveaxis(IMAGE, 2, 0)), r"\(5, 30, 22\), expected .*x 5 .*save np.moveaxis"),
    "fewer channels": (lambda: array(IMAGE[..., :2]), r"\(30, 22, 2\), expected height x width x 5 channels\)"),
    "two dimensions": (lambda: array(IMAGE[..., 0]), r"its shape is \(30, 22\), expected height x width x 5"),
    "a width of 5": (lambda: array(IMAGE[:, :5, 0]), r"its shape is \(30, 5\), expected height x width x 5"),
    "four dimensions": (lambda: array(IMAGE[None]), r"its shape is \(1, 30, 22, 5\), expected height x width x 5"),
    "no pixels": (lambda: array(IMAGE[:0]), "its header says 22x0"),
    "16 bits": (lambda: array(IMAGE.astype(np.uint16)), "its numbers are uint16, expected uint8; choose .* LOW"),
    "signed bytes": (lambda: array(IMAGE.astype(np.int8)), "its numbers are int8, expected uint8; choose .* LOW"),
    "truths": (lambda: array(IMAGE > 7), "its numbers are bool, expected uint8"),
    "a TIFF of signed bytes": (lambda: bands(IMAGE.astype(np.int8)), "its numbers are int8, expected uint8"),
    "floats": (lambda: bands(IMAGE.astype(np.float32)), "its numbers are float32, expected uint8"),
    "objects": (lambda: array(np.full((2, 2, 5), None), allow_pickle=True), "Object arrays cannot be loaded"),
    "cut": (lambda: array(IMAGE)[:-1], "expected 3300 bytes got 3299"),
    "a huge header": (
        lambda: array(IMAGE).replace(b"(30, 22, 5)", b"(30, 9999999, 5)"),
        "its pixels have 1,499,999,850 bytes, expected",
    ),
    "a huge header of floats": (
        lambda: array(IMAGE.astype(np.float64)).replace(b"(30, 22, 5)", b"(30, 999999, 5)"),
        "its pixels have 1,199,998,800 bytes, expected",
    ),
    "a damaged header": (lambda: array(IMAGE).replace(b"'shape'", b"'shapo'"), "Header does not contain"),
    "a photo": (lambda: Path(__file__).read_bytes(), "it is neither .npy nor TIFF, expected one of them for 5"),
    "a cut TIFF": (lambda: bands(IMAGE, rowsperstrip=7)[:-1], "it is cut short"),
    "pages": (lambda: bands(np.moveaxis(IMAGE, 2, 0), planarconfig=None), "one sample per pixel, expected 5"),
    "a cut TIFF of tiles": (lambda: bands(IMAGE, tile=(16, 16), compression="zlib")[:-1], "it is cut short"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_image_of_so_many_channels_is_one_sentence(kind: str) -> None:
    make, sentence = REFUSED[kind]
    pytest.importorskip("tifffile")
    with pytest.raises(InputError, match=sentence):
        stored_image(make(), preprocessing(8, 8, CHANNELS))


def test_only_what_tifffile_logs_of_our_files_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    damaged = bands(IMAGE, software="ours").replace(b"\x31\x01\x02\0", b"\x31\x01\x63\0")  # the type of the tag
    tifffile = pytest.importorskip("tifffile")
    ImageFile.of(damaged, CHANNELS).stored(preprocessing(22, 22, CHANNELS))
    assert not caplog.records
    with pytest.raises((struct.error, ValueError)):  # the library says no more of a file of four bytes
        ImageFile.of(b"II*\0", CHANNELS)
    tifffile.TiffFile(io.BytesIO(damaged)).pages.first.asarray()
    assert caplog.records


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of arrays, each with a photo beside them that is no image of five channels."""
    folder = tmp_path_factory.mktemp("bands")
    for split, label in [(split, label) for split in ("train", "val") for label in (0, 1)]:
        place = folder / split / ("crop", "forest")[label]
        place.mkdir(parents=True)
        for number in range(6):
            np.save(place / f"{number}.npy", IMAGE // 2 + 20 * number + 20 * label)
        Image.new("RGB", (8, 8)).save(place / "preview.png")
    return folder


def test_a_folder_has_the_arrays_and_counts_the_photos(root: Path) -> None:
    folder = Folder(path=str(root), channels=CHANNELS, decode_size=22)
    assert folder.train().fetch([0, 11]).shape == (2, CHANNELS, 22, 22)
    assert folder.notes()[0] == f"{root}/train: skipped 2 other files (2 .png)"
    for path in (root / "val", root / "v*", root / "val" / "*"):  # also where no shell expands a pattern
        assert len(files_in(path, CHANNELS)) == 12
        assert len(files_in(path)) == 2
    assert len(Folder(path=str(root)).train()) == 2


def test_a_class_of_arrays_alone_says_how_they_are_read(tmp_path: Path) -> None:
    (tmp_path / "train" / "a").mkdir(parents=True)
    np.save(tmp_path / "train" / "a" / "0.npy", IMAGE)
    with pytest.raises(InputError, match=r"has no images .*; \.npy files are read with dataset\.channels=N"):
        Folder(path=str(tmp_path), val_share=0.5).prepare()


def test_a_broken_array_is_skipped_like_a_broken_photo(root: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "wrong.npy", IMAGE[..., :2])
    rows = [f"{tmp_path}/wrong.npy,a,train", f"{root}/train/crop/0.npy,a,train", f"{root}/train/crop/1.npy,a,val"]
    (tmp_path / "table.csv").write_text("\n".join(["path,label,split", *rows]))
    split = CSV(path=str(tmp_path / "table.csv"), channels=CHANNELS, skip=1).train()
    names = [Path(split.name(index)).name for index in range(2)]
    with pytest.raises(BrokenImage, match=r"wrong\.npy, cannot be decoded \(its shape is \(30, 22, 2\)"):
        split.fetch([names.index("wrong.npy")])
    assert split.fetch([names.index("0.npy")]).shape[1] == CHANNELS


def test_bands_without_their_package_are_refused_with_the_command_that_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"needs the package tifffile.*pip install"):
        stored_image(b"II*\0", preprocessing(8, 8, CHANNELS))


@pytest.mark.parametrize(
    ("augment", "says"),
    [
        (TrivialAugment(), "the operations of TrivialAugment are defined for grey and RGB.*use augment=standard"),
        (RandAugment(), "the operations of RandAugment are defined for grey and RGB"),
        (RandomResizedCrop(jitter=0.4), r"augment\.jitter=0\.4 is defined for .* 5 channels: augment\.jitter=0"),
        (RandomResizedCrop(solarize=0.1), r"augment\.solarize=0\.1 is defined for grey and RGB"),
        (RandomResizedCrop(grey=0.1), r"augment\.grey=0\.1 needs red, green and blue"),
    ],
)
def test_operations_on_colours_are_refused_for_other_channels(augment: RandomResizedCrop, says: str) -> None:
    with pytest.raises(InputError, match=says):
        augment.check_channels(CHANNELS)
    RandomResizedCrop(blur=0.5).check_channels(CHANNELS)
    RandAugment().check_channels(1)


@pytest.mark.parametrize("cls", [cls for cls in classes_of("augment").values() if hasattr(cls, "grey")])
def test_every_augmentation_with_a_share_of_grey_images_needs_three_channels(cls: type[RandomResizedCrop]) -> None:
    cls(grey=0.1).check_channels(3)
    with pytest.raises(InputError, match=r"augment(\.grey|=three_augment).* needs red, green and blue"):
        cls(grey=0.1).check_channels(1)


def test_a_policy_of_colours_proposes_for_bands_what_takes_bands() -> None:
    for policy, channels in itertools.product((ThreeAugment, RandAugment, TrivialAugment), (2, 4, 5)):
        remedy = f"the images have {channels} channels; use augment=standard or augment=crop_flip"
        with pytest.raises(InputError, match=remedy):
            policy(jitter=0.0).check_channels(channels)
    for jitter in (0.0, 0.3):
        with pytest.raises(InputError, match="the images have 1 channel; use augment=trivialaugment"):
            ThreeAugment(jitter=jitter).check_channels(1)


@pytest.mark.parametrize(("channels", "shape"), [(1, (6, 10)), (3, (6, 10, 3)), (5, (6, 10, 5))])
def test_an_image_in_memory_is_the_one_of_its_file(channels: int, shape: tuple[int, ...], tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    how = preprocessing(4, 4, channels)
    if channels == 5:
        np.save(file := tmp_path / "image.npy", pixels)
    else:
        Image.fromarray(pixels).save(file := tmp_path / "image.png")
    assert torch.equal(stored_image(pixels, how), stored_image(file, how))


def test_means_and_augmentations_of_photos_are_refused_before_there_is_a_run(root: Path, tmp_path: Path) -> None:
    job = ("dataset=folder", f"dataset.path={root}", "dataset.channels=5")
    assert "use augment=standard" in refusal(tmp_path / "outputs", *job, "augment=augmix")
    assert "but the images have 5 channels" in refusal(tmp_path / "outputs", *job, "input.std=[1,1,1]")


@pytest.mark.parametrize(("channels", "mean"), [(3, [0.485, 0.456, 0.406]), (1, [0.449]), (5, [0.449] * 5)])
def test_other_channels_have_the_average_of_the_colours(channels: int, mean: list[float], root: Path) -> None:
    words = ("dataset=folder", f"dataset.path={root}", f"dataset.channels={channels}")
    assert resolved(*words).input.mean == pytest.approx(mean)
    std = {3: [0.229, 0.224, 0.225], 1: [0.226], 5: [0.226] * 5}[channels]
    assert resolved(*words).input.std == pytest.approx(std)


def test_a_model_of_five_channels_is_used_like_any_other(root: Path, tmp_path: Path) -> None:
    words = ("dataset=folder", f"dataset.path={root}", "dataset.channels=5", "dataset.decode_size=16")
    run = train_here(tmp_path / "run", *words, "model=test_resnet", "batch=6", "steps=2", "logger=jsonl")
    predictor = lockstep.load(run.path, device="cpu")
    pixels, file = np.load(root / "val/crop/3.npy"), root / "val/crop/3.npy"
    expected = predictor.predict(file)[0].probabilities
    for form in (file.read_bytes(), pixels, torch.from_numpy(pixels).permute(2, 0, 1)):
        assert torch.equal(predictor.predict(form)[0].probabilities, expected)
    export_folder(predictor, run, tmp_path / "timm")
    assert "Images: 5x16x16 (channels, height, width)" in (tmp_path / "timm" / "README.md").read_text()
    show((*words, "augment=none", "batch=6"), images=1, epochs=1, out=str(tmp_path / "show.png"))


def test_a_file_of_several_bands_that_is_read_as_a_photo_names_the_key_for_it(tmp_path: Path) -> None:
    formats = "JPEG, PNG, WEBP, GIF, BMP, DIB, PPM, TIFF, AVIF"
    hint = "; a TIFF of several bands is read with dataset.channels=N"
    for content, words in ((bands(IMAGE), hint), (bands(IMAGE, byteorder=">"), hint), (array(IMAGE), "")):
        with pytest.raises(ValueError, match=r"^cannot identify image file") as caught:
            ImageFile.of(content)
        assert str(caught.value) == f"cannot identify image file, expected one of {formats}{words}"
