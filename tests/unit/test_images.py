"""An image of a user becomes one as the data set stored its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.inference.images import stored_image

RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


def stripes(*colours: tuple[tuple[int, int, int], int], height: int = 8) -> Image.Image:
    """Stripes of colours from left to right, each of a width."""
    row = [colour for colour, width in colours for _ in range(width)]
    return Image.fromarray(np.array([row] * height, dtype=np.uint8))


def test_the_centre_of_a_wide_image_is_kept() -> None:
    stored = stored_image(stripes((RED, 6), (GREEN, 12), (BLUE, 6)), (3, 8, 12))
    assert torch.equal(stored, torch.tensor(GREEN, dtype=torch.uint8)[:, None, None].expand(3, 8, 12))


def test_an_image_is_cut_to_the_ratio_of_the_stored_ones_and_not_to_its_inverse() -> None:
    tall = stripes((RED, 2), (GREEN, 8), (RED, 2), height=24).rotate(90, expand=True)  # 12 high, 24 wide
    assert tall.size == (24, 12)
    stored = stored_image(tall, (3, 4, 12))
    assert stored.shape == (3, 4, 12)
    assert stored[1].float().mean() > 250
    assert stored[0].float().mean() < 5


def test_a_photo_is_upright_as_its_camera_says() -> None:
    image = stripes((RED, 4), (GREEN, 4))
    image.getexif()[0x0112] = 6  # to be turned clockwise
    stored = stored_image(image, (3, 8, 8))
    assert torch.equal(stored[0, 0], torch.full((8,), 255, dtype=torch.uint8)), "the left side is now at the top"
    assert torch.equal(stored[1, -1], torch.full((8,), 255, dtype=torch.uint8))


@pytest.mark.parametrize(("colour", "luminance"), [(RED, 76), (GREEN, 150), (BLUE, 29), ((90, 90, 90), 90)])
def test_grey_is_the_luminance(colour: tuple[int, int, int], luminance: int) -> None:
    image = stripes((colour, 8))
    assert stored_image(image, (1, 8, 8)).unique().tolist() == [luminance]
    assert stored_image(image, (1, 8, 8)).unique().tolist() == [int(np.array(image.convert("L"))[0, 0])]
