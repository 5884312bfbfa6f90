"""The log of the samples that a rank trained on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from helpers import train_here
from lockstep.telemetry.sinks import fingerprints


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_hash_is_of_the_pixels_and_their_places_and_not_of_batch_or_memory_order(dtype: torch.dtype) -> None:
    images = torch.rand(6, 3, 5, 4, dtype=dtype, generator=torch.Generator().manual_seed(0))
    whole = fingerprints(images)
    assert whole.dtype == torch.int64
    assert torch.equal(torch.cat([fingerprints(images[at : at + 1]) for at in range(6)]), whole)
    assert torch.equal(fingerprints(images.contiguous(memory_format=torch.channels_last)), whole)
    changed = images.clone()
    changed[:, 2, 4, 3] = torch.nextafter(changed[:, 2, 4, 3], torch.tensor(2.0, dtype=dtype))
    for altered in (images.flip(-1), images.roll(1, 2), changed):
        assert not (fingerprints(altered) == whole).any()


@pytest.mark.parametrize("mixup", [0.0, 0.2])
def test_a_run_leaves_broken_images_out_and_says_how_many(
    tmp_path: Path, mixup: float, capsys: pytest.CaptureFixture[str]
) -> None:
    photos = tmp_path / "photos"
    for number in range(24):
        path = photos / ("train", "val")[number % 2] / ("a", "b")[number // 2 % 2] / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8, 3), 10 * number, dtype=np.uint8)).save(path)
    (photos / "train" / "a" / "04.png").write_bytes(b"")
    (photos / "val" / "b" / "07.png").write_bytes(b"")
    data = ("dataset=folder", f"dataset.path={photos}", "dataset.decode_size=8", "dataset.skip=5")
    run = train_here(
        tmp_path / "run", *data, f"train.mixup={mixup}", "loss.label_smoothing=0.1", "batch=5", "epochs=2"
    )
    assert run.read_summary()["skipped"] == 2
    assert capsys.readouterr().out.count("of at most 5") == 2
